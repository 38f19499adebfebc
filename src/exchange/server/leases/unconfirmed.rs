//! Expired leases whose holders may still have the memory mapped, until the server knows that they cannot.

use super::{HolderState, Holders, Leases};

impl Leases {
    /// Forgets an expired lease: its holder no longer exists.
    fn dismiss(&mut self, lease: u64) {
        let state = self.leases.get(&lease).map(|entry| entry.holder.state);
        if state == Some(HolderState::Expired) {
            self.remove(lease);
        }
    }

    /// Forgets the expired leases of a publication whose holders' machines have restarted.
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

    /// Returns whether a publication has holders, or may have them.
    pub fn is_held(&self, publication: u64) -> bool {
        let held = |h: &Holders| !h.live.is_empty() || !h.expired.is_empty() || h.more > 0;
        self.publications.get(&publication).is_some_and(held)
    }
}
