//! Interfaces that all memory of this crate shares, the checks before safe calls use it from a GPU or in a system call, and the
//! CPU's safe access to it.
//!
//! # Access by the CPU
//! GPUs and other processes write the same bytes, so safe code never gets `&[T]`. `CpuView` copies in and out by relaxed
//! atomic accesses of whole aligned words, since accesses of different sizes to the same bytes would race. This is sound
//! with any concurrent writer; a racing value of more than a word may be torn. Long copies are assembly with the same
//! effect (`core/memory/words`): the compiler makes one move per relaxed access, which is half as fast as `memcpy`, and
//! `memcpy` itself would rest on behaviour that C leaves undefined. `as_slice` is `unsafe`, with its contract.
//! `exclusive_slice` is safe: it checks that the host alone reaches the memory. A view borrows the mapping, and taking the
//! CPU's access away needs the mapping exclusively, so a view never faults.
//!
//! Host access has one meaning per mapping. The driver wants it named by the memory's own node; the types translate every
//! name of the host to that.

mod file;
mod parallel;
mod view;
mod words;

pub use parallel::{ParallelCopy, in_threads};
pub use view::{CpuMemory, CpuView, cpu_accessors, impl_cpu_memory};

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::driver::{Access, AccessDesc, DevicePtr, Driver, Location, StreamHandle};
use crate::per_driver::lock;
use crate::{Error, Result};

/// Memory with an address in CUDA's unified address space.
pub trait Memory: AccessChecks {
    /// Returns the memory's driver.
    fn driver(&self) -> &Driver;
    /// Returns the address of the first byte, the same for every GPU and, for host memory, for the CPU.
    fn device_ptr(&self) -> DevicePtr;
    /// Returns the number of usable bytes.
    fn len(&self) -> u64;
    /// Returns the memory's location: of memory in several places, such as a spread [`Buffer`](crate::Buffer), that of
    /// its first byte.
    fn location(&self) -> Location;

    /// Returns whether there are no bytes; memory of this crate always has some.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks that `len` bytes follow at `offset`; returns the address there.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    fn range(&self, offset: u64, len: u64) -> Result<DevicePtr> {
        check_range(offset, len, self.len())?;
        Ok(self.device_ptr().add(offset))
    }
}

// Shared memory, which a [ticket](crate::stream::Transfer) and its owner may both have: it lives as long as the pointer.
memory_through!(unsafe impl [M: Memory + ?Sized] for Arc<M>, |this| **this);

/// Checks that `len` bytes from `offset` on lie in memory of `size` bytes.
///
/// # Errors
/// [`Error::OutOfRange`].
pub fn check_range(offset: u64, len: u64, size: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::OutOfRange { offset, len, size }),
    }
}

/// The part of a GPU that accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Copies and fills. They reach every GPU's memory from `cuMemAlloc`, with or without peer access.
    Copy,
    /// Kernels. They reach another GPU's memory only with a grant of it to their own GPU.
    Kernel,
}

/// The checks of a memory before safe calls use it from a GPU or in a system call. Types of this crate implement it;
/// another implementor takes their place in every safe call, such as [`Stream::copy`](crate::Stream::copy).
///
/// # Safety
/// Safe calls rely on all of these, and each failure can corrupt memory or lose the GPU:
/// - The answers of this trait allow no more than the driver does. The default answers are those of memory that the
///   CPU may write wherever it may read it, whose grants change only through `&mut`, and which is usable on every
///   stream at once.
/// - The answers of [`Memory`] are true. They do not change when the value moves, nor while there is
///   no exclusive borrow of it, except that memory may be added at the end: the length only grows then.
/// - The range is mapped while the value lives, and for ever if it is forgotten. Its grants only grow while a shared
///   borrow of it, or the value that [`hold_grants`](Self::hold_grants) returned, lives.
/// - Safe code reads and writes the bytes through [`CpuView`] alone: it gets no slice and no
///   reference to them while a GPU may use them.
pub unsafe trait AccessChecks {
    /// Returns the access of `engine` of GPU `gpu` to `len` bytes from `offset` on: the least over the range.
    ///
    /// Queries the driver for mappings (`cuMemGetAccess`) and pools (`cuMemPoolGetAccess`), because unsafe
    /// code can change their grants. For memory whose access is fixed at allocation the type decides.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`], or the driver's error.
    fn gpu_access(&self, gpu: i32, engine: Engine, offset: u64, len: u64) -> Result<Access>;

    /// Returns whether the CPU may read, but not write, some of `len` bytes from `offset` on.
    fn is_read_only_for_cpu(&self, _offset: u64, _len: u64) -> bool {
        false
    }

