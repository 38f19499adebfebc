//! Tiers in memory that outlives processes.

use std::fmt;
use std::sync::Arc;

use crate::found::Found;
use crate::geometry::Geometry;
use crate::header::{self, Tag, There};
use crate::inner::Inner;
use crate::memory::CpuView;
use crate::persist;
use crate::table::Table;
use crate::tier::Tier;
use crate::{CopyMethod, Error, MemoryError, Result, TierMemory, Verify, owner};

impl Tier {
    /// Returns options for a tier in memory that outlives this process, such as a buffer of `egmem serve`. Pages that
    /// another process left there are found again.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use egmem::kv::{Key, Tier};
    /// use egmem::{Buffer, Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?;
    /// let memory = Arc::new(Buffer::near(&driver, 0, 4 << 20)?); // or client.fetch("kv")? of the exchange
    /// let tier = Tier::attach(memory.clone()).page_bytes(64 << 10).open()?;
    /// assert!(tier.found().is_new);
    /// tier.prepare_store(&[Key::new([1; 32])])?.commit()?;
    /// drop(tier); // or the process is killed
    ///
    /// let tier = Tier::attach(memory).page_bytes(64 << 10).open()?;
    /// assert_eq!((tier.found().ready, tier.lookup(&[Key::new([1; 32])])), (1, 1));
    /// # Ok::<(), egmem::kv::Error>(())
    /// ```
    pub fn attach<M: TierMemory + 'static>(memory: Arc<M>) -> AttachOptions {
        AttachOptions::new(memory)
    }
}

/// Options for a tier in given memory; [`open`](Self::open) attaches it.
#[must_use = "options do nothing until `open`"]
pub struct AttachOptions {
    memory: Arc<dyn TierMemory>,
    pages: Option<u64>,
    page_bytes: Option<u64>,
    tag: Tag,
    take_over: bool,
    reset: bool,
    method: CopyMethod,
    verify: Verify,
}

impl AttachOptions {
    fn new(memory: Arc<dyn TierMemory>) -> Self {
        Self {
            memory,
            pages: None,
            page_bytes: None,
            tag: Tag::default(),
            take_over: false,
            reset: false,
            method: CopyMethod::Auto,
            verify: Verify::Never,
        }
    }

    /// Sets the number of pages. If it is not set, it is that of the tier in the memory, or as many as fit.
    pub const fn pages(mut self, pages: u64) -> Self {
        self.pages = Some(pages);
        self
    }

    /// Sets the bytes of a page, which a new tier needs. If they are not set, they are those of the tier in the
    /// memory.
    pub const fn page_bytes(mut self, bytes: u64) -> Self {
        self.page_bytes = Some(bytes);
        self
    }

    /// Sets the meaning of the pages: a hash of the model, its precision and the layout of its cache. A tier with
    /// another tag is refused. The default is all zeros.
    pub const fn tag(mut self, tag: [u8; 32]) -> Self {
        self.tag = tag;
        self
    }

    /// Sets whether to take the tier from a process in another PID namespace, such as another container's, or on
    /// another machine. Only the caller can know that it has ended: two processes with one tier overwrite each
    /// other's pages. A process of this namespace that lives is never taken over.
    pub const fn take_over(mut self, on: bool) -> Self {
        self.take_over = on;
        self
    }

    /// Sets whether to create a tier where the memory has other data, or a tier of other sizes or with another tag.
    /// The earlier data is lost. A tier that a process has is not reset.
    pub const fn reset(mut self, on: bool) -> Self {
        self.reset = on;
        self
    }

    /// Sets how [`Tier::load`] and [`Tier::store`] copy. The default is [`CopyMethod::Auto`].
    pub const fn copy_method(mut self, method: CopyMethod) -> Self {
        self.method = method;
        self
    }

    /// Sets whether pages have checksums, and which are checked. The default is [`Verify::Never`].
    pub const fn verify(mut self, verify: Verify) -> Self {
        self.verify = verify;
        self
    }

