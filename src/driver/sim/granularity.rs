//! The unit of physical memory.

/// Physical memory is created and mapped in units of this many bytes, at every location.
pub(super) const GRANULARITY: u64 = 2 << 20;

/// Returns whether a size or address is a positive multiple of the granularity.
pub(super) const fn is_granular(bytes: u64) -> bool {
    bytes != 0 && bytes.is_multiple_of(GRANULARITY)
}
