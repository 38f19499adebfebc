//! What becomes of expired leases: their holders may still have the memory mapped, until it is known
//! that they cannot.

use std::collections::HashSet;

use super::super::process::Process;
use super::{HolderState, Holders, Lease, Leases, MAX_EXPIRED};

impl Leases {
    /// Expired leases of a publication whose holders' processes are known.
    pub fn silent(&self, publication: u64) -> Vec<(u64, Process)> {
        let expired = self.publications.get(&publication).map(|h| &h.expired);
        let known = |&lease: &u64| Some((lease, self.leases.get(&lease)?.process?));
        expired.into_iter().flatten().filter_map(known).collect()
    }

    /// Forgets an expired lease: its holder is no more.
    pub fn dismiss(&mut self, lease: u64) {
        let expired = |entry: &Lease| entry.holder.state == HolderState::Expired;
        if self.leases.get(&lease).is_some_and(expired) {
            self.remove(lease);
        }
    }

    /// Forgets the expired leases of a publication whose holders' machines have started anew.
    pub fn dismiss_restarted(&mut self, publication: u64) {
        let expired = self.publications.get(&publication).map(|h| &h.expired);
        let restarted = |lease: &&u64| {
            self.leases.get(lease).is_some_and(|entry| {
                let machine = entry.machine.as_ref();
                machine.is_some_and(|m| self.machines.have_restarted(&entry.holder.peer, m))
            })
        };
        let gone: Vec<u64> = expired
            .into_iter()
            .flatten()
            .filter(restarted)
            .copied()
            .collect();
        gone.into_iter().for_each(|lease| self.dismiss(lease));
    }

    /// Whether somebody holds a publication or may hold it, for all that is known.
    pub fn is_held(&self, publication: u64) -> bool {
        let held = |h: &Holders| !h.live.is_empty() || !h.expired.is_empty() || h.more > 0;
        self.publications.get(&publication).is_some_and(held)
    }

    /// Whether there are more expired leases than are to be remembered.
    pub fn is_crowded(&self) -> bool {
        !self.crowded.is_empty()
    }

    /// Processes of expired leases of which there are more than are to be remembered, each once.
    pub fn crowd(&self) -> HashSet<Process> {
        let silent = |&publication: &u64| self.silent(publication);
        let all = self.crowded.iter().flat_map(silent);
        all.map(|(_, process)| process).collect()
    }

    /// Remembers no more expired leases than are to be: first those of processes that have `ended` are
    /// only counted, then the oldest.
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
            while holders.expired.len() > MAX_EXPIRED
                && let Some(oldest) = holders.expired.pop_first()
            {
                over.push(oldest);
                holders.more += 1;
            }
            for lease in over {
                self.leases.remove(&lease);
            }
        }
    }
}