    /// Attaches the tier: keeps ready pages with their keys and their order of use, and frees the pages that were
    /// being written. Memory whose first 4 KiB are zeros becomes a new tier, even if there are other bytes behind
    /// them.
    ///
    /// Everything in the memory is checked: for any bytes, the result is a tier whose pages lie in it, or an error.
    /// Contents of pages are not looked at. This process has the tier until its last handle is gone.
    ///
    /// # Errors
    /// [`Error::InUse`] if another process, or another tier of this one, has it; [`Error::NotATier`] for other data;
    /// [`Error::OtherTier`] for another tier than asked for; [`InvalidArgument`](crate::MemoryError::InvalidArgument)
    /// for a new tier whose sizes are out of range or not known, and for memory that is too small; [`NotAccessible`](crate::MemoryError::NotAccessible) unless the CPU may read and write;
    /// [`System`](crate::MemoryError::System) without `/proc`.
    pub fn open(self) -> Result<Tier> {
        self.method.check()?;
        let memory = Arc::clone(&self.memory);
        memory.driver().expect_this_process("memory")?;
        let view = memory.cpu()?;
        crate::inner::expect_writable(&view)?;
        view.slice(0, crate::geometry::HEADER)?;
        let plan = self.plan(&view, header::read(&view))?;
        let has_owner = !matches!(plan, Plan::Format(_, false));
        let own = owner::claim(&view, self.take_over, has_owner)?;
        // Read again: another process may have had it in between.
        let plan = self.plan(&view, header::read(&view));
        let opened = plan.and_then(|plan| self.open_claimed(&view, plan));
        let opened = opened.and_then(|(geometry, table, found)| {
            Inner::new(Arc::clone(&self.memory), geometry, table).map(|inner| (inner, found))
        });
        match opened {
            Ok((inner, found)) => {
                let inner = inner
                    .owned(own, found)
                    .copying_by(self.method)
                    .verifying(self.verify);
                Ok(Tier::new(inner))
            }
            Err(error) => {
                owner::release(&view, own);
                Err(error)
            }
        }
    }

    /// Decides what to do, before anything is written.
    fn plan(&self, view: &CpuView<'_>, there: Result<There>) -> Result<Plan> {
        match there {
            Ok(There::Tier(geometry, tag)) => match self.expect_wanted(&geometry, &tag) {
                Ok(()) => Ok(Plan::Keep(geometry)),
                Err(_) if self.reset => Ok(Plan::Format(self.new_geometry(view)?, true)),
                Err(error) => Err(error),
            },
            // A process that formats it at this moment has its word there.
            Ok(There::Nothing) => Ok(Plan::Format(self.new_geometry(view)?, true)),
            Err(Error::NotATier { .. }) if self.reset => {
                let geometry = self.new_geometry(view)?;
                Ok(Plan::Format(geometry, header::is_of_a_tier(view)?))
            }
            Err(error) => Err(error),
        }
    }

    fn expect_wanted(&self, geometry: &Geometry, tag: &Tag) -> Result<()> {
        let differs = |what, found: u64, wanted: Option<u64>| match wanted {
            Some(wanted) if wanted != found => Err(Error::OtherTier {
                what,
                found: found.to_string(),
                wanted: wanted.to_string(),
            }),
            _ => Ok(()),
        };
        differs("pages", geometry.pages.into(), self.pages)?;
        differs("bytes of a page", geometry.page_bytes, self.page_bytes)?;
        if *tag != self.tag {
            let hex = |tag: &Tag| tag.iter().map(|byte| format!("{byte:02x}")).collect();
            let (found, wanted) = (hex(tag), hex(&self.tag));
            return Err(Error::OtherTier {
                what: "tag",
                found,
                wanted,
            });
        }
        Ok(())
    }

    fn new_geometry(&self, view: &CpuView<'_>) -> Result<Geometry> {
        let unknown = || MemoryError::invalid("page_bytes", "a new tier needs the bytes of a page");
        let page_bytes = self.page_bytes.ok_or_else(unknown)?;
        let pages = self
            .pages
            .unwrap_or_else(|| Geometry::fitting(view.len(), page_bytes));
        let geometry = Geometry::new(pages, page_bytes)?;
        crate::inner::expect_room(view.len(), &geometry)?;
        Ok(geometry)
    }

    fn open_claimed(&self, view: &CpuView<'_>, plan: Plan) -> Result<(Geometry, Table, Found)> {
        let (Plan::Format(geometry, _) | Plan::Keep(geometry)) = plan;
        let mut table = Table::new(geometry.pages, geometry.page_bytes)?;
        let mut found = if let Plan::Format(..) = plan {
            header::format(view, &geometry, &self.tag)?;
            let is_new = true;
            Found {
                is_new,
                ..Found::default()
            }
        } else {
            persist::read(view, &geometry, &mut table)?
        };
        found.generation = header::next_generation(view)?;
        Ok((geometry, table, found))
    }
}

/// The use of the memory that `open` has decided on.
#[derive(Debug)]
enum Plan {
    Keep(Geometry),
    /// And whether the memory was a tier, so that the owner's word is one.
    Format(Geometry, bool),
}

impl fmt::Debug for AttachOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttachOptions")
            .field("memory", &self.memory.device_ptr())
            .field("pages", &self.pages)
            .field("page_bytes", &self.page_bytes)
            .field("take_over", &self.take_over)
            .field("reset", &self.reset)
            .finish_non_exhaustive()
    }
}
