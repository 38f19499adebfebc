//! Tiers in memory that outlives processes.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egmem_core::GrowingBuffer;
use egmem_core::ledger::add_tier;
use egmem_core::per_driver::lock;

use crate::copy::Kernels;
use crate::driver::setters;
use crate::events::Hub;
use crate::geometry::Geometry;
use crate::gpu::Borders;
use crate::header::{self, Lock, OPENER, PATIENCE, Tag, Wait};
use crate::inner::Inner;
use crate::members;
use crate::memory::{CpuView, is_of_one_kind};
use crate::table::{Private, Table};
use crate::tier::Tier;
use crate::words::Words;
use crate::{CopyMethod, Error, Found, MemoryError, Result, TierMemory, Verify};

/// The time between two looks.
const PAUSE: Duration = Duration::from_millis(1);

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
    page_sizes: Vec<u64>,
    tag: Tag,
    take_over: bool,
    reset: bool,
    method: CopyMethod,
    verify: Verify,
}

impl AttachOptions {
    pub(crate) fn new(memory: Arc<dyn TierMemory>) -> Self {
        Self {
            memory,
            pages: None,
            page_sizes: Vec::new(),
            tag: Tag::default(),
            take_over: false,
            reset: false,
            method: CopyMethod::Auto,
            verify: Verify::Never,
        }
    }

    setters! {
        /// Sets the number of pages. If it is not set, it is that of the tier in the memory, or as many as fit. A new tier of several
        /// [sizes](Self::page_sizes) is refused with it.
        pages(pages: u64) => pages = Some(pages);
        /// Sets the meaning of the pages: a hash of the model, its precision and the layout of its cache. A tier with
        /// another tag is refused. The default is all zeros.
        tag(tag: [u8; 32]) => tag = tag;
        /// Sets whether to take the tier from a process in another PID namespace, such as another container's, or on
        /// another machine. Only the caller can know that it has ended: its pages are freed, and one that lives after all overwrites
        /// those of others. A process of this namespace that lives is never taken over.
        take_over(on: bool) => take_over = on;
        /// Sets whether to create a tier where the memory has other data, or a tier of other sizes or with another tag.
        /// The earlier data is lost. A tier that has members is not reset.
        reset(on: bool) => reset = on;
        /// Sets how [`Tier::load`] and [`Tier::store`] copy. The default is [`CopyMethod::Auto`].
        copy_method(method: CopyMethod) => method = method;
        /// Sets whether pages have checksums, and which are checked. The default is [`Verify::Never`].
        verify(verify: Verify) => verify = verify;
    }

    /// Sets the bytes of a page, which a new tier needs. If they are not set, they are those of the tier in the
    /// memory.
    pub fn page_bytes(self, bytes: u64) -> Self {
        self.page_sizes([bytes])
    }

    /// Sets the bytes of pages of each group, as [`TierOptions::page_sizes`](crate::TierOptions::page_sizes) does. A new tier of
    /// several groups takes the whole memory.
    pub fn page_sizes(mut self, sizes: impl IntoIterator<Item = u64>) -> Self {
        self.page_sizes = sizes.into_iter().collect();
        self
    }

