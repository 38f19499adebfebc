//! Lists whose lengths memory that others write decides.

use crate::{MemoryError, Result};

/// Returns an empty list with room for `count` values.
///
/// # Errors
/// [`System`](crate::MemoryError::System) if the process cannot allocate that much memory.
pub(crate) fn list_for<T>(count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(count).map_err(no_room)?;
    Ok(list)
}

/// Makes room for `more` values in a list that grows.
///
/// # Errors
/// As [`list_for`].
pub(crate) fn make_room_in<T>(list: &mut Vec<T>, more: usize) -> Result<()> {
    Ok(list.try_reserve(more).map_err(no_room)?)
}

fn no_room(error: impl ToString) -> MemoryError {
    MemoryError::failed("allocating the table of a tier", error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_is_an_error() {
        assert!(list_for::<u64>(usize::MAX / 8).is_err());
        let mut list = list_for::<u64>(9).unwrap();
        assert!(list.capacity() >= 9);
        assert!(make_room_in(&mut list, usize::MAX / 8).is_err());
        make_room_in(&mut list, 99).unwrap();
        assert!(list.capacity() >= 99);
    }
}
