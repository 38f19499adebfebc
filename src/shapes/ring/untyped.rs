//! Records whose size is known only when the program runs.

use super::{Batch, Records};
use crate::Result;

/// The type of records whose size is known only when the program runs: see [`Ring::untyped`](super::Ring::untyped).
#[derive(Debug)]
pub enum Untyped {}

impl Batch<'_, Untyped> {
    /// Writes bytes from the start of the batch on.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) for more bytes than the batch has.
    pub fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.view()?.write_at(0, bytes)
    }
}

impl Records<'_, Untyped> {
    /// Returns the bytes of all records.
    ///
    /// # Errors
    /// [`Error::NotAccessible`](crate::Error::NotAccessible).
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let view = self.view()?;
        let mut bytes = vec![0; view.len() as usize];
        view.read_at(0, &mut bytes)?;
        Ok(bytes)
    }
}
