//! Builds a heap from its options.

use super::backing::Backing;
use super::grower::{self, Decay};
use super::inner::HeapInner;
use super::{Heap, HeapOptions};
use crate::driver::{Driver, Location};
use crate::topology::Share;
use crate::{Error, Result};

impl Heap {
    /// Returns options for a heap at `location`: a node's id, or any [`Location`].
    pub fn on(location: impl Into<Location>) -> HeapOptions {
        HeapOptions::on(vec![location.into()])
    }

    /// Returns options for a heap whose chunks are spread over several nodes, such as
    /// [`PlacementRequest::place`](crate::topology::PlacementRequest::place) returns. A node gets at most its
    /// share, rounded down to 2 MiB; once a share is used up, chunks go to the other nodes. The sum of the
    /// shares is the heap's limit; [`limit`](HeapOptions::limit) can only lower it.
    pub fn spread(shares: &[Share]) -> HeapOptions {
        let nodes = shares.iter().map(|share| share.node.into()).collect();
        let bytes = shares.iter().map(|share| share.bytes);
        let mut options = HeapOptions::on(nodes).limit(bytes.clone().fold(0, u64::saturating_add));
        options.plan.shares = bytes.collect();
        options
    }
}

impl HeapOptions {
    /// Reserves the addresses and adds the memory that the heap is to have from the start.
    ///
    /// Source: `cuMemAddressReserve`; for memory `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no node, a limit or shares below 2 MiB or beyond the address space,
    /// chunks of 0 bytes, more reserved than the limit, or debug guards that leave no room for a block;
    /// [`Error::NoSuchNode`], [`Error::NoSuchGpu`]; the reason why memory cannot be shareable as requested;
    /// [`Error::OutOfAddresses`] for a limit that the address space has no room for; the driver's errors.
    /// With memory from the start, also the errors of [`Heap::reserve`]. [`Error::System`] if the kernel has
    /// no addresses for the table of blocks, a 32nd of the limit, or if a thread for [growth
    /// ahead](Self::grow_ahead) or [decay](Self::decay) cannot be started.
    #[track_caller]
    pub fn build(mut self, driver: &Driver) -> Result<Heap> {
        self.plan.site = crate::ledger::Site::here();
        let backing = Backing::new(driver, &self.plan)?;
        let (reserve, limit) = (self.reserve, backing.limit());
        if reserve > limit {
            let why = format!("{reserve} bytes from the start are more than the limit, {limit}");
            return Err(Error::invalid("reserve", why));
        }
        if let Some(debug) = &self.debug {
            debug.check(limit)?;
        }
        // From here on dropping `heap` releases everything.
        let heap = Heap::from_inner(HeapInner::new(driver, backing, &self)?);
        if reserve > 0 {
            heap.reserve(reserve)?;
        }
        let decay = |idle| Decay::new(idle, reserve, self.grow_ahead);
        grower::start(heap.inner(), self.decay.map(decay))?;
        Ok(heap)
    }
}
