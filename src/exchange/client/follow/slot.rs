//! The state shared by a follow's task and its caller: at most one state that waits to be returned.

use std::sync::{Mutex, MutexGuard};

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use super::followed::Absence;
use super::generation::Generation;
use crate::client::{LeaseState, RemoteBuffer};
use crate::per_driver::lock;

/// A state to be returned to the caller.
#[derive(Debug)]
pub(super) enum Offer {
    Memory(Box<RemoteBuffer>, Generation),
    Gone(Absence),
}

/// Memory that was returned, and its lease, which the caller may have released since.
#[derive(Clone, Debug)]
pub(super) struct Returned {
    pub(super) generation: Generation,
    lease: watch::Receiver<LeaseState>,
}

/// The state that the caller was told last.
#[derive(Clone, Debug, Default)]
pub(super) enum Told {
    #[default]
    Nothing,
    Gone,
    Memory,
}

/// The part of the slot's state that the task reads: what the caller wants and was told.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    /// Whether the caller waits, or has waited and given up.
    pub(super) wanted: bool,
    pub(super) told: Told,
    /// The memory returned last, even after the caller was told that it is gone.
    pub(super) returned: Option<Returned>,
    pub(super) offered: Offered,
}

/// The offer that was not returned yet.
#[derive(Clone, Debug, Default)]
pub(super) enum Offered {
    #[default]
    Nothing,
    Gone,
    Memory(Returned),
}

#[derive(Debug, Default)]
struct SlotState {
    view: View,
    offer: Option<Offer>,
}

/// Holds the newest state until the caller takes it.
#[derive(Debug)]
pub(super) struct Slot {
    /// The client's.
    runtime: Handle,
    state: Mutex<SlotState>,
    /// Notified when there is an offer.
    pub(super) filled: Notify,
    /// Notified when the caller starts to wait or takes an offer.
    pub(super) asked: Notify,
}

impl Returned {
    /// Returns the last known state of the lease. After the caller released the lease, it does not change.
    pub(super) fn state(&self) -> LeaseState {
        self.lease.borrow().clone()
    }

    /// Whether the exporter still keeps the memory for the caller, as far as is known.
    pub(super) fn is_held(&self) -> bool {
        *self.lease.borrow() == LeaseState::Held
    }

    /// Waits until the lease's state differs from `seen`; forever if the lease was released or is lost.
    pub(super) async fn changed(mut self, seen: LeaseState) {
        if self.lease.wait_for(|state| *state != seen).await.is_err() {
            std::future::pending().await
        }
    }
}

impl Slot {
    pub(super) fn new(runtime: &Handle) -> Self {
        Self {
            runtime: runtime.clone(),
            state: Mutex::default(),
            filled: Notify::new(),
            asked: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, SlotState> {
        // No code that can panic runs under the lock.
        lock(&self.state)
    }

    /// Records that the caller waits for the next state.
    pub(super) fn want(&self) {
        self.lock().view.wanted = true;
        self.asked.notify_one();
    }

    /// Takes the offer and records it as told.
    pub(super) fn take(&self) -> Option<Offer> {
        let mut state = self.lock();
        let offer = state.offer.take()?;
        let view = &mut state.view;
        view.wanted = false;
        match (&offer, std::mem::take(&mut view.offered)) {
            (Offer::Memory(..), Offered::Memory(memory)) => {
                view.told = Told::Memory;
                view.returned = Some(memory);
            }
            _ => view.told = Told::Gone,
        }
        drop(state);
        self.asked.notify_one();
        Some(offer)
    }

    /// Replaces the offer and returns the old one.
    pub(super) fn put(&self, offer: Offer) -> Option<Offer> {
        let mut state = self.lock();
        state.view.offered = match &offer {
            Offer::Gone(_) => Offered::Gone,
            Offer::Memory(memory, generation) => Offered::Memory(Returned {
                generation: generation.clone(),
                lease: memory.grant.lease.states(),
            }),
        };
        let before = state.offer.replace(offer);
        drop(state);
        self.filled.notify_one();
        before
    }

    /// Takes back an offer that is out of date.
    pub(super) fn retract(&self) -> Option<Offer> {
        let mut state = self.lock();
        state.view.offered = Offered::Nothing;
        state.offer.take()
    }

    /// Drops the offer. Memory is unmapped on a blocking thread: an async thread sends no heartbeats during
    /// that time.
    pub(super) fn clear(&self) {
        if let Some(Offer::Memory(memory, _)) = self.retract() {
            // A runtime that has ended drops it at once.
            drop(self.runtime.spawn_blocking(move || drop(memory)));
        }
    }

    pub(super) fn view(&self) -> View {
        self.lock().view.clone()
    }
}
