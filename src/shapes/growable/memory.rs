//! The access to a vector's memory, its prefixes, and how much it grows by.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};

use super::Growable;
use crate::driver::{Access, AccessDesc, DevicePtr, Driver, Location};
use crate::memory::{AccessChecks, CpuMemory, CpuView, Engine, check_range, impl_memory};
use crate::size::Granularity;
use crate::vmm::{Adjacent, Mapped, MappedPart};
use crate::{Error, Result};

/// Implements the interfaces that all memory has, for a type with `chunks`, `driver`, `location` and `bytes()`.
macro_rules! impl_checks {
    ($name:ident) => {
        impl<T> CpuMemory for $name<T> {
            fn cpu(&self) -> Result<CpuView<'_>> {
                $name::cpu(self)
            }
        }

        // SAFETY: the chunks answer for themselves. They stay mapped at their addresses while the value lives, and for
        // ever if it is forgotten; taking access away needs each exclusively. No slices are lent.
        unsafe impl<T> AccessChecks for $name<T> {
            fn gpu_access(&self, gpu: i32, _: Engine, offset: u64, len: u64) -> Result<Access> {
                check_range(offset, len, self.bytes())?;
                Adjacent(&self.chunks).gpu_access(gpu, offset, len)
            }

            fn may_be_on_host(&self, _: u64, _: u64) -> bool {
                self.location.is_host()
            }

            fn of_one_copy(&self, offset: u64, len: u64) -> u64 {
                Adjacent(&self.chunks).of_one_copy(offset, len)
            }

            fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
                Some(Adjacent(&self.chunks).of_one_mapping(offset, len))
            }

            fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
                Adjacent(&self.chunks).is_read_only_for_cpu(offset, len)
            }
        }

        impl_memory! {
            [T] for $name<T>, |this| &this.driver, $name::device_ptr(this), this.bytes(), this.location
        }
    };
}

impl_checks!(Growable);
impl_checks!(Prefix);

impl<T> Growable<T> {
    /// Changes the access of locations to all of the memory, present and future. See
    /// [`Mapping::set_access`](crate::vmm::Mapping::set_access).
    ///
    /// # Errors
    /// [`Error::StillHeld`] while a [`Prefix`] or an export exists; as `Mapping::set_access`. All chunks have
    /// their access from before then, as memory that is added later, unless the driver refuses that too.
    pub fn set_access(&mut self, access: &[AccessDesc]) -> Result<()> {
        let mut chunks = Vec::with_capacity(self.chunks.len());
        for chunk in &mut self.chunks {
            chunks.push(Arc::get_mut(chunk).ok_or_else(held)?);
        }
        set_all(&mut chunks, access)?;
        for new in access {
            self.access.retain(|old| old.location != new.location);
            self.access.push(*new);
        }
        Ok(())
    }

    /// Changes the access of locations to all chunks that hold some of these elements. Returns the range of elements that
    /// lie in them, at least in part. The options' [`step`](super::GrowableOptions::step) decides how large chunks are. An empty
    /// range changes nothing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a range that ends before it begins; [`Error::OutOfRange`] where some have no memory;
    /// otherwise as [`set_access`](Self::set_access).
    pub fn set_access_of(
        &mut self,
        elements: std::ops::Range<usize>,
        access: &[AccessDesc],
    ) -> Result<std::ops::Range<usize>> {
        if elements.end < elements.start {
            let why = format!("elements {elements:?}");
            return Err(Error::invalid_of(
                "range",
                why,
                "an end at or after the start",
            ));
        }
        let element = size_of::<T>() as u64;
        let offset = (elements.start as u64).saturating_mul(element);
        let len = (elements.len() as u64).saturating_mul(element);
        check_range(offset, len, self.mapped)?;
        if len == 0 {
            return Ok(elements);
        }
        let is_touched = |chunk: &&mut Arc<MappedPart>| {
            let range = chunk.mapping().range();
            range.start < offset + len && offset < range.end
        };
        let touched = self.chunks.iter_mut().filter(is_touched);
        let mut chunks = touched
            .map(|chunk| Arc::get_mut(chunk).ok_or_else(held))
            .collect::<Result<Vec<_>>>()?;
        set_all(&mut chunks, access)?;
        Ok(match (chunks.first(), chunks.last()) {
            (Some(first), Some(last)) => {
                let end = last.mapping().range().end.div_ceil(element);
                (first.mapping().range().start / element) as usize..end as usize
            }
            _ => elements.start..elements.start,
        })
    }
}

