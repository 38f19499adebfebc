//! Addresses that the kernel keeps for pages.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use super::pool::Pool;
use super::{Fork, map, map_anonymous, unmap};
use crate::driver::{Driver, NodeId};
use crate::per_driver::lock;
use crate::{Error, Result};

/// Addresses without memory, given back when dropped.
#[derive(Debug)]
pub struct Addresses {
    start: u64,
    size: u64,
    /// Where pages are mapped, in the order of addresses: a new mapping would replace them.
    taken: Mutex<Vec<Range<u64>>>,
    /// Where pages without a file can be mapped without a call of the kernel.
    prepared: Mutex<Range<u64>>,
    /// The threads that create pages, by node.
    pools: Mutex<Vec<(NodeId, Arc<Pool>)>>,
    /// Whether pages there are lost: the driver still uses them.
    lost: AtomicBool,
}

impl Addresses {
    /// Reserves `size` bytes, whole pages, from a multiple of `alignment` on, a power of two; at `hint` if that is free.
    ///
    /// # Errors
    /// [`Error::System`] if there is no such hole.
    pub fn reserve(size: u64, alignment: u64, hint: u64) -> Result<Self> {
        let what = || format!("reserving {size} bytes of addresses");
        let all = size
            .checked_add(alignment)
            .filter(|&all| all <= isize::MAX as u64)
            .ok_or_else(|| Error::failed(what(), "they exceed the address space"))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let base = map(hint, all, libc::PROT_NONE, flags, None)
            .map_err(|error| Error::system(what(), &error))?;
        let start = base.next_multiple_of(alignment);
        let end = start + size;
        // The parts before and behind are not needed.
        unmap(base, start - base);
        unmap(end, base + all - end);
        Ok(Self {
            start,
            size,
            taken: Mutex::default(),
            prepared: Mutex::default(),
            pools: Mutex::default(),
            lost: AtomicBool::new(false),
        })
    }

    /// Returns the first address.
    pub const fn start(&self) -> u64 {
        self.start
    }

    /// Prepares all addresses for pages without a file, of which none exists yet: the kernel makes each change of mappings wait for
    /// the threads that create pages, so one change is better than one for each chunk.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel refuses.
    pub fn prepare(&self, fork: Fork) -> Result<()> {
        let all = self.start..self.start + self.size;
        let mapped = map_anonymous(&all, fork);
        mapped.map_err(|error| Error::system("preparing addresses for pages", &error))?;
        *lock(&self.prepared) = all;
        Ok(())
    }

    /// Starts the threads that create `bytes` on a node, while the caller prepares the memory. What fails here fails again
    /// when they are to work.
    pub fn start_threads(&self, driver: &Driver, node: NodeId, bytes: u64) {
        if !driver.is_simulated() {
            let started = self.pool(node).start(driver, node, bytes);
            started.unwrap_or_else(|error| tracing::debug!(%error, "no threads for pages"));
        }
    }

    /// Returns whether a range was [prepared](Self::prepare), and not used since. Ranges are used in order.
    pub(super) fn use_prepared(&self, range: &Range<u64>) -> bool {
        let mut prepared = lock(&self.prepared);
        let is_next = prepared.start == range.start && range.end <= prepared.end;
        if is_next {
            prepared.start = range.end;
        }
        is_next
    }

    /// Returns the threads that create pages on a node.
    pub(super) fn pool(&self, node: NodeId) -> Arc<Pool> {
        let mut pools = lock(&self.pools);
        if let Some((_, pool)) = pools.iter().find(|(known, _)| *known == node) {
            return Arc::clone(pool);
        }
        let pool = Arc::<Pool>::default();
        pools.push((node, Arc::clone(&pool)));
        pool
    }

    /// Takes a range for a mapping.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if something is mapped in it.
    pub fn take(&self, range: &Range<u64>) -> Result<()> {
        let mut taken = lock(&self.taken);
        let behind = taken.partition_point(|known| known.start < range.end);
        if behind > 0 && taken[behind - 1].end > range.start {
            return Err(Error::invalid("range", "memory is mapped there already"));
        }
        taken.insert(behind, range.clone());
        Ok(())
    }

    /// Returns a range in which nothing is mapped any more.
    pub fn give_back(&self, range: &Range<u64>) {
        let mut taken = lock(&self.taken);
        if let Ok(at) = taken.binary_search_by_key(&range.start, |known| known.start) {
            taken.remove(at);
        }
    }

    /// Keeps the addresses until the process ends.
    pub fn keep(&self) {
        self.lost.store(true, Relaxed);
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        if self.lost.load(Relaxed) {
            return;
        }
        lock(&self.pools).iter().for_each(|(_, pool)| pool.close());
        unmap(self.start, self.size);
    }
}
