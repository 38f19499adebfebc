//! The tier: pages by key.

use std::sync::Arc;

use egmem_core::ledger::{ShowTier, TierUse};

use crate::copy::CopyMethod;
use crate::copy::job::{Job, start};
use crate::driver::DevicePtr;
use crate::events::{Events, Subscription, TierEvent, TierEventKind};
use crate::geometry::Geometry;
use crate::inner::Inner;
use crate::page::{Direction, PageId};
use crate::{Driver, Found, GpuPages, Key, Member, Result, Stats, Stream};

/// Returns numbers by type and name, with a help text and a value: a row each.
macro_rules! rows {
    ($($kind:ident $name:literal, $help:literal => $value:expr;)*) => {
        [$(($name, stringify!($kind), $help, $value)),*]
    };
}

/// Fixed pages of pinned host memory by [`Key`], in least-recently-used order. Clones are the same tier.
///
/// The memory is given back with the last clone, store, load and job. All calls may be made from any thread, and by several
/// processes that attach one memory; one lock is held for the time of a table operation, and never during a copy or a wait. What a process
/// that was killed had pinned or was writing is found and freed by the others.
///
/// See the [crate's](crate) example.
#[derive(Clone, Debug)]
pub struct Tier(pub(crate) Arc<Inner>);

impl Tier {
    /// Returns how many bytes of memory a tier takes, for the size of a buffer that one is to be attached in.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for sizes out of range.
    pub fn bytes_needed(pages: u64, page_bytes: u64) -> Result<u64> {
        Ok(Geometry::new(pages, page_bytes)?.total)
    }

    /// Returns the state in which [`attach`](Self::attach) found the memory. It is empty, but for its generation, for a tier in
    /// memory of its own.
    pub fn found(&self) -> Found {
        self.0.found
    }

    /// Returns how many of the first keys are ready: the rest of the list begins with one that is not. Changes no
    /// order. 0 in a forked child.
    pub fn lookup(&self, keys: &[Key]) -> usize {
        self.0.with(|table| table.lookup(keys)).unwrap_or(0)
    }

    /// Makes the ready ones among `keys` the most recently used pages: the first key last, because the keys behind it
    /// in a sequence are useless without it. Has no effect in a forked child.
    pub fn touch(&self, keys: &[Key]) {
        // Without it, the order is an older one.
        let _ = self.0.with(|table| table.touch(keys));
    }

    /// Frees the pages of `keys` that are ready and not pinned. Returns how many.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) in a forked child.
    pub fn remove(&self, keys: &[Key]) -> Result<usize> {
        let (count, noted) = self.0.with(|table| {
            let removed = table.remove(keys);
            let keys = || removed.iter().map(|removed| removed.key).collect();
            let noted = self.0.events.note(TierEventKind::Removed, keys);
            (removed.len(), noted)
        })?;
        drop(noted);
        Ok(count)
    }

    /// Returns the keys that are ready with their pages, the least recently used first; those of pinned pages come
    /// last. None in a forked child.
    pub fn keys(&self) -> Vec<(Key, PageId)> {
        let keys = self.0.with(|table| table.keys());
        keys.and_then(|keys| keys).unwrap_or_default()
    }

    /// Copies pages to blocks of a GPU's cache: each pair has a page, pinned by a [`Load`](crate::Load), and a block. Returns at
    /// once; the copies run on `stream`, in its order, by the tier's
    /// [`copy_method`](crate::TierOptions::copy_method). The job keeps the pages until it has ended.
    ///
    /// Nothing orders the copies against the CPU's accesses, or against work on other streams.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) for a page that is not pinned;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a block that the cache does not have, for a cache whose parts together are not a page, for
    /// another driver's stream or memory, for a stream that is being captured into a graph, and in a forked child;
    /// [`NotAccessible`](crate::MemoryError::NotAccessible) if the GPU may not use the memory; the driver's errors.
    pub fn load(&self, stream: &Stream, pairs: &[(PageId, u64)], gpu: &GpuPages) -> Result<Job> {
        self.load_by(self.0.method, stream, pairs, gpu)
    }

