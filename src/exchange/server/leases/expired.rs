//! Expired leases whose holders may still have the memory mapped, until the server knows that they cannot.

use super::{Leases, MAX_EXPIRED};

impl Leases {
    /// Forgets the oldest of surplus expired leases: they are then only counted. Leases of processes that have
    /// ended are not among them, because the server follows the processes of silent holders.
    pub fn thin_out(&mut self) {
        for publication in std::mem::take(&mut self.crowded) {
            let Some(holders) = self.publications.get_mut(&publication) else {
                continue;
            };
            let mut oldest: Vec<u64> = holders.expired.iter().copied().collect();
            oldest.sort_by_cached_key(|lease| self.leases.get(lease).map(|l| l.holder.since));
            oldest.truncate(oldest.len().saturating_sub(MAX_EXPIRED));
            holders.more += oldest.len();
            for lease in &oldest {
                holders.expired.remove(lease);
            }
            for lease in oldest {
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
        // The table has no entries without holders.
        self.publications.contains_key(&publication)
    }
}