    /// Attaches the tier. Other processes may have it: this one becomes a [member](Tier::members) beside them. The first one keeps
    /// ready pages with their keys and their order of use, and frees the pages that were
    /// being written. Memory whose first 4 KiB are zeros becomes a new tier, even if there are other bytes behind
    /// them.
    ///
    /// Everything in the memory is checked: for any bytes, the result is a tier whose pages lie in it, or an error.
    /// Contents of pages are not looked at. This process has the tier until its last handle is gone.
    ///
    /// # Errors
    /// [`Error::InUse`] if a process elsewhere has it, and for a tier to be reset that has members;
    /// [`Error::TooManyMembers`]; [`Error::Busy`] if a process does not go on; [`Error::NotATier`] for other data;
    /// [`Error::OtherTier`] for another tier than asked for; [`InvalidArgument`](crate::MemoryError::InvalidArgument)
    /// for a new tier whose sizes are out of range or not known, and for memory that is too small; [`NotAccessible`](crate::MemoryError::NotAccessible) unless the CPU may read and write;
    /// [`System`](crate::MemoryError::System) without `/proc`.
    pub fn open(self) -> Result<Tier> {
        self.method.check()?;
        let memory = Arc::clone(&self.memory);
        memory.driver().expect_this_process("memory")?;
        let view = memory.cpu()?;
        let words = Words::new(&view)?;
        view.slice(0, crate::geometry::HEADER)?;
        // Read before the header: a process that begins a tier in other data writes this word first.
        let before = [words.get(OPENER), words.get(0)];
        let found = header::read(&view);
        let has_other_data = found.is_err() && !header::is_begun(&view)?;
        // Refused before anything is written. Where there is no tier yet, another process may begin one, or write one at this moment.
        if !matches!(found, Ok(None)) {
            self.plan(&view, found)?;
        }
        if has_other_data {
            words.expect_no_member(true)?;
        }
        // One process opens it at a time, so nobody sees a tier that is being written, and all know who is a member.
        let own = self.claim(&words, has_other_data.then_some(before))?;
        // Another process may have had it in between.
        let opened = self
            .plan(&view, header::read(&view))
            .and_then(|(geometry, is_new)| {
                if is_new {
                    // The words of members of other data than a whole tier mean nothing.
                    let elsewhere_has_ended = self.take_over || !header::is_of_a_tier(&view)?;
                    words.expect_no_member(elsewhere_has_ended)?;
                    header::format(&view, &geometry, &self.tag)?;
                }
                self.join(geometry, is_new, None)
            });
        members::release(&words, OPENER, own);
        opened
    }

