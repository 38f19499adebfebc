//! In which rounds sessions and peers are: what they may have is limited.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::round::{Asker, Seat, Stay};
use crate::exchange::PeerName;

/// The rounds of every session and of every peer.
#[derive(Default)]
pub(super) struct Present {
    /// Those in which a session has a seat.
    sessions: HashMap<u64, BTreeSet<u64>>,
    /// Those in which a peer has ranks that have neither left nor are lost, and how many: a round
    /// that others keep is not its own to answer for.
    peers: HashMap<PeerName, BTreeMap<u64, u32>>,
}

impl Present {
    /// A seat is taken.
    pub fn enter(&mut self, asker: &Asker, round: u64) {
        self.sessions
            .entry(asker.session)
            .or_default()
            .insert(round);
        let peer = self.peers.entry(asker.peer.clone()).or_default();
        *peer.entry(round).or_default() += 1;
    }

    /// A rank has left, or is lost; its seat is kept.
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

    /// A seat is no more.
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

    /// The rounds of a session, which is no more.
    pub fn gone(&mut self, session: u64) -> BTreeSet<u64> {
        self.sessions.remove(&session).unwrap_or_default()
    }

    /// How many rounds a session is in.
    pub fn of_session(&self, session: u64) -> usize {
        self.sessions.get(&session).map_or(0, BTreeSet::len)
    }

    /// How many rounds a peer is in, beside this one.
    pub fn of_peer(&self, peer: &PeerName, beside: Option<u64>) -> usize {
        let Some(rounds) = self.peers.get(peer) else {
            return 0;
        };
        let counted = beside.is_some_and(|round| rounds.contains_key(&round));
        rounds.len() - usize::from(counted)
    }

    /// Whether nobody is in any round.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty() && self.peers.is_empty()
    }
}