    /// Returns whether some of `len` bytes from `offset` on may be the CPU's memory; the default is that they may.
    /// The driver makes a copy between two such memories with the CPU, so it must be allowed to write the
    /// destination.
    fn may_be_on_host(&self, _offset: u64, _len: u64) -> bool {
        true
    }

    /// Returns how many of `len` bytes from `offset` on one copy or fill by the driver may take. It ends where memory of
    /// the CPU borders on a GPU's, because the driver crashes the process when one copy touches both, and where two
    /// registrations border, because the driver refuses a copy across. Memory with such borders must answer this. The
    /// default is all.
    fn of_one_copy(&self, _offset: u64, len: u64) -> u64 {
        len
    }

    /// Returns how many of `len` bytes from `offset` on lie in the mapping of the first one: a copy of a
    /// [batch](crate::Stream::copy_batch) does not reach beyond. `None`, the default, if that is not known: such
    /// memory is copied without batches.
    fn of_one_mapping(&self, _offset: u64, _len: u64) -> Option<u64> {
        None
    }

    /// Keeps safe calls from revoking access to the memory while the result lives. `None` for memory whose
    /// grants change only through `&mut`.
    fn hold_grants(&self) -> Option<GrantUse> {
        None
    }

    /// Orders work submitted to `stream` from now on after the memory's allocation.
    ///
    /// # Errors
    /// The driver's errors.
    ///
    /// # Safety
    /// `stream` is a live stream of the memory's driver.
    unsafe fn ready_on(&self, _stream: StreamHandle) -> Result<()> {
        Ok(())
    }
}

/// Returns whether `len` bytes from `offset` on are all the CPU's memory, or all a GPU's.
pub fn is_of_one_kind(memory: &(impl AccessChecks + ?Sized), offset: u64, len: u64) -> bool {
    let (mut at, end) = (offset, offset + len);
    let mut kind = None;
    while at < end {
        let piece = memory.of_one_copy(at, end - at).clamp(1, end - at);
        let is_on_host = memory.may_be_on_host(at, piece);
        if *kind.get_or_insert(is_on_host) != is_on_host {
            return false;
        }
        at += piece;
    }
    true
}

/// Implements [`AccessChecks`] for a type by memory that the value owns, borrows or points to:
/// `access_checks!(unsafe impl for Wrapper, |this| &this.memory)`. `unsafe`, because the memory must live at least as
/// long as the value, and its bytes must be the value's. If the memory may be longer than the value, the value's length in
/// bytes follows: a GPU has no access beyond.
#[macro_export]
macro_rules! access_checks {
    (unsafe impl $([$($generic:tt)*])? for $type:ty, |$this:ident| $memory:expr $(, $len:expr)?) => {
        // SAFETY: the memory answers, and the caller guarantees that the answers are the value's.
        unsafe impl$(<$($generic)*>)? $crate::memory::AccessChecks for $type {
            fn gpu_access(
                &self,
                gpu: i32,
                engine: $crate::memory::Engine,
                offset: u64,
                len: u64,
            ) -> $crate::Result<$crate::driver::Access> {
                let $this = self;
                $($crate::memory::check_range(offset, len, $len)?;)?
                $crate::memory::AccessChecks::gpu_access(&$memory, gpu, engine, offset, len)
            }
            fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
                let $this = self;
                $crate::memory::AccessChecks::is_read_only_for_cpu(&$memory, offset, len)
            }
            fn may_be_on_host(&self, offset: u64, len: u64) -> bool {
                let $this = self;
                $crate::memory::AccessChecks::may_be_on_host(&$memory, offset, len)
            }
            fn of_one_copy(&self, offset: u64, len: u64) -> u64 {
                let $this = self;
                $crate::memory::AccessChecks::of_one_copy(&$memory, offset, len)
            }
            fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
                let $this = self;
                $crate::memory::AccessChecks::of_one_mapping(&$memory, offset, len)
            }
            fn hold_grants(&self) -> Option<$crate::memory::GrantUse> {
                let $this = self;
                $crate::memory::AccessChecks::hold_grants(&$memory)
            }
            unsafe fn ready_on(&self, stream: $crate::driver::StreamHandle) -> $crate::Result<()> {
                let $this = self;
                // SAFETY: the caller's promise.
                unsafe { $crate::memory::AccessChecks::ready_on(&$memory, stream) }
            }
        }
    };
}
pub use access_checks;

