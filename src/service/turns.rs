//! Bounds the creations that run at once, each in a thread: tokio has 512 threads for all blocking work of the process.
//! Further ones wait as tasks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::exchange::PeerName;
use crate::per_driver::lock;

/// Creations of one peer that run at once.
const OF_PEER: usize = 8;
/// Creations of all peers that run at once.
const OF_ALL: usize = 64;

/// Gives turns in the order in which they are asked for, those of a peer among its own.
#[derive(Debug)]
pub(super) struct Turns {
    all: Arc<Semaphore>,
    peers: Mutex<HashMap<PeerName, Weak<Semaphore>>>,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            all: Arc::new(Semaphore::new(OF_ALL)),
            peers: Mutex::default(),
        }
    }
}

/// A creation that runs until this is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    _all: Option<OwnedSemaphorePermit>,
    _peer: Option<OwnedSemaphorePermit>,
}

impl Turns {
    /// Waits until a creation of this peer may run.
    pub async fn turn(&self, peer: &PeerName) -> Turn {
        let own = {
            let mut peers = lock(&self.peers);
            peers.retain(|_, own| own.strong_count() > 0);
            let known = peers.get(peer).and_then(Weak::upgrade);
            let own = known.unwrap_or_else(|| Arc::new(Semaphore::new(OF_PEER)));
            peers.insert(peer.clone(), Arc::downgrade(&own));
            own
        };
        // The peer's own first, so that none waits in the queue of all with more. Neither is ever closed.
        let peer = own.acquire_owned().await.ok();
        let all = Arc::clone(&self.all).acquire_owned().await.ok();
        Turn {
            _all: all,
            _peer: peer,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// Returns the turn if it need not be waited for.
    fn now(turns: &Turns, uid: u32) -> Option<Turn> {
        let peer = PeerName::User(uid);
        let mut turn = std::pin::pin!(turns.turn(&peer));
        match turn.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(turn) => Some(turn),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_peer_has_so_many_turns_and_all_have_more() {
        let turns = Turns::default();
        let mut first: Vec<_> = (0..OF_PEER).map(|_| now(&turns, 1).unwrap()).collect();
        assert!(now(&turns, 1).is_none());
        assert!(now(&turns, 2).is_some(), "another peer's");
        first.pop();
        first.push(now(&turns, 1).unwrap());
        let others: Vec<_> = (OF_PEER..OF_ALL)
            .map(|at| now(&turns, 2 + (at / OF_PEER) as u32).unwrap())
            .collect();
        assert!(now(&turns, 99).is_none());
        drop((first, others));
        assert!(now(&turns, 99).is_some());
        assert_eq!(lock(&turns.peers).len(), 1);
    }
}