    /// Waits until no other process opens the tier. A word that other data had there means nothing, unless it is that of a living
    /// process of this namespace: that one begins a tier at this moment. `in_other_data` are the opener's word and the first one.
    fn claim(&self, words: &Words<'_>, mut in_other_data: Option<[u64; 2]>) -> Result<u64> {
        let mut wait = Wait::new(words, PATIENCE);
        loop {
            let found = words.get(OPENER);
            let other_data = in_other_data.filter(|[opener, _]| *opener == found);
            let elsewhere_has_ended = self.take_over || other_data.is_some();
            let own = match members::claim(words, OPENER, found, elsewhere_has_ended) {
                Ok(Some(own)) => own,
                Ok(None) => continue, // it has another word by now
                Err(Error::InUse {
                    pid,
                    is_elsewhere: false,
                }) => {
                    if wait.is_over(words) {
                        return Err(Error::Busy { pid });
                    }
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Some([_, first]) = other_data else {
                return Ok(own);
            };
            // The word may be that of a process of another namespace that has not begun its tier yet, and that takes this process's
            // word for one of the data, too: the first one to change the first word has the tier.
            if words.swap(0, first, header::UNFINISHED) {
                // The other one may have put its word there.
                words.put(OPENER, own);
                return Ok(own);
            }
            words.swap(OPENER, own, found);
            in_other_data = None;
        }
    }

    /// Returns where everything lies, and whether the memory is formatted first: `found` is what [`header::read`] returned.
    fn plan(
        &self,
        view: &CpuView<'_>,
        found: Result<Option<(Geometry, Tag)>>,
    ) -> Result<(Geometry, bool)> {
        let found = found.and_then(|found| {
            let wanted = |(geometry, tag)| self.expect_wanted(&geometry, &tag).map(|()| geometry);
            found.map(wanted).transpose()
        });
        match found {
            Err(Error::NotATier { .. } | Error::OtherTier { .. }) if self.reset => {}
            Err(error) => return Err(error),
            Ok(Some(geometry)) => return Ok((geometry, false)),
            Ok(None) => {}
        }
        Ok((self.new_geometry(view)?, true))
    }

    fn expect_wanted(&self, geometry: &Geometry, tag: &Tag) -> Result<()> {
        let sizes = geometry.groups.iter().map(|group| group.page_bytes);
        let (sizes, pages) = (sizes.collect::<Vec<_>>(), u64::from(geometry.pages));
        let hex = |tag: &Tag| tag.iter().map(|byte| format!("{byte:02x}")).collect();
        let (what, found, wanted) = match (&sizes[..], &self.page_sizes[..], self.pages) {
            (_, _, Some(wanted)) if wanted != pages => {
                ("pages", pages.to_string(), wanted.to_string())
            }
            ([found], [wanted], _) if found != wanted => {
                ("bytes of a page", found.to_string(), wanted.to_string())
            }
            (found, wanted @ [_, ..], _) if found != wanted => {
                let text = |sizes: &[u64]| format!("{sizes:?}");
                ("sizes of pages", text(found), text(wanted))
            }
            _ if *tag != self.tag => ("tag", hex(tag), hex(&self.tag)),
            _ => return Ok(()),
        };
        Err(Error::OtherTier {
            what,
            found,
            wanted,
        })
    }

    fn new_geometry(&self, view: &CpuView<'_>) -> Result<Geometry> {
        let geometry = match self.page_sizes[..] {
            [] => {
                let why = "a new tier needs the bytes of a page";
                return Err(MemoryError::invalid("page_bytes", why).into());
            }
            [page_bytes] => {
                let fitting = || Geometry::fitting(view.len(), page_bytes);
                Geometry::new(self.pages.unwrap_or_else(fitting), page_bytes)?
            }
            _ if self.pages.is_some() => {
                let why = "a new tier of several sizes of pages takes the whole memory";
                return Err(MemoryError::invalid("pages", why).into());
            }
            _ => Geometry::of_bytes(view.len(), &self.page_sizes)?,
        };
        expect_room(view.len(), geometry.total)?;
        Ok(geometry)
    }

    /// Becomes a member of a tier in formatted memory, which may grow in the background.
    ///
    /// # Errors
    /// [`NotAccessible`](crate::MemoryError::NotAccessible) unless the CPU may read and write the memory;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) if it is too small; those of [`Words::claim_member`] and
    /// [`Lock::acquire`].
    pub(crate) fn join(
        &self,
        geometry: Geometry,
        is_new: bool,
        growing: Option<Arc<GrowingBuffer>>,
    ) -> Result<Tier> {
        let memory = Arc::clone(&self.memory);
        let front = match growing {
            Some(_) => geometry.front(),
            None => geometry.total,
        };
        expect_room(memory.len(), front)?;
        let grants = memory.hold_grants();
        let view = memory.cpu()?;
        let words = Words::new(&view)?;
        view.slice(0, front)?;
        if !is_of_one_kind(&*memory, 0, front) {
            // The driver crashes the process when one copy touches both.
            let why = "it has memory of the CPU and of a GPU";
            return Err(MemoryError::invalid("memory", why).into());
        }
        let private = Private::new(&geometry)?;
        let (member, before) = words.claim_member(self.take_over)?;
        let mut tier = Inner {
            own: Mutex::new(private),
            member,
            verify: self.verify,
            loaded: AtomicU64::new(0),
            events: Hub::new(memory.driver().clone()),
            geometry,
            borders: Borders::default(),
            memory: Arc::clone(&memory),
            growing,
            kernels: Kernels::default(),
            no_batches: AtomicBool::new(false),
            method: self.method,
            found: Found::default(),
            _grants: grants,
        };
        // If this fails, dropping the tier gives the membership up.
        tier.found = {
            let mut own = lock(&tier.own);
            let _lock = Lock::acquire(&words, member, PATIENCE, self.take_over)
                .inspect_err(|_| words.undo_claim(member, before))?;
            let mut table = Table::new(&words, &tier.geometry, member, &mut own);
            let found = table.join(tier.usable(), self.take_over)?;
            table.expect_undamaged()?;
            found
        };
        tier.found.generation = header::next_generation(&view)?;
        tier.found.is_new = is_new;
        let tier = Arc::new(tier);
        add_tier(tier.driver(), &tier);
        Ok(Tier(tier))
    }
}

/// Checks that memory of `bytes` bytes has room for the `needed` bytes of a tier.
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument).
fn expect_room(bytes: u64, needed: u64) -> Result<()> {
    if bytes >= needed {
        return Ok(());
    }
    let why = format!("it has {bytes} bytes");
    let valid = format!("{needed} bytes or more for this tier");
    Err(MemoryError::invalid_of("memory", why, valid).into())
}

impl fmt::Debug for AttachOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttachOptions")
            .field("memory", &self.memory.device_ptr())
            .field("pages", &self.pages)
            .field("page_sizes", &self.page_sizes)
            .field("take_over", &self.take_over)
            .field("reset", &self.reset)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;
    use crate::{Buffer, Driver};
    use egmem_core::Machine;

    fn memory() -> Arc<Buffer> {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        Arc::new(Buffer::near(&driver, 0, 1 << 20).unwrap())
    }