/// Changes the access to all chunks. After an error they have the access that they had before.
fn set_all(chunks: &mut [&mut MappedPart], access: &[AccessDesc]) -> Result<()> {
    let mut before = Vec::with_capacity(chunks.len());
    for chunk in &*chunks {
        let mapping = chunk.mapping();
        let has = |desc: &AccessDesc| {
            let has = mapping.access(desc.location)?;
            Ok(AccessDesc::new(desc.location, has))
        };
        before.push(access.iter().map(has).collect::<Result<Vec<_>>>()?);
    }
    for index in 0..chunks.len() {
        let Err(error) = chunks[index].mapping_mut().set_access(access) else {
            continue;
        };
        // Also that of the refused chunk: CUDA does not document its access after a failed call.
        for (chunk, before) in chunks.iter_mut().zip(&before).take(index + 1) {
            // The first error has the reason.
            let _ = chunk.mapping_mut().set_access(before);
        }
        return Err(error);
    }
    Ok(())
}

fn held() -> Error {
    Error::StillHeld {
        name: "a growable vector".into(),
        holders: vec!["a prefix or an export of it".into()],
    }
}

/// The elements that a [`Growable`](super::Growable) had when [`prefix`](super::Growable::prefix) was called, at the
/// same addresses.
///
/// It keeps their memory mapped, also after the vector is dropped; clones share it. It is the same memory, not a
/// copy: elements that the vector changes, or truncates and appends again, change here too.
pub struct Prefix<T> {
    pub(super) chunks: Arc<[Arc<MappedPart>]>,
    pub(super) driver: Driver,
    pub(super) location: Location,
    pub(super) start: DevicePtr,
    pub(super) len: usize,
    pub(super) elements: PhantomData<fn() -> T>,
}

impl<T> Clone for Prefix<T> {
    fn clone(&self) -> Self {
        Self {
            chunks: Arc::clone(&self.chunks),
            driver: self.driver.clone(),
            ..*self
        }
    }
}

impl<T> Prefix<T> {
    /// Returns the number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first element.
    pub const fn device_ptr(&self) -> DevicePtr {
        self.start
    }

    /// Returns the CPU's view of the elements.
    ///
    /// # Errors
    /// [`Error::NotAccessible`](crate::Error::NotAccessible) unless the host may at least read.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        // SAFETY: the chunks are the vector's first ones, and this keeps them; the access of a chunk that is shared
        // does not change.
        unsafe { Adjacent(&self.chunks).cpu(self.start, 0, self.bytes()) }
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.len as u64 * size_of::<T>() as u64
    }
}

impl<T: AnyBitPattern + NoUninit> Prefix<T> {
    /// Returns the element at `index`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange), [`Error::NotAccessible`](crate::Error::NotAccessible).
    pub fn get(&self, index: usize) -> Result<T> {
        let element = size_of::<T>() as u64;
        let offset = (index as u64).saturating_mul(element);
        check_range(offset, element, self.bytes())?;
        // SAFETY: as in `cpu`; the range is inside the elements.
        unsafe { Adjacent(&self.chunks).cpu(self.start, offset, element)? }.get(0)
    }
}

impl<T> fmt::Debug for Prefix<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefix")
            .field("start", &self.start)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// The most that a vector grows by at a time without being asked for more, in bytes.
const LARGEST_STEP: u64 = 256 << 20;

