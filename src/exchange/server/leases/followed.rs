//! Leases of silent holders. The server follows their processes: after the end of a process, its memory is
//! no longer mapped.

use std::collections::BTreeSet;
use std::collections::hash_map::Entry;
use std::convert::Infallible;

use tokio::sync::oneshot;

use super::super::process::Process;
use super::{HolderState, LeaseRecord, Leases};
use crate::account::shrink;

/// The leases of one process that are followed.
#[derive(Debug, Default)]
pub(super) struct Followed {
    leases: BTreeSet<u64>,
    /// Dropped with this entry, which stops the task that waits for the process.
    watched: Option<oneshot::Sender<Infallible>>,
}

/// A process to wait for, and a receiver that fails when none of its leases is followed.
pub(crate) type Unwatched = (Process, oneshot::Receiver<Infallible>);

impl Leases {
    /// Follows the leases of a session whose connection has ended.
    pub fn follow(&mut self, session: u64) {
        let leases: Vec<u64> = self.of_session(session).map(|l| l.holder.lease).collect();
        leases.into_iter().for_each(|l| self.follow_lease(l));
    }

    /// Follows a lease with a silent holder, if its process is known.
    pub fn follow_lease(&mut self, lease: u64) {
        let Some(process) = self.leases.get(&lease).and_then(|entry| entry.process) else {
            return;
        };
        let followed = self.followed.entry(process).or_default();
        followed.leases.insert(lease);
        if followed.watched.is_none() {
            self.unwatched.insert(process);
        }
    }

    /// Stops following the leases of a session: it has a connection again.
    pub(super) fn unfollow_session(&mut self, session: u64) {
        let known = self.of_session(session);
        let known: Vec<_> = known.map(|l| (l.process, l.holder.lease)).collect();
        for (process, lease) in known {
            self.unfollow(process, lease);
        }
    }

    /// Stops following a lease of this process.
    pub(super) fn unfollow(&mut self, process: Option<Process>, lease: u64) {
        let Some(process) = process else { return };
        let Entry::Occupied(mut followed) = self.followed.entry(process) else {
            return;
        };
        followed.get_mut().leases.remove(&lease);
        if followed.get().leases.is_empty() {
            followed.remove();
            self.unwatched.remove(&process);
            shrink(&mut self.followed);
        }
    }

    /// Takes the processes that no task waits for yet: call [`ended`](Self::ended) for each after its end.
    pub fn take_unwatched(&mut self) -> Vec<Unwatched> {
        let unwatched = std::mem::take(&mut self.unwatched).into_iter();
        let watch = unwatched.filter_map(|process| {
            let (sender, receiver) = oneshot::channel();
            self.followed.get_mut(&process)?.watched = Some(sender);
            Some((process, receiver))
        });
        watch.collect()
    }

    /// Ends the followed leases of a process that has ended; returns them. Leases of a session with a
    /// connection do not end: another process has its socket, and may have the memory.
    pub fn ended(&mut self, process: Process) -> Vec<LeaseRecord> {
        self.unwatched.remove(&process);
        let followed = self.followed.remove(&process).unwrap_or_default();
        let over = followed.leases.into_iter().filter(|lease| {
            self.leases.get(lease).is_some_and(|entry| {
                let detached = !self.sessions.contains_key(&entry.session)
                    || self.deadlines.get(entry.session).is_some();
                let expired = entry.holder.state == HolderState::Expired;
                entry.process == Some(process) && (expired || detached)
            })
        });
        let over: Vec<u64> = over.collect();
        over.into_iter().filter_map(|l| self.remove(l)).collect()
    }
}
