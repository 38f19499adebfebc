//! Changes of the access to a vector's memory.

use std::sync::Arc;

use super::Growable;
use crate::driver::AccessDesc;
use crate::memory::check_range;
use crate::vmm::{Mapped, MappedPart};
use crate::{Error, Result};

impl<T> Growable<T> {
    /// Changes the access of locations to all of the memory, present and future. See
    /// [`Mapping::set_access`](crate::vmm::Mapping::set_access).
    ///
    /// # Errors
    /// [`Error::StillHeld`] while a [`Prefix`](super::Prefix) or an export exists; as `Mapping::set_access`. All chunks have
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