/// Returns how many bytes the vector that has `mapped` bytes should grow by if it needs `need` more and has addresses
/// for `room`: a multiple of the granularity. `need` and `room` are such multiples, and `need` is at most `room`.
pub(super) fn growth(
    (mapped, need, room): (u64, u64, u64),
    step: u64,
    granularity: Granularity,
) -> u64 {
    let step = match step {
        0 => (mapped / 8).min(LARGEST_STEP),
        step => step,
    };
    let units = step.div_ceil(granularity.bytes()).max(1);
    units.saturating_mul(granularity.bytes()).clamp(need, room)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Driver;
    use crate::driver::{Access, Call, Code, Location, NodeId};
    use egmem_core::Machine;

    #[test]
    fn a_refusal_in_the_middle_changes_the_access_to_no_chunk() {
        const MIB: u64 = 1 << 20;
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let gpu = Location::Device(0);
        let mut vector = Growable::<u64>::on(NodeId(0))
            .access_by([gpu])
            .max_len(1 << 20)
            .step(2 * MIB)
            .create(&driver)
            .unwrap();
        let chunk = (2 * MIB / 8) as usize;
        for _ in 0..3 {
            vector.extend_from_slice(&vec![1; chunk]).unwrap();
        }
        // The first chunk differs from the others before.
        let hidden = [AccessDesc::new(gpu, Access::None)];
        vector.set_access_of(0..1, &hidden).unwrap();
        let new = [
            AccessDesc::new(Location::Host, Access::Read),
            AccessDesc::new(gpu, Access::Read),
        ];
        let access = |vector: &Growable<u64>| -> Vec<_> {
            let chunks = vector.chunks.iter().map(|chunk| chunk.mapping());
            chunks
                .map(|mapping| (mapping.host(), mapping.access(gpu).unwrap()))
                .collect()
        };
        let before = access(&vector);
        assert_eq!(before[0], (Access::ReadWrite, Access::None));
        assert_eq!(before[1..], [(Access::ReadWrite, Access::ReadWrite); 2]);
        let sim = driver.sim().unwrap();
        for nth in 1..=3 {
            sim.fail(Call::MemSetAccess, nth, Code::UNKNOWN);
            let error = vector.set_access(&new).unwrap_err();
            assert_eq!(error.code(), Some(Code::UNKNOWN));
            assert_eq!(access(&vector), before, "chunk {nth}");
            sim.fail(Call::MemSetAccess, nth, Code::UNKNOWN);
            let all = 0..3 * chunk;
            assert!(vector.set_access_of(all, &new).is_err());
            assert_eq!(access(&vector), before, "chunk {nth}");
        }
        // Memory that is added later is granted as before too.
        vector.push(1).unwrap();
        assert_eq!(access(&vector)[3], before[2]);
        vector.set_access(&new).unwrap();
        assert_eq!(access(&vector), [(Access::Read, Access::Read); 4]);
    }
}

#[cfg(test)]
mod growth_tests {
    use proptest::prelude::*;

    use super::*;

    const GRANULE: u64 = 2 << 20;

    proptest! {
        #[test]
        fn growth_is_whole_enough_and_fits(
            mapped in 0_u64..1 << 20,
            need in 1_u64..1 << 12,
            more in 0_u64..1 << 12,
            step in 0_u64..1 << 34,
        ) {
            let [mapped, need, room] = [mapped, need, need + more].map(|units| units * GRANULE);
            let bytes = growth((mapped, need, room), step, Granularity::TWO_MIB);
            prop_assert!(Granularity::TWO_MIB.divides(bytes));
            prop_assert!((need..=room).contains(&bytes));
            let wanted = if step == 0 { (mapped / 8).min(LARGEST_STEP) } else { step };
            prop_assert!(bytes >= wanted.min(room));
            // Never more than the step, except to fit the elements.
            prop_assert!(bytes == need || bytes < wanted + GRANULE || bytes == GRANULE);
        }
    }
}
