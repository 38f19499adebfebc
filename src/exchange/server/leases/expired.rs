//! Limits how many expired leases are remembered individually.

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
}
