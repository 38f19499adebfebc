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
    /// [`Error::StillHeld`] while a [`Prefix`](super::Prefix) or an export exists; as `Mapping::set_access`. Where a chunk
    /// fails, those before it are changed, and memory that is added later is granted as before.
    pub fn set_access(&mut self, access: &[AccessDesc]) -> Result<()> {
        let mut chunks = Vec::with_capacity(self.chunks.len());
        for chunk in &mut self.chunks {
            chunks.push(Arc::get_mut(chunk).ok_or_else(held)?);
        }
        for chunk in chunks {
            chunk.mapping_mut().set_access(access)?;
        }
        for new in access {
            self.access.retain(|old| old.location != new.location);
            self.access.push(*new);
        }
        Ok(())
    }

    /// Changes the access of locations to the chunk that holds element `index`, for instance to protect elements that
    /// are complete. Returns the range of elements that lie in it, at least in part.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where there is no memory; otherwise as [`set_access`](Self::set_access).
    pub fn set_chunk_access(
        &mut self,
        index: usize,
        access: &[AccessDesc],
    ) -> Result<std::ops::Range<usize>> {
        self.set_access_of(index..index.saturating_add(1), access)
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
        for chunk in &mut chunks {
            chunk.mapping_mut().set_access(access)?;
        }
        Ok(match (chunks.first(), chunks.last()) {
            (Some(first), Some(last)) => {
                let end = last.mapping().range().end.div_ceil(element);
                (first.mapping().range().start / element) as usize..end as usize
            }
            _ => elements.start..elements.start,
        })
    }
}

fn held() -> Error {
    Error::StillHeld {
        name: "a growable vector".into(),
        holders: vec!["a prefix or an export of it".into()],
    }
}
