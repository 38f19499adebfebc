//! What a follow's task and its caller share: at most one state that waits to be returned.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};

use super::Absence;
use super::generation::Generation;
use crate::Error;
use crate::exchange::client::{LeaseState, RemoteBuffer};

/// A state that is to be returned.
#[derive(Debug)]
pub(super) enum Offer {
    Memory(Box<RemoteBuffer>, Generation),
    Gone(Absence),
    End(Error),
}

/// Memory that was returned, and its lease, which the caller may have released since.
#[derive(Clone, Debug)]
pub(super) struct Returned {
    pub(super) generation: Generation,
    lease: watch::Receiver<LeaseState>,
}

/// What the caller was told last.
#[derive(Clone, Debug, Default)]
pub(super) enum Told {
    #[default]
    Nothing,
    Gone,
    Memory,
}

/// What the task needs to know of the other side.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    /// Whether the caller waits, or gave up waiting.
    pub(super) wanted: bool,
    pub(super) told: Told,
    /// The memory that was returned last, also after it was told to be gone.
    pub(super) returned: Option<Returned>,
    pub(super) offered: Offered,
}

/// What is offered and not yet returned.
#[derive(Clone, Debug, Default)]
pub(super) enum Offered {
    #[default]
    Nothing,
    Gone,
    Memory(Returned),
}

#[derive(Debug, Default)]
struct State {
    wanted: bool,
    told: Told,
    returned: Option<Returned>,
    offer: Option<Offer>,
}

/// The newest state, until the caller takes it.
#[derive(Debug, Default)]
pub(super) struct Slot {
    state: Mutex<State>,
    /// There is an offer.
    filled: Notify,
    /// The caller wants something, or has taken something.
    asked: Notify,
}

impl Returned {
    fn new(memory: &RemoteBuffer, generation: &Generation) -> Self {
        Self {
            generation: generation.clone(),
            lease: memory.lease_states(),
        }
    }

    /// What was last said of the lease. A lease that the caller has released stays as it was.
    pub(super) fn state(&self) -> LeaseState {
        self.lease.borrow().clone()
    }

    /// Whether the exporter still keeps the memory for the caller, as far as is known.
    pub(super) fn is_held(&self) -> bool {
        *self.lease.borrow() == LeaseState::Held
    }

    /// Waits until the lease stands otherwise than `seen`; for ever where it was released or is lost.
    pub(super) async fn changed(mut self, seen: LeaseState) {
        if self.lease.wait_for(|state| *state != seen).await.is_err() {
            std::future::pending().await
        }
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The caller wants the next state.
    pub(super) fn want(&self) {
        self.lock().wanted = true;
        self.asked.notify_one();
    }

    /// Takes the offer, which is told then.
    pub(super) fn take(&self) -> Option<Offer> {
        let mut state = self.lock();
        let offer = state.offer.take()?;
        state.wanted = false;
        match &offer {
            Offer::Memory(memory, generation) => {
                state.told = Told::Memory;
                state.returned = Some(Returned::new(memory, generation));
            }
            Offer::Gone(_) => state.told = Told::Gone,
            Offer::End(_) => {}
        }
        drop(state);
        self.asked.notify_one();
        Some(offer)
    }

    /// Waits until there may be an offer.
    pub(super) async fn offered(&self) {
        self.filled.notified().await;
    }

    /// Waits until the caller may want something, or have taken something.
    pub(super) async fn asked(&self) {
        self.asked.notified().await;
    }

    /// Puts an offer in the place of the one before, which it returns.
    pub(super) fn put(&self, offer: Offer) -> Option<Offer> {
        let before = self.lock().offer.replace(offer);
        self.filled.notify_one();
        before
    }

    /// Takes an offer back that is not true any more.
    pub(super) fn retract(&self) -> Option<Offer> {
        self.lock().offer.take()
    }

    pub(super) fn view(&self) -> View {
        let state = self.lock();
        View {
            wanted: state.wanted,
            told: state.told.clone(),
            returned: state.returned.clone(),
            offered: match &state.offer {
                None | Some(Offer::End(_)) => Offered::Nothing,
                Some(Offer::Gone(_)) => Offered::Gone,
                Some(Offer::Memory(memory, generation)) => {
                    Offered::Memory(Returned::new(memory, generation))
                }
            },
        }
    }
}
