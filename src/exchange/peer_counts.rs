//! Counts for each peer.

use std::collections::HashMap;

use super::PeerName;
use super::account::shrink;

/// Counts for each peer and in all; peers with a count of 0 are not stored.
#[derive(Debug, Default)]
pub(super) struct PeerCounts {
    peers: HashMap<PeerName, usize>,
    all: usize,
}

impl PeerCounts {
    /// Returns the count of all peers.
    pub fn all(&self) -> usize {
        self.all
    }

    /// Returns the count of a peer.
    pub fn of(&self, peer: &PeerName) -> usize {
        self.peers.get(peer).copied().unwrap_or(0)
    }

    /// Raises the count of a peer.
    pub fn add(&mut self, peer: &PeerName, count: usize) {
        if count > 0 {
            *self.peers.entry(peer.clone()).or_default() += count;
            self.all += count;
        }
    }

    /// Lowers the count of a peer, at most to 0.
    pub fn take(&mut self, peer: &PeerName, count: usize) {
        let Some(has) = self.peers.get_mut(peer) else {
            return;
        };
        let count = count.min(*has);
        *has -= count;
        self.all -= count;
        if *has == 0 {
            self.peers.remove(peer);
            shrink(&mut self.peers);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_kept_of_peers_without_any() {
        let (one, other) = (PeerName::User(1), PeerName::User(2));
        let mut counts = PeerCounts::default();
        counts.add(&one, 2);
        counts.add(&other, 0);
        counts.add(&one, 1);
        assert_eq!(
            (counts.of(&one), counts.of(&other), counts.all()),
            (3, 0, 3)
        );
        counts.take(&other, 1);
        counts.take(&one, 2);
        assert_eq!(
            (counts.of(&one), counts.all(), counts.peers.len()),
            (1, 1, 1)
        );
        counts.take(&one, 9);
        assert_eq!(
            (counts.of(&one), counts.all(), counts.peers.len()),
            (0, 0, 0)
        );
    }
}