    /// Also behind a header that a process was killed in writing.
    #[test]
    fn bytes_behind_a_header_of_zeros_are_no_members() {
        for header in [0, header::UNFINISHED] {
            let memory = memory();
            memory.fill(0xa5).unwrap();
            memory.write_at(0, &[0_u8; 4096]).unwrap();
            memory.put(0, header).unwrap();
            let tier = Tier::attach(Arc::clone(&memory)).page_bytes(4096).open();
            let tier = tier.unwrap();
            assert!(tier.found().is_new);
            assert_eq!(tier.members().len(), 1);
        }
    }

    #[test]
    fn a_number_of_pages_is_refused_for_pages_of_several_sizes() {
        let memory = memory();
        let attach = || Tier::attach(Arc::clone(&memory)).page_sizes([4096, 1024]);
        let refused = attach().pages(8).open().unwrap_err();
        let is_refused = matches!(
            refused,
            Error::Memory(MemoryError::InvalidArgument { what: "pages", .. })
        );
        assert!(is_refused, "{refused}");
        let tier = attach().open().unwrap();
        assert!(tier.found().is_new);
        // Of a tier that is there, the number is compared.
        attach().pages(tier.pages().into()).open().unwrap();
    }

    /// The tier that another process writes at this moment may have that many pages.
    #[test]
    fn a_number_of_pages_of_several_sizes_waits_for_the_tier_that_is_being_written() {
        let memory = memory();
        memory.put(0, header::UNFINISHED).unwrap();
        memory.put(OPENER, members::own().unwrap()).unwrap();
        let attach = Tier::attach(memory).page_sizes([4096, 1024]).pages(8);
        let pid = std::process::id();
        assert_eq!(attach.open().unwrap_err(), Error::Busy { pid });
    }

    #[test]
    fn a_process_elsewhere_that_begins_in_other_data_is_not_overwritten() {
        let memory = memory();
        let view = memory.cpu().unwrap();
        let words = Words::new(&view).unwrap();
        let elsewhere = members::own().unwrap() ^ 1 << 22;
        let attach = Tier::attach(memory.clone()).page_bytes(4096).reset(true);
        words.put(OPENER, elsewhere);
        for (data, word) in [(header::UNFINISHED, elsewhere), (7, 5)] {
            words.put(0, data);
            let has_other_data = !header::is_begun(&view).unwrap();
            let refused = attach.claim(&words, has_other_data.then_some([word, data]));
            let in_use = Error::InUse {
                pid: std::process::id(),
                is_elsewhere: true,
            };
            assert_eq!(refused, Err(in_use), "{data}");
        }
        // It takes this process's word for one of the data, too, and begins first.
        let read = [elsewhere, 7];
        words.put(0, header::UNFINISHED);
        let refused = attach.claim(&words, Some(read));
        assert!(matches!(refused, Err(Error::InUse { .. })), "{refused:?}");
        assert_eq!(words.get(OPENER), elsewhere);
        // Its word is a part of the data: this process has begun before any other can.
        words.put(0, 7);
        let own = attach.claim(&words, Some(read)).unwrap();
        let found = (words.get(OPENER), words.get(0));
        assert_eq!(found, (own, header::UNFINISHED));
    }

    #[test]
    fn sizes_that_cannot_be_are_named() {
        let memory = memory();
        let driver = memory.driver().clone();
        let argument = |refused: Result<Tier>| match refused.unwrap_err() {
            Error::Memory(MemoryError::InvalidArgument { what, .. }) => what,
            other => panic!("{other}"),
        };
        let attach = |bytes| Tier::attach(Arc::clone(&memory)).page_bytes(bytes).open();
        let create = |bytes, page_bytes| {
            let tier = Tier::on(memory.location()).bytes(bytes);
            tier.page_bytes(page_bytes).create(&driver)
        };
        assert_eq!(argument(attach(0)), "page_bytes");
        assert_eq!(argument(attach(1 << 20)), "memory");
        assert_eq!(argument(create(1 << 20, 0)), "page_bytes");
        assert_eq!(argument(create(1 << 20, 1 << 20)), "bytes");
        assert_eq!(create(1 << 20, 1000 << 10).unwrap().pages(), 1);
    }

    #[test]
    fn a_process_that_opens_the_tier_and_does_not_go_on_is_named() {
        let memory = memory();
        memory.put(OPENER, members::own().unwrap()).unwrap();
        let refused = Tier::attach(memory).page_bytes(4096).open();
        let pid = std::process::id();
        assert_eq!(refused.unwrap_err(), Error::Busy { pid });
    }
}