/// As [`access_checks`], and implements [`Memory`] by the same memory.
#[macro_export]
macro_rules! memory_through {
    (unsafe impl $([$($generic:tt)*])? for $type:ty, |$this:ident| $memory:expr) => {
        $crate::memory::access_checks!(
            unsafe impl $([$($generic)*])? for $type, |$this| $memory
        );
        $crate::memory::impl_memory! {
            $([$($generic)*])? for $type, |$this| $crate::memory::Memory::driver(&$memory),
            $crate::memory::Memory::device_ptr(&$memory), $crate::memory::Memory::len(&$memory),
            $crate::memory::Memory::location(&$memory)
        }
    };
}
pub use memory_through;

/// Implements [`Memory`] for a type: by its driver, the address, the length and the location, whose
/// documentation may come first.
#[macro_export]
macro_rules! impl_memory {
    (
        $(#[$doc:meta])* $([$($generic:tt)*])? for $type:ty, |$this:ident|
        $driver:expr, $start:expr, $len:expr, $location:expr
    ) => {
        impl$(<$($generic)*>)? $crate::memory::Memory for $type {
            fn driver(&self) -> &$crate::Driver {
                let $this = self;
                $driver
            }
            fn device_ptr(&self) -> $crate::driver::DevicePtr {
                let $this = self;
                $start
            }
            fn len(&self) -> u64 {
                let $this = self;
                $len
            }
            $(#[$doc])*
            fn location(&self) -> $crate::driver::Location {
                let $this = self;
                $location
            }
        }
    };
}
pub use impl_memory;

/// Refuses a range that `engine` of GPU `gpu` has no access `need` to: the GPU would lose its context.
///
/// # Errors
/// [`Error::NotAccessible`]; those of [`gpu_access`](AccessChecks::gpu_access).
pub fn expect_gpu_access(
    memory: &impl Memory,
    (gpu, engine): (i32, Engine),
    (offset, len): (u64, u64),
    need: Access,
) -> Result<()> {
    let have = memory.gpu_access(gpu, engine, offset, len)?;
    if have < need {
        return Err(Error::not_accessible(Location::Device(gpu), have, need));
    }
    Ok(())
}

/// Refuses a copy that the driver would make with the CPU and that would kill the process: between two host
/// memories, to one that the CPU may only read (docs/driver-behaviour.md, "Traps").
///
/// # Errors
/// [`Error::NotAccessible`].
pub fn expect_no_cpu_fault(
    (to, to_offset): (&impl Memory, u64),
    (from, from_offset): (&impl Memory, u64),
    len: u64,
) -> Result<()> {
    if to.is_read_only_for_cpu(to_offset, len) && from.may_be_on_host(from_offset, len) {
        let (have, need) = (Access::Read, Access::ReadWrite);
        return Err(Error::not_accessible(Location::Host, have, need));
    }
    Ok(())
}

/// The number of safe calls and tickets that rely on the grants of one pool.
///
/// Grants of other memory change only through `&mut`, which does not exist while a call borrows the memory or
/// a ticket owns it. Allocations share their pool, so a pool's grants change through `&self`.
#[derive(Debug, Default)]
pub struct GrantUses {
    count: AtomicU64,
    /// Held while access is revoked, and while a use begins.
    changing: Mutex<()>,
}

impl GrantUses {
    /// Begins a use: no access is revoked until the result is dropped. Check access after this call.
    pub fn begin(self: &Arc<Self>) -> GrantUse {
        let _changing = lock(&self.changing);
        self.count.fetch_add(1, Ordering::Relaxed);
        GrantUse(Arc::clone(self))
    }

    /// Runs `change`, which sets `access`, unless it revokes access that is in use.
    ///
    /// # Errors
    /// [`Error::StillHeld`]; those of `change`.
    pub fn change(&self, access: &[AccessDesc], change: impl FnOnce() -> Result<()>) -> Result<()> {
        let Some(taken) = access.iter().find(|desc| desc.access == Access::None) else {
            return change();
        };
        let _changing = lock(&self.changing);
        match self.count.load(Ordering::Acquire) {
            0 => change(),
            uses => Err(Error::StillHeld {
                name: format!("the access of {} to a memory pool", taken.location),
                holders: vec![format!("copies, fills or kernels in flight: {uses}")],
            }),
        }
    }
}

/// A use of a pool's grants, which ends when this is dropped.
#[derive(Debug)]
pub struct GrantUse(Arc<GrantUses>);

impl Drop for GrantUse {
    /// Takes no lock: a forked child may drop it.
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_in_use_is_not_taken_away() {
        let uses = Arc::new(GrantUses::default());
        let set = |access| uses.change(&[AccessDesc::new(Location::Device(1), access)], || Ok(()));
        let held = [uses.begin(), uses.begin()];
        let error = set(Access::None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the access of GPU 1 to a memory pool is still held by copies, fills or kernels in flight: 2"
        );
        set(Access::ReadWrite).unwrap();
        drop(held);
        set(Access::None).unwrap();
    }
}
