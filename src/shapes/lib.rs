//! egmem's shapes of memory: more than one allocation at one range of addresses.
//!
//! - [`Growable`] is a vector whose address never changes: memory is added and removed at its end, and nothing is
//!   copied.
//! - [`Stripes`] cuts one range into parts at several locations in turn, with a front elsewhere if need be: on host nodes,
//!   on GPUs, or on both. The result is a [`Buffer`].
//! - [`Ring`] is a bounded queue between the CPU and GPUs, also of two processes, whose memory is mapped twice so that no batch is split.
//! - [`Appender`] takes the output of kernels that cannot say before how much it will be.
//! - [`Replicated`] is read-mostly data with a copy on each of several nodes and GPUs.
//!
//! The module [`sharing`] maps growing vectors in other processes, a process hands one side of a ring to
//! another, and replicated data have readers in other processes.
//!
//! Programs depend on the crate `egmem`, which re-exports the items that they need.
#![deny(missing_docs)]

pub mod appender;
pub mod device;
pub mod growable;
pub mod replicated;
pub mod ring;
pub mod sharing;
mod striped;

pub use appender::{Appended, Appender};
pub use growable::{Growable, GrowableOptions, Prefix};
pub use replicated::{Replica, Replicated, ReplicatedOptions};
pub use ring::{Consumer, Producer, Ring};
pub use striped::{Stripe, Stripes, stripes};

use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

use egmem_core::{
    Buffer, BufferOptions, Driver, Error, Event, Growth, Result, Stream, Transfer, driver, guard,
    ledger, memory, pinned, size, topology, vmm,
};

use driver::{AccessDesc, DevicePtr, Location};
use egmem_core::buffer::RequestedAccess;
use egmem_core::guard::name_missing;
use ledger::{AllocPath, Label, Site};
use vmm::{PhysicalMemory, PhysicalOptions};

/// The location of a shape's memory, the access to it, and its name in the ledger.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    location: Location,
    access: RequestedAccess,
    label: Option<Label>,
}

impl Placement {
    fn at(location: Location) -> Self {
        Self {
            location,
            access: RequestedAccess::default(),
            label: None,
        }
    }

    /// Returns options for memory of a shape that the call `site` creates.
    fn memory(&self, site: Site) -> PhysicalOptions {
        let options = PhysicalMemory::options(self.location);
        options.recorded_as(AllocPath::ShapeChunk, self.label.clone(), site)
    }

    /// Returns the access of all locations to the memory.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`]; the driver's, when it is asked which GPUs reach the memory.
    fn grants(&self, driver: &Driver) -> Result<Vec<AccessDesc>> {
        let grants = self.access.grants(driver, self.location);
        let grants = grants.map(|list| list.into_vec());
        grants.map_err(|error| name_missing(driver, error, self.location))
    }
}

/// Returns the counter at `address`.
///
/// # Safety
/// `address` is a multiple of 8. For `'a` its word is mapped, and readable and writable by the CPU. All other
/// code of this process accesses it atomically and as a whole.
pub(crate) unsafe fn counter<'a>(address: DevicePtr) -> &'a AtomicU64 {
    let at = std::ptr::with_exposed_provenance_mut(address.0 as usize);
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(at) }
}

/// Returns `found` if it lies in `least..=most`, where counts go on at 0 after 2^64 - 1.
pub(crate) const fn check(
    what: &'static str,
    found: u64,
    (least, most): (u64, u64),
) -> Result<u64> {
    if found.wrapping_sub(least) <= most.wrapping_sub(least) {
        return Ok(found);
    }
    Err(Error::CursorDamaged {
        what,
        found,
        least,
        most,
    })
}

/// Reads a text of another process: a kind of message, and so many numbers. `None` for any other text.
pub(crate) fn numbers<const COUNT: usize>(kind: &str, text: &str) -> Option<[u64; COUNT]> {
    let words = text.strip_prefix(kind)?.strip_prefix(' ')?.split(' ');
    let numbers: Option<Vec<u64>> = words.map(|word| word.parse().ok()).collect();
    numbers?.try_into().ok()
}

/// How long a waiting thread keeps its CPU, in the hope of an early answer.
const SPIN: Duration = Duration::from_micros(50);
/// How long it lets others run, but does not sleep.
const YIELD: Duration = Duration::from_millis(1);
/// How long it sleeps between two looks after that.
const SLEEP: Duration = Duration::from_micros(50);

/// Calls `ready` until it returns a value, until `deadline`, or until nobody is left who could make it ready: at least once,
/// and once after `is_alone` has said so. That is asked from the first sleep on.
pub(crate) fn until<S, R>(
    deadline: Instant,
    side: &mut S,
    is_alone: impl Fn(&S) -> bool,
    mut ready: impl FnMut(&mut S) -> Result<Option<R>>,
) -> Result<Option<R>> {
    if let Some(value) = ready(side)? {
        return Ok(Some(value));
    }
    let start = Instant::now();
    let mut now = start;
    while now < deadline {
        let mut is_last = false;
        match now - start {
            waited if waited < SPIN => std::hint::spin_loop(),
            waited if waited < YIELD => thread::yield_now(),
            _ => {
                is_last = is_alone(side);
                if !is_last {
                    thread::sleep(SLEEP.min(deadline - now));
                }
            }
        }
        if let Some(value) = ready(side)? {
            return Ok(Some(value));
        }
        if is_last {
            return Ok(None);
        }
        now = Instant::now();
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_lies_between_passes(least in any::<u64>(), span in 0..1_000_u64, found in any::<u64>(), near in -3..1_003_i64) {
            let most = least.wrapping_add(span);
            for found in [found, least.wrapping_add_signed(near)] {
                let expected = (0..=span).any(|n| least.wrapping_add(n) == found);
                prop_assert_eq!(check("a cursor", found, (least, most)).is_ok(), expected);
            }
        }
    }
}

#[cfg(test)]
mod wait_tests {
    use super::*;

    #[test]
    fn it_asks_at_least_once_and_ends_with_the_deadline() {
        let past = Instant::now();
        let until = |deadline, ready: &mut dyn FnMut() -> Option<u32>| {
            super::until(deadline, &mut (), |()| false, |()| Ok(ready()))
        };
        assert_eq!(until(past, &mut || Some(1)), Ok(Some(1)));
        let mut asked = 0;
        let nothing = until(past, &mut || {
            asked += 1;
            None
        });
        assert_eq!((nothing, asked), (Ok(None), 1));
        let later = Instant::now() + 3 * YIELD;
        assert_eq!(until(later, &mut || None), Ok(None));
        assert!(Instant::now() >= later);
        let mut left = 5;
        let answer = until(later + Duration::from_secs(600), &mut || {
            left -= 1;
            (left == 0).then_some(2)
        });
        assert_eq!(answer, Ok(Some(2)));
    }

    #[test]
    fn what_came_before_the_other_was_gone_is_found() {
        use std::cell::Cell;

        let deadline = Instant::now() + Duration::from_secs(600);
        assert_eq!(
            until(deadline, &mut (), |()| true, |()| Ok(None::<()>)),
            Ok(None)
        );
        // It comes at the last moment.
        let is_alone = |is_gone: &Cell<bool>| {
            is_gone.set(true);
            true
        };
        let ready = |is_gone: &mut Cell<bool>| Ok(is_gone.get().then_some(3));
        let found = until(deadline, &mut Cell::new(false), is_alone, ready);
        assert_eq!(found, Ok(Some(3)));
    }
}