    /// Copies blocks of a GPU's cache to pages: each pair has a page of a [`Store`](crate::Store), and a block. Wait for the job
    /// before [`Store::commit`](crate::Store::commit). Otherwise as [`load`](Self::load).
    ///
    /// # Errors
    /// Those of [`load`](Self::load); [`Error::WrongState`](crate::Error::WrongState) for a page that is not being
    /// written. After the driver has refused a copy, [`Store::commit`](crate::Store::commit) answers
    /// [`CopyFailed`](crate::Error::CopyFailed), because some of the copies may have run: drop the store and prepare another one.
    /// A copy that is refused before it is submitted leaves the pages as they were.
    pub fn store(&self, stream: &Stream, pairs: &[(PageId, u64)], gpu: &GpuPages) -> Result<Job> {
        self.store_by(self.0.method, stream, pairs, gpu)
    }

    /// As [`load`](Self::load), by a method of the caller's choice.
    ///
    /// # Errors
    /// Those of [`load`](Self::load); [`UnusableMethod`](crate::Error::UnusableMethod) for a method that this driver or
    /// these addresses do not allow.
    pub fn load_by(
        &self,
        method: CopyMethod,
        stream: &Stream,
        pairs: &[(PageId, u64)],
        gpu: &GpuPages,
    ) -> Result<Job> {
        start(&self.0, (Direction::Load, method), stream, pairs, gpu)
    }

    /// As [`store`](Self::store), by a method of the caller's choice.
    ///
    /// # Errors
    /// Those of [`store`](Self::store) and [`load_by`](Self::load_by).
    pub fn store_by(
        &self,
        method: CopyMethod,
        stream: &Stream,
        pairs: &[(PageId, u64)],
        gpu: &GpuPages,
    ) -> Result<Job> {
        start(&self.0, (Direction::Store, method), stream, pairs, gpu)
    }

    /// Subscribes to the changes of keys from now on that handles of this tier make, in a queue for `capacity` keys. Keys that
    /// do not fit are lost ([`Events::lost`]). Changes that other processes make are not among them, nor are keys that an attach
    /// found.
    ///
    /// ```
    /// use egmem::driver::NodeId;
    /// use egmem::kv::{Key, Tier, TierEventKind};
    /// use egmem::{Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let tier = Tier::on(NodeId(0)).pages(4).page_bytes(4096).create(&driver)?;
    /// let events = tier.events(1 << 16);
    /// tier.prepare_store(&[Key::from_bytes(b"block 0")])?.commit()?;
    /// let event = events.try_next().unwrap();
    /// assert_eq!((event.kind, event.keys.len()), (TierEventKind::Stored, 1));
    /// # Ok::<(), egmem::kv::Error>(())
    /// ```
    pub fn events(&self, capacity: usize) -> Events {
        self.0.events.subscribe(capacity)
    }

    /// Calls `function` for each event, as [`events`](Self::events) has them, until the result is dropped: in the thread whose
    /// call made the change, before that call returns, and with no lock held. The function may use the tier, and drop this or
    /// another subscription. Threads that change keys at the same time may call it at the same time, and in another order
    /// than that of the changes, which [`TierEvent::number`] has. A panic of the function is one of that call.
    ///
    /// A function that has a handle of the tier keeps the tier until the subscription is dropped.
    pub fn on_event(&self, function: impl Fn(&TierEvent) + Send + Sync + 'static) -> Subscription {
        self.0.events.call(function)
    }

    /// Returns the address of a page, the same for the CPU and every GPU. Its contents are the caller's only while a
    /// [`Store`](crate::Store) or a [`Load`](crate::Load) has the page.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) for a page that is not of this tier.
    pub fn page_ptr(&self, page: PageId) -> Result<DevicePtr> {
        self.0.expect_page(page)?;
        let memory = self.0.memory.device_ptr();
        Ok(memory.add(self.0.geometry.page_at(page)))
    }

