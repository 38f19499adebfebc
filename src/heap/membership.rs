//! The threads and blocks of a heap: threads join and leave, blocks are counted, and after the last handle the
//! last block releases the memory.
//!
//! The deferral's turns keep the memory mapped for code that has neither a block nor a handle.

use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use super::cache::{Biased, Home, Local, Member, Members, Tally, member};
use super::inner::HeapInner;
use super::piece::Piece;
use super::ranges::Core;
use crate::per_driver::lock;

impl Home for HeapInner {
    #[inline]
    fn id(&self) -> u64 {
        self.facts.id
    }

    fn join(&self) -> Option<Arc<Member>> {
        // A forked child gets nothing from its parent's heap, and the lock may be held for ever there.
        if !self.facts.born.is_current() {
            return None;
        }
        let mut members = lock(&self.front.members);
        // Debug mode caches nothing, so every block takes the slow path.
        if members.closed || self.watch.is_some() {
            return None;
        }
        let member = Arc::new(Member::new(
            self.this.clone(),
            self.facts.id,
            self.facts.born,
        ));
        members.list.push(Arc::clone(&member));
        Some(member)
    }

    fn leave(&self, member: &Arc<Member>) {
        let mut members = lock(&self.front.members);
        let Some(at) = members.list.iter().position(|m| Arc::ptr_eq(m, member)) else {
            return; // closed: closing has emptied the cache
        };
        members.list.swap_remove(at);
        // SAFETY: the member belongs to the calling thread, which is ending and is not inside an allocation
        // or a free.
        let mut local = unsafe { member.local.hold_as_owner() };
        self.close_cache(&mut members, &mut self.core(), &mut local);
    }
}

impl HeapInner {
    /// Frees a block from a thread without a cache. The last block of a closed heap ends the heap.
    ///
    /// # Safety
    /// As [`free`](Self::free).
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn free_without_member(&self, piece: &Piece) {
        // Keeps the heap's tables alive until this returns, even if another thread frees the last block.
        let Some(this) = self.this.upgrade() else {
            return; // unreachable: the block keeps the heap alive
        };
        this.take_back(*piece);
        this.count_freed(piece.bytes);
    }

    /// Counts a change of the calling thread's blocks.
    pub(super) fn count(&self, note: impl Fn(&mut Tally)) {
        let counted = member::with(self, |local| {
            note(&mut local.tally);
            Some(())
        });
        if counted.is_none() {
            note(&mut lock(&self.front.members).tally);
        }
    }

    /// Counts a block that waits for GPU work as freed.
    pub(super) fn note_freed_later(self: &Arc<Self>, bytes: u64) {
        let counted = member::with(&**self, |local| {
            local.tally.free(bytes);
            Some(())
        });
        if counted.is_none() {
            self.count_freed(bytes);
        }
    }

    /// Counts a block that is in no cache as freed.
    pub(super) fn count_freed(self: &Arc<Self>, bytes: u64) {
        let mut members = lock(&self.front.members);
        members.tally.free(bytes);
        let last = members.closed && members.tally.is_even();
        let orphan = last.then(|| members.orphan.take());
        drop(members);
        if orphan.flatten().is_some() {
            self.end();
        }
    }

    /// Ends a thread's cache, which the caller holds.
    fn close_cache(&self, members: &mut Members, core: &mut Core, local: &mut Local) {
        members.tally.add(&local.tally);
        local.closed = true;
        self.take_back_all(core, local);
        if let Some(own) = local.shard.take() {
            core.end_shard(own.id, own.shard);
        }
        core.leave(&mut local.stripe);
    }

    /// Closes the heap when its last handle is dropped: nothing can be allocated any more. The memory is
    /// released with the last block.
    pub(super) fn close(self: &Arc<Self>) {
        self.closed.store(true, Release);
        self.grower.stop();
        let mut members = lock(&self.front.members);
        members.closed = true;
        let list = std::mem::take(&mut members.list);
        let mut held = Biased::hold_all(list.iter().map(|member| &member.local));
        {
            let mut core = self.core();
            for local in &mut held {
                self.close_cache(&mut members, &mut core, local);
            }
            self.open_posts(&mut core);
        }
        drop(held);
        let ends = members.tally.is_even();
        if !ends {
            members.orphan = Some(self.clone());
        }
        drop(members);
        if ends {
            self.end();
        } else if let Some(watch) = &self.watch {
            watch.tell_leaks();
        }
        self.tell();
    }

    /// Releases all memory. There are no blocks left; waits for the GPU work that freed blocks name.
    ///
    /// The caller holds no lock and has no turn of the deferral.
    fn end(&self) {
        // From here on no other thread touches the memory.
        let Some(mut deferred) = self.deferral.end() else {
            return;
        };
        let backing = self.supply.backing().take();
        let mut passed = Vec::new();
        let backing = match deferred.drain(&mut passed) {
            Ok(()) => backing,
            Err(error) => {
                // A GPU that accesses unmapped addresses loses its context. `forget` comes before any of the
                // user's closures runs: a panic in one would otherwise unmap the memory.
                std::mem::forget(backing);
                tracing::error!(%error, "a heap's memory is not given back: a GPU may still use it");
                None
            }
        };
        if let Some(watch) = &self.watch {
            watch.end(&passed, &|left| self.take_back_left(&left));
        }
        self.tell();
        drop(backing);
    }
}
