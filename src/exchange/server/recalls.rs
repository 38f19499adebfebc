//! Recalls leases of peers that have lost their right to the memory, and ends them.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::audit::LeaseOf;
use super::state::{ServerState, millis};
use crate::Who;
use crate::protocol::{Event, Withdrawing};

/// Leases that were recalled one by one, and when each ends.
#[derive(Debug, Default)]
pub(super) struct Recalls {
    leases: HashMap<u64, Instant>,
    due: BTreeSet<(Instant, u64)>,
}

impl Recalls {
    /// Sets when the lease ends; an earlier recall's earlier time stays.
    fn add(&mut self, lease: u64, until: Instant) -> Instant {
        let until = self.leases.get(&lease).map_or(until, |&was| was.min(until));
        self.remove(lease);
        self.leases.insert(lease, until);
        self.due.insert((until, lease));
        until
    }

    /// Removes a lease that has ended, or whose peer may keep the memory.
    pub fn remove(&mut self, lease: u64) -> bool {
        let until = self.leases.remove(&lease);
        until.is_some_and(|until| self.due.remove(&(until, lease)))
    }

    /// Returns when the lease ends.
    pub fn until(&self, lease: u64) -> Option<Instant> {
        self.leases.get(&lease).copied()
    }

    /// Returns when the next one ends.
    pub fn deadline(&self) -> Option<Instant> {
        self.due.first().map(|&(until, _)| until)
    }

    /// Takes the leases that end now.
    pub fn take_due(&mut self, now: Instant) -> Vec<u64> {
        let mut found = Vec::new();
        while let Some(&(until, lease)) = self.due.first()
            && until <= now
        {
            self.remove(lease);
            found.push(lease);
        }
        found
    }
}

impl ServerState {
    /// Changes which peers may import a publication. Recalls the leases of peers that no longer may; they end
    /// after `within`.
    pub fn set_who(&mut self, id: u64, who: Who, within: Duration) {
        let now = Instant::now();
        let Some(until) = now.checked_add(within) else {
            return self.change(id, |registered| registered.who = who);
        };
        let mut kept = Vec::new();
        for holder in self.leases.holders(id).0 {
            if who.admits(&holder.peer) {
                kept.push(holder.lease);
                continue;
            }
            let Some(session) = self.leases.recall(holder.lease) else {
                continue;
            };
            let until = self.recalls.add(holder.lease, until);
            if let Some(session) = self.sessions.get(session) {
                let found = self.publications.get(&id).map(|found| &found.publication);
                let of = LeaseOf::new(holder.lease, found.map(|found| &**found));
                self.audit
                    .lease("withdrawing", session.id, &session.peer, of);
                session.tell(Event::Withdrawing(Withdrawing {
                    lease: holder.lease,
                    ms: millis(until.saturating_duration_since(now)),
                }));
            }
        }
        kept.into_iter().for_each(|lease| {
            self.recalls.remove(lease);
        });
        self.change(id, |registered| registered.who = who);
    }
}