    /// Returns the tier's counters and its present contents. All are 0 in a forked child.
    pub fn stats(&self) -> Stats {
        let growth = self.growth();
        let stats = self.0.with(|table| {
            table.sweep_if_due()?;
            Ok(table.stats())
        });
        let mut stats = stats.and_then(|stats| stats).unwrap_or_default();
        stats.growth = growth;
        stats
    }

    /// As [`lookup`](Self::lookup), for callers that must not wait, such as one with a lock of its own. `None` if another thread or process
    /// has the tier's lock, if the table is to be repaired first, and in a forked child.
    pub fn try_lookup(&self, keys: &[Key]) -> Option<usize> {
        self.0.with_now(|table| table.lookup(keys))
    }

    /// As [`touch`](Self::touch), without a wait; `None` as for [`try_lookup`](Self::try_lookup).
    pub fn try_touch(&self, keys: &[Key]) -> Option<()> {
        self.0.with_now(|table| table.touch(keys))
    }

    /// As [`stats`](Self::stats), without a wait. The numbers include pages that ended processes had pinned or were writing. `None` as for
    /// [`try_lookup`](Self::try_lookup).
    pub fn try_stats(&self) -> Option<Stats> {
        let growth = self.growth();
        let mut stats = self.0.with_now(|table| table.stats())?;
        stats.growth = growth;
        Some(stats)
    }

    /// Returns the number of pages, those without memory included. Of several groups, as many as there could be of the smallest.
    pub fn pages(&self) -> u32 {
        self.0.geometry.pages
    }

    /// Returns the bytes of a page, of group 0 if there are several.
    pub fn page_bytes(&self) -> u64 {
        self.0.geometry.page_bytes
    }

    /// Returns the number of groups of keys, each of which has a size of pages.
    pub fn groups(&self) -> usize {
        self.0.geometry.groups.len()
    }

    /// Returns the bytes of a page of a group; `None` if there is no such group.
    pub fn page_bytes_of(&self, group: usize) -> Option<u64> {
        let group = self.0.geometry.groups.get(group)?;
        Some(group.page_bytes)
    }

    /// Returns the open tiers on this memory, of this and other processes. None in a forked child.
    pub fn members(&self) -> Vec<Member> {
        let words = self.0.words();
        words.map_or(Vec::new(), |words| words.list_members(self.0.member))
    }

    /// Returns the tier's driver.
    pub fn driver(&self) -> &Driver {
        self.0.driver()
    }
}

impl Tier {
    /// Returns the tier's [`stats`](Self::stats) in Prometheus' text format, version 0.0.4: each number with its help and its type, and
    /// with these labels, which distinguish tiers. Names begin with `egmem_kv_`, and those of counters end in `_total`.
    ///
    /// Values of labels are escaped. In names of labels, `_` replaces each character that Prometheus does not allow; of two labels of one
    /// name the first one counts. A server's answer to Prometheus has each
    /// name once: do not join the texts of several tiers.
    ///
    /// ```
    /// use egmem::driver::NodeId;
    /// use egmem::kv::Tier;
    /// use egmem::{Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let tier = Tier::on(NodeId(0)).pages(4).page_bytes(4096).create(&driver)?;
    /// let text = tier.metrics(&[("engine", "0")]);
    /// assert!(text.contains("\negmem_kv_free_pages{engine=\"0\"} 4\n"));
    /// # Ok::<(), egmem::kv::Error>(())
    /// ```
    pub fn metrics(&self, labels: &[(&str, &str)]) -> String {
        let stats = self.stats();
        let labels = labels_of(labels);
        let rows = rows! {
            gauge "pages", "Pages of the tier" => stats.pages;
            gauge "page_bytes", "Bytes of a page" => stats.page_bytes;
            gauge "usable_pages", "Pages whose memory is there" => stats.usable;
            gauge "free_pages", "Pages that are free" => stats.free;
            gauge "writing_pages", "Pages that stores are writing" => stats.writing;
            gauge "ready_pages", "Pages that can be loaded" => stats.ready;
            gauge "pinned_pages", "Ready pages that loads and copies have" => stats.pinned;
            counter "hits_total", "Keys that look-ups found" => stats.hits;
            counter "misses_total", "Keys that look-ups did not find, or that came after one" => stats.misses;
            counter "stores_total", "Pages that commits made ready" => stats.stores;
            counter "evictions_total", "Ready pages that made room for others" => stats.evictions;
            counter "damaged_total", "Pages found with other bytes than were committed" => stats.damaged;
            counter "loaded_bytes_total", "Bytes copied to GPUs" => stats.loaded_bytes;
            counter "stored_bytes_total", "Bytes copied from GPUs" => stats.stored_bytes;
        };
        let text = |(name, kind, help, value)| {
            let name = format!("egmem_kv_{name}");
            format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{labels} {value}\n")
        };
        rows.map(text).concat()
    }
}

