//! Readers in other processes, as their publisher sees them.
//!
//! ```text
//! control page of one reader        current  the newest epoch; the publisher's word
//!                                   in use   a word for each slot; the reader's words, not 0 while it has replicas of it
//!
//! reader     in use[slot] = 1; then: is `current` still an epoch of that slot? If not, 0 again, and once more
//! publisher  has set `current` to the other slot; then: is in use[slot] 0? Only then is the slot written
//! ```
//! Either the publisher sees the reader's word, or the reader sees the publisher's: both store first and look afterwards, in
//! one order for all (`SeqCst`). A page is of one reader, so the page goes with the reader that dies.

#[cfg(feature = "share")]
pub(super) use shared::{Control, MAX_TEXT, Reader};

/// The readers in other processes.
#[derive(Debug, Default)]
pub(super) struct Readers {
    #[cfg(feature = "share")]
    all: std::sync::Mutex<Vec<Reader>>,
}

#[cfg(not(feature = "share"))]
impl Readers {
    pub(super) const fn holders(&self, _slot: usize) -> Option<String> {
        None
    }
    pub(super) const fn show(&self, _epoch: u64) {}
}

#[cfg(feature = "share")]
mod shared {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::SeqCst;
    use std::sync::atomic::fence;

    use egmem_core::per_driver::lock;
    use egmem_share::{Credentials, Link};

    use super::Readers;
    use crate::Buffer;
    use crate::cursor::counter;
    use crate::driver::DevicePtr;
    use crate::memory::Memory;

    /// The most bytes of the text before the copies.
    pub(in crate::replicated) const MAX_TEXT: usize = 128;

    /// A reader's control page, as one of both ends has it: each word on a cache line of its own.
    #[derive(Debug)]
    pub(in crate::replicated) struct Control<M> {
        memory: M,
    }

    impl<M: Memory> Control<M> {
        /// The bytes of a page that mean something.
        pub(in crate::replicated) const BYTES: u64 = 512;

        /// Takes a page.
        ///
        /// # Safety
        /// The CPU may read and write the first [`BYTES`](Self::BYTES) of the memory while it lives, and nothing else in this
        /// process accesses them.
        pub(in crate::replicated) unsafe fn new(memory: M) -> Self {
            Self { memory }
        }

        fn word(&self, offset: u64) -> &AtomicU64 {
            let at: DevicePtr = self.memory.device_ptr().add(offset);
            // SAFETY: a multiple of 8 within `BYTES` of memory that begins with a page; the rest is the promise of `new`.
            unsafe { counter(at) }
        }

        /// Returns the newest epoch's word.
        pub(in crate::replicated) fn current(&self) -> &AtomicU64 {
            self.word(0)
        }

        /// Returns the word that says whether the reader uses a slot.
        pub(in crate::replicated) fn in_use(&self, slot: usize) -> &AtomicU64 {
            self.word(128 * (1 + (slot as u64 & 1)))
        }
    }

    /// A reader in another process.
    #[derive(Debug)]
    pub(in crate::replicated) struct Reader {
        pub(in crate::replicated) control: Control<Arc<Buffer>>,
        pub(in crate::replicated) link: Link,
        pub(in crate::replicated) peer: Credentials,
    }

    impl Readers {
        /// Returns those that use a slot that is no longer the current one. Readers that have ended are forgotten.
        pub(in crate::replicated) fn holders(&self, slot: usize) -> Vec<String> {
            self.forget_ended();
            let all = lock(&self.all);
            // Behind the store of `current` by the publisher before.
            fence(SeqCst);
            let using = all.iter();
            let using = using.filter(|reader| reader.control.in_use(slot).load(SeqCst) != 0);
            using.map(|reader| reader.peer.to_string()).collect()
        }

        /// Gives back what readers that have ended had.
        pub(in crate::replicated) fn forget_ended(&self) {
            lock(&self.all).retain(|reader| !reader.link.is_cut());
        }

        /// Tells all readers the newest epoch, whose copies are written.
        pub(in crate::replicated) fn show(&self, epoch: u64) {
            for reader in &*lock(&self.all) {
                reader.control.current().store(epoch, SeqCst);
            }
        }

        pub(in crate::replicated) fn add(&self, reader: Reader) {
            lock(&self.all).push(reader);
        }
    }
}
