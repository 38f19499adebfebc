//! Leases of processes that have ended: nobody has their memory mapped any more.

use std::collections::BTreeSet;

use super::super::process::Process;
use super::{HolderState, Lease, Leases};

impl Leases {
    /// Takes note of the leases of a session whose connection has ended. Returns their processes that
    /// were not followed before: [`ended`](Self::ended) is to be called for each.
    pub fn follow(&mut self, session: u64) -> Vec<Process> {
        let of_session = self.of_session(session);
        let known = of_session.filter_map(|lease| Some((lease.holder.lease, lease.process?)));
        let known: Vec<_> = known.collect();
        let mut new = Vec::new();
        for (_, process) in &known {
            let followed = self.followed.entry(*process).or_insert_with(|| {
                new.push(*process);
                BTreeSet::new()
            });
            // Others were released since.
            followed.retain(|lease| self.leases.contains_key(lease));
        }
        for (lease, process) in known {
            self.followed.entry(process).or_default().insert(lease);
        }
        new
    }

    /// A process has ended: returns its leases that are followed, which end. Those of a session with a
    /// connection do not: another process has its socket, and may have the memory.
    pub fn ended(&mut self, process: Process) -> Vec<Lease> {
        let leases = self.followed.remove(&process).unwrap_or_default();
        let over = leases.into_iter().filter(|lease| {
            self.leases.get(lease).is_some_and(|entry| {
                let session = self.sessions.get(&entry.session);
                let detached = session.is_none_or(|session| session.until.is_some());
                let expired = entry.holder.state == HolderState::Expired;
                entry.process == Some(process) && (expired || detached)
            })
        });
        let over: Vec<u64> = over.collect();
        over.into_iter().filter_map(|l| self.remove(l)).collect()
    }
}
