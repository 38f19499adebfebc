//! Memory of this process behind physical memory: its pages exist from the mapping on, and the driver pins them when a GPU
//! is granted access.
//!
//! ```text
//! Pages ── map: mmap, touched by threads ──▶ PagesMapping ── grant: cuMemHostRegister ──▶ CPU and every GPU
//! ```

mod addresses;
mod calls;
mod export;
mod file;
mod mapped;
mod place;
mod pool;
mod sizes;

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::Acquire, Ordering::Release};

pub use addresses::Addresses;
pub use mapped::PagesMapping;
pub use sizes::huge_bytes;

use crate::driver::{Driver, NodeId};
use crate::size::Granularity;
use crate::{Error, Result};

/// The unit of sizes: a huge page.
pub const GRANULARITY: Granularity = Granularity::TWO_MIB;

/// What a forked child has of pages without a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fork {
    /// The same pages, as of the driver's memory.
    #[default]
    Shared,
    /// Zeros of its own. Such pages are created faster.
    Zeros,
}

/// Pages on a host node.
#[derive(Debug)]
pub struct Pages {
    node: NodeId,
    /// A sealed memfd; `None`: anonymous pages, which exist while they are mapped.
    file: Option<File>,
    fork: Fork,
    /// Whether anonymous pages are mapped now. A second mapping would have pages of its own.
    mapped: AtomicBool,
    /// Whether the file's pages exist on the node. They outlive their mappings.
    placed: AtomicBool,
}

impl Pages {
    /// Returns pages without a file, which no other process can map.
    pub const fn private(node: NodeId, fork: Fork) -> Self {
        Self {
            node,
            file: None,
            fork,
            mapped: AtomicBool::new(false),
            placed: AtomicBool::new(false),
        }
    }

    /// Creates a file of `bytes`, whose pages another process can map. They exist once they are mapped and touched.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn shareable(node: NodeId, bytes: u64) -> Result<Self> {
        Ok(Self {
            file: Some(file::create(node, bytes)?),
            ..Self::private(node, Fork::Shared)
        })
    }

    /// Returns the pages behind an fd that [`export`](Self::export) made in any process; `None` for any other fd.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they are not `bytes` bytes, if some do not exist, or if another process could take
    /// them away.
    pub fn import(driver: &Driver, fd: BorrowedFd<'_>, bytes: u64) -> Result<Option<Self>> {
        let Some((file, node)) = file::open(fd, bytes)? else {
            return Ok(None);
        };
        // Those of a simulated machine come when they are touched.
        if !driver.is_simulated() {
            file::expect_whole(&file)?;
        }
        Ok(Some(Self {
            file: Some(file),
            placed: AtomicBool::new(true),
            ..Self::private(node, Fork::Shared)
        }))
    }

    /// Returns the node that the pages are bound to.
    pub const fn node(&self) -> NodeId {
        self.node
    }

    /// Claims private pages for a mapping, which releases them.
    fn claim(&self) -> Result<()> {
        if self.file.is_none() && self.mapped.swap(true, AcqRel) {
            let why = "it is mapped already, and private registered memory has one mapping: make it shareable";
            return Err(Error::invalid("memory", why));
        }
        Ok(())
    }

    /// Returns whether a mapping need not create the pages.
    fn are_placed(&self) -> bool {
        self.file.is_some() && self.placed.load(Acquire)
    }

    fn release(&self) {
        self.mapped.store(false, Release);
    }
}
