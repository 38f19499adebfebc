//! Threads come and go, handles go, blocks may outlive both; with the last block goes the memory.

use std::ops::DerefMut;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use super::cache::{Biased, Local, Member, Tally, member};
use super::classes::Class;
use super::core::Outside;
use super::piece::Piece;
use super::shared::Shared;
use crate::per_driver::lock;

/// The threads of a heap.
#[derive(Default)]
pub(super) struct Members {
    list: Vec<Arc<Member>>,
    /// Of threads that are gone or never came.
    tally: Tally,
    /// Keeps a closed heap for the blocks that it still has.
    orphan: Option<Arc<Shared>>,
    closed: bool,
}

impl Members {
    /// What all threads may keep, without taking it from them: each may have `larger` bytes of larger
    /// blocks within its budget, and `large` beyond it.
    pub(super) fn kept(&self, larger: u64, large: u64, class: Option<Class>) -> Outside {
        let kept = self.list.iter().map(|member| &*member.kept);
        Outside {
            bytes: kept.clone().map(|kept| kept.bytes(larger, large)).sum(),
            of_class: class.is_some_and(|class| kept.clone().any(|kept| kept.has_small(class))),
        }
    }

    /// What all threads keep.
    pub(super) fn hold_all(&self) -> Vec<impl DerefMut<Target = Local>> {
        Biased::hold_all(self.list.iter().map(|member| &member.local))
    }
}

impl Shared {
    /// A member for the calling thread; none where the heap is closed.
    pub(super) fn join(&self) -> Option<Arc<Member>> {
        let mut members = lock(&self.members);
        // In debug mode nothing is kept, so that each block takes the slow way.
        if members.closed || self.watch.is_some() {
            return None;
        }
        let member = Arc::new(Member::new(self));
        members.list.push(Arc::clone(&member));
        Some(member)
    }

    /// The calling thread ends: what it kept goes back.
    pub(super) fn leave(&self, member: &Arc<Member>) {
        let mut members = lock(&self.members);
        let Some(at) = members.list.iter().position(|m| Arc::ptr_eq(m, member)) else {
            return; // closed: all has gone back then
        };
        members.list.swap_remove(at);
        // SAFETY: the member is the calling thread's, which is at its end and in no block's end or beginning.
        let mut local = unsafe { member.local.hold_as_owner() };
        members.tally.add(&local.tally);
        local.closed = true;
        let contents = local.empty();
        self.take_back_all(&mut self.core(), contents);
    }

    /// What users have, and what threads keep in bytes.
    pub(super) fn tally(&self) -> (Tally, u64) {
        let members = lock(&self.members);
        let held = members.hold_all();
        let mut tally = members.tally;
        let mut kept = 0;
        for local in &held {
            tally.add(&local.tally);
            kept += local.bytes();
        }
        (tally, kept)
    }

    /// How many threads have a cache.
    pub(super) fn threads(&self) -> usize {
        lock(&self.members).list.len()
    }

    /// Counts for a thread that has no cache.
    pub(super) fn note_without_member(&self, note: impl FnOnce(&mut Tally)) {
        note(&mut lock(&self.members).tally);
    }

    /// Takes a block back from a thread without a cache; of a closed heap the last one ends it.
    ///
    /// # Safety
    /// As [`free`](Self::free).
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn free_without_member(&self, piece: Piece) {
        // Until this is done the heap's tables stay, even where another thread frees the last block.
        let Some(this) = self.this.upgrade() else {
            return; // not while there is a block
        };
        this.take_back(piece);
        this.count_freed(piece.bytes);
    }

    /// Counts a block as freed that waits for a GPU.
    pub(super) fn note_freed_later(self: &Arc<Self>, bytes: u64) {
        let counted = member::with(self, |local| {
            local.tally.free(bytes);
            Some(())
        });
        if counted.is_none() {
            self.count_freed(bytes);
        }
    }

    /// Counts a block as freed that is not in any cache.
    pub(super) fn count_freed(self: &Arc<Self>, bytes: u64) {
        let mut members = lock(&self.members);
        members.tally.free(bytes);
        let last = members.closed && members.tally.is_even();
        let orphan = last.then(|| members.orphan.take());
        drop(members);
        if orphan.flatten().is_some() {
            self.end();
        }
    }

    /// The last handle is gone: no block will be allocated any more. The memory goes with the last
    /// block.
    pub(super) fn close(self: &Arc<Self>) {
        self.closed.store(true, Release);
        self.grower.stop();
        let mut members = lock(&self.members);
        members.closed = true;
        let list = std::mem::take(&mut members.list);
        let mut held = Biased::hold_all(list.iter().map(|member| &member.local));
        {
            let mut core = self.core();
            for local in &mut held {
                members.tally.add(&local.tally);
                local.closed = true;
                self.take_back_all(&mut core, local.empty());
            }
            self.empty_depots(&mut core);
        }
        drop(held);
        let ends = members.tally.is_even();
        if !ends {
            members.orphan = Some(Arc::clone(self));
        }
        drop(members);
        if ends {
            self.end();
        } else if let Some(watch) = &self.watch {
            watch.tell_leaks();
        }
    }

    /// Gives all memory back. No block is left, and GPU work on freed ones is waited for.
    ///
    /// The caller holds no lock, and is not inside of `lifetime`.
    fn end(&self) {
        // From here on no other thread touches the memory.
        if !self.lifetime.end() {
            return;
        }
        let deferred = lock(&self.deferred).take();
        let backing = lock(&self.backing).take();
        let Some(mut deferred) = deferred else {
            return;
        };
        let mut passed = Vec::new();
        let backing = match deferred.drain(&mut passed) {
            Ok(()) => backing,
            Err(error) => {
                // A GPU that touches addresses that are unmapped loses its context. Forgotten before any
                // closure of the user's runs: a panic there would unmap the memory.
                std::mem::forget(backing);
                tracing::error!(%error, "a heap's memory is not given back: a GPU may still use it");
                None
            }
        };
        if let Some(watch) = &self.watch {
            watch.end(self, &passed);
        }
        self.tell();
        drop(backing);
    }
}
