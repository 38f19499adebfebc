//! Which rounds each session and each peer is in, so that their number can be limited.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::round::{Asker, Seat, Stay};
use crate::PeerName;

/// The rounds of every session and of every peer.
#[derive(Default)]
pub(super) struct Present {
    /// The rounds in which a session has a seat.
    sessions: HashMap<u64, BTreeSet<u64>>,
    /// The rounds in which a peer has ranks that have neither left nor are lost, with their number. A round
    /// that only other peers' ranks keep open does not count against it.
    peers: HashMap<PeerName, BTreeMap<u64, u32>>,
}

impl Present {
    /// Records a taken seat.
    pub fn enter(&mut self, asker: &Asker, round: u64) {
        self.sessions
            .entry(asker.session)
            .or_default()
            .insert(round);
        let peer = self.peers.entry(asker.peer.clone()).or_default();
        *peer.entry(round).or_default() += 1;
    }

    /// Records that a rank has left or is lost; its seat is kept.
    pub fn leave(&mut self, asker: &Asker, round: u64) {
        let Some(rounds) = self.peers.get_mut(&asker.peer) else {
            return;
        };
        if let Some(ranks) = rounds.get_mut(&round) {
            *ranks -= 1;
            if *ranks == 0 {
                rounds.remove(&round);
            }
        }
        if rounds.is_empty() {
            self.peers.remove(&asker.peer);
        }
    }

    /// Records a removed seat.
    pub fn remove(&mut self, seat: &Seat, round: u64) {
        let session = seat.asker.session;
        if let Some(rounds) = self.sessions.get_mut(&session) {
            rounds.remove(&round);
            if rounds.is_empty() {
                self.sessions.remove(&session);
            }
        }
        if seat.stay == Stay::Here {
            self.leave(&seat.asker, round);
        }
    }

    /// Removes a session that has ended, and returns its rounds.
    pub fn gone(&mut self, session: u64) -> BTreeSet<u64> {
        self.sessions.remove(&session).unwrap_or_default()
    }

    /// Returns the number of rounds that a session is in.
    pub fn of_session(&self, session: u64) -> usize {
        self.sessions.get(&session).map_or(0, BTreeSet::len)
    }

    /// Returns the number of rounds that a peer is in, not counting `beside`.
    pub fn of_peer(&self, peer: &PeerName, beside: Option<u64>) -> usize {
        let Some(rounds) = self.peers.get(peer) else {
            return 0;
        };
        let counted = beside.is_some_and(|round| rounds.contains_key(&round));
        rounds.len() - usize::from(counted)
    }

    /// Whether no session and no peer is in any round.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty() && self.peers.is_empty()
    }
}