/// Returns labels in braces; nothing for none.
fn labels_of(labels: &[(&str, &str)]) -> String {
    let mut texts: Vec<String> = Vec::with_capacity(labels.len());
    for (name, value) in labels {
        let start = format!("{}=\"", label_name(name));
        if !texts.iter().any(|text| text.starts_with(&start)) {
            let value = value
                .replace('\\', r"\\")
                .replace('"', "\\\"")
                .replace('\n', r"\n");
            texts.push(format!("{start}{value}\""));
        }
    }
    match texts.is_empty() {
        true => String::new(),
        false => format!("{{{}}}", texts.join(",")),
    }
}

/// Returns a label's name with `_` for each character that is not allowed there, and before a digit at its beginning.
fn label_name(name: &str) -> String {
    let is_allowed = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let allowed = name.replace(|character| !is_allowed(character), "_");
    match allowed.chars().next() {
        None | Some('0'..='9') => format!("_{allowed}"),
        Some(_) => allowed,
    }
}

impl ShowTier for Inner {
    fn show(self: Arc<Self>) -> TierUse {
        let mut shown = TierUse::new(self.memory.location(), self.memory.device_ptr());
        shown.stats = self.glance();
        shown.stats.growth = Tier(self).growth();
        shown
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use egmem_core::ledger::{self, TierUse};
    use egmem_core::{Buffer, Machine, Memory};

    use crate::{Driver, Key, Tier};

    fn shown(driver: &Driver) -> TierUse {
        let [tier] = &ledger::tiers(driver)[..] else {
            panic!("one tier is open");
        };
        tier.clone()
    }

    #[test]
    fn the_ledger_shows_a_tiers_numbers_while_it_is_open() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let buffer = Arc::new(Buffer::near(&driver, 0, 1 << 20).unwrap());
        let attach = || Tier::attach(Arc::clone(&buffer)).pages(4).page_bytes(4096);
        let tier = attach().open().unwrap();
        let keys: Vec<Key> = (0..7).map(|n| Key::new([n; 32])).collect();
        tier.prepare_store(&keys[..4]).unwrap().commit().unwrap();
        tier.prepare_store(&keys[4..5]).unwrap().commit().unwrap();
        let store = tier.prepare_store(&keys[5..6]).unwrap();
        drop(tier.prepare_store(&keys[6..]).unwrap());
        let load = tier.prepare_load(&keys[4..5]).unwrap();
        assert_eq!(tier.lookup(&[keys[4], keys[5], keys[4]]), 1);

        let found = shown(&driver);
        let at = (found.address, found.location);
        assert_eq!(at, (buffer.device_ptr().0, buffer.location()));
        let found = found.stats;
        assert_eq!((found.page_bytes, found.pages, found.usable), (4096, 4, 4));
        let states = (found.free, found.writing, found.ready, found.pinned);
        assert_eq!(states, (1, 1, 2, 1));
        let counts = (found.hits, found.misses, found.evictions);
        assert_eq!(counts, (1, 2, 3));
        assert_eq!(found.growth, tier.growth());

        let other = tier.clone();
        drop((tier, store, load));
        assert_eq!(shown(&driver).stats.pinned, 0, "a handle is left");
        drop(other);
        assert!(ledger::tiers(&driver).is_empty());
        let again = attach().open().unwrap();
        assert_eq!(shown(&driver).stats.hits, 0);
        drop(again);
    }
}
