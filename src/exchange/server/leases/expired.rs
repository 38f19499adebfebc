//! Expired leases whose holders may still have the memory mapped, until the server knows that they cannot.

use std::collections::HashSet;

use super::super::process::Process;
use super::{Holders, Leases, MAX_EXPIRED};

impl Leases {
    /// Returns the expired leases of a publication whose holders' processes are known.
    pub(super) fn silent(&self, publication: u64) -> Vec<(u64, Process)> {
        let expired = self.publications.get(&publication).map(|h| &h.expired);
        let known = |&lease: &u64| Some((lease, self.leases.get(&lease)?.process?));
        expired.into_iter().flatten().filter_map(known).collect()
    }

    /// Returns whether there are more expired leases than are to be remembered.
    pub fn is_crowded(&self) -> bool {
        !self.crowded.is_empty()
    }

    /// Returns the processes of expired leases in publications that have too many, each once.
    pub fn crowd(&self) -> HashSet<Process> {
        let silent = |&publication: &u64| self.silent(publication);
        let all = self.crowded.iter().flat_map(silent);
        all.map(|(_, process)| process).collect()
    }

    /// Forgets surplus expired leases: first those of processes that have `ended`, then the oldest, which are
    /// then only counted.
    pub fn thin_out(&mut self, ended: &HashSet<Process>) {
        for publication in std::mem::take(&mut self.crowded) {
            let Some(holders) = self.publications.get_mut(&publication) else {
                continue;
            };
            let have_ended = |lease: &u64| {
                let process = self.leases.get(lease).and_then(|entry| entry.process);
                process.is_some_and(|process| ended.contains(&process))
            };
            let mut over: Vec<u64> = holders.expired.iter().copied().filter(have_ended).collect();
            holders.expired.retain(|lease| !have_ended(lease));
            holders.ended += over.len();
            let mut oldest: Vec<u64> = holders.expired.iter().copied().collect();
            oldest.sort_by_cached_key(|lease| self.leases.get(lease).map(|l| l.holder.since));
            oldest.truncate(oldest.len().saturating_sub(MAX_EXPIRED));
            holders.more += oldest.len();
            for lease in oldest {
                holders.expired.remove(&lease);
                over.push(lease);
            }
            for lease in over {
                let process = self.leases.remove(&lease).and_then(|entry| entry.process);
                self.unfollow(process, lease);
            }
        }
    }

    /// Forgets the expired leases of a publication whose holders' machines have restarted.
    pub fn dismiss_restarted(&mut self, publication: u64) {
        let expired = self.publications.get(&publication).map(|h| &h.expired);
        let restarted = |lease: &u64| {
            self.leases.get(lease).is_some_and(|entry| {
                let machine = entry.machine.as_ref();
                machine.is_some_and(|m| self.machines.have_restarted(&entry.holder.peer, m))
            })
        };
        let gone = expired.into_iter().flatten().copied().filter(restarted);
        for lease in gone.collect::<Vec<_>>() {
            self.remove(lease);
        }
    }

    /// Returns whether a publication has holders, or may have them.
    pub fn is_held(&self, publication: u64) -> bool {
        let held = |h: &Holders| !h.live.is_empty() || !h.expired.is_empty() || h.more > 0;
        self.publications.get(&publication).is_some_and(held)
    }
}
