//! Entries of the ledger, made and removed with the values that own memory.

use std::backtrace::Backtrace;
use std::mem;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use smallvec::smallvec;
use tracing::{Level, trace};

use super::allocation::{AccessList, AllocPath, Grants, Imported, Party};
use super::registry::{Range, Ranges, Record, Registry, now_ms};
use super::site::{Label, Site};
use crate::Driver;
use crate::backing::Chosen;
use crate::driver::{DevicePtr, Location};
use crate::vmm::identity::Identity;

/// The environment variable that turns backtraces on: any value except an empty one and `0`.
pub const BACKTRACES: &str = "EGMEM_BACKTRACES";

/// The target of the events about allocations, which docs/logging.md describes.
const TARGET: &str = "egmem::alloc";

/// 0: not asked yet, 1: off, 2: on.
static BACKTRACES_ON: AtomicU8 = AtomicU8::new(0);

/// Sets whether entries made from now on have the frames of the call that allocated. It takes microseconds each time. By
/// default as the environment variable `EGMEM_BACKTRACES` says, else off; an entry then has the caller's line alone.
pub fn capture_backtraces(on: bool) {
    BACKTRACES_ON.store(1 + u8::from(on), Relaxed);
}

/// Returns whether entries made from now on have the frames of the call that allocated.
pub fn captures_backtraces() -> bool {
    match BACKTRACES_ON.load(Relaxed) {
        0 => {
            let on = std::env::var_os(BACKTRACES).is_some_and(|set| !set.is_empty() && set != "0");
            BACKTRACES_ON.store(1 + u8::from(on), Relaxed);
            on
        }
        state => state == 2,
    }
}

/// The initial content of an entry.
#[derive(Debug)]
pub struct NewEntry<'a> {
    /// The memory's driver, which the entry's owner keeps alive.
    pub driver: &'a Driver,
    /// The size in bytes.
    pub bytes: u64,
    /// Where the memory lies.
    pub location: Location,
    /// How it was allocated.
    pub path: AllocPath,
    /// The program's name for it.
    pub label: Option<Label>,
    /// The program's call.
    pub site: Site,
}

/// An entry of the ledger: the value that owns an allocation has it, and dropping it removes the entry. It keeps no
/// memory alive. In a forked child, whose memory it is not, it changes nothing.
#[derive(Debug)]
pub struct Entry {
    registry: &'static Registry,
    slot: usize,
    /// Several chunks of memory share the record: the last of them removes it.
    shared: OnceLock<Arc<()>>,
}

impl Entry {
    /// Adds an entry for memory that is not mapped yet.
    pub fn new(new: NewEntry<'_>) -> Self {
        Self::with(new, Ranges::default())
    }

    /// Adds an entry for memory at `start`.
    pub fn mapped(new: NewEntry<'_>, start: DevicePtr, grants: Grants) -> Self {
        let bytes = new.bytes;
        let range = Range {
            start,
            bytes,
            grants,
        };
        Self::with(new, smallvec![range])
    }

    fn with(new: NewEntry<'_>, mapped: Ranges) -> Self {
        let registry = Registry::current();
        // Made in its place: the compiler copies what a box is made of.
        let mut record = Box::write(
            Box::new_uninit(),
            Record {
                number: 0,
                driver: new.driver.address(),
                driver_name: new.driver.name(),
                bytes: new.bytes,
                location: new.location,
                path: new.path,
                label: new.label,
                since: now_ms(),
                site: new.site,
                mapped,
                in_chunks: false,
                rare: None,
                lost: None,
            },
        );
        if captures_backtraces() && !record.site.has_frames() {
            record.rare().backtrace = Some(Arc::new(Backtrace::force_capture()));
        }
        let is_traced = tracing::enabled!(target: TARGET, Level::TRACE);
        let traced = is_traced.then(|| (record.label.clone(), record.site.clone()));
        let (slot, number) = registry.add(record);
        if let Some((label, site)) = traced {
            trace!(
                target: TARGET,
                number,
                driver = new.driver.name(),
                bytes = new.bytes,
                location = %new.location,
                path = new.path.name(),
                label = label.as_ref().map(Label::as_str),
                site = %site,
                "allocated"
            );
        }
        if !registry.hooked.load(Relaxed)
            && !registry.hooked.swap(true, Relaxed)
            && let Some(hook) = HOOK.get()
        {
            hook();
        }
        Self {
            registry,
            slot,
            shared: OnceLock::new(),
        }
    }

    /// Returns the same entry, for further chunks of its memory.
    pub(crate) fn again(&self) -> Self {
        Self {
            registry: self.registry,
            slot: self.slot,
            shared: Arc::clone(self.shared.get_or_init(Arc::default)).into(),
        }
    }

    fn change(&self, with: impl FnOnce(&mut Record)) {
        if self.registry.is_current() {
            self.registry.change(self.slot, with);
        }
    }

    /// Notes that the memory is mapped at `start`, and the access of locations to it there.
    pub fn grant(&self, start: DevicePtr, bytes: u64, access: AccessList) {
        self.change(|record| match record.find(start) {
            Ok(at) => record.mapped[at].grants.set_own(access),
            Err(at) => {
                let range = Range {
                    start,
                    bytes,
                    grants: Grants::Range(access),
                };
                record.mapped.insert(at, range);
            }
        });
    }

    /// Notes that the memory is no longer mapped at `start`, before these addresses are given back.
    pub fn unmap(&self, start: DevicePtr) {
        self.change(|record| {
            if let Ok(at) = record.find(start) {
                record.mapped.remove(at);
            }
        });
    }

    /// Adds a chunk to memory that is allocated in several, which share the entry.
    pub fn add_chunk(&self, bytes: u64) {
        let mut number = 0;
        self.change(|record| {
            record.bytes += bytes;
            record.in_chunks = true;
            number = record.number;
        });
        trace!(target: TARGET, number, bytes, "grew");
    }

    /// Sets the program's name for the memory.
    pub fn set_label(&self, label: Label) {
        self.change(|record| record.label = Some(label));
    }

    /// Notes a decision between the driver's memory and registered memory, unless the driver's was asked for.
    pub fn backed_by(&self, chosen: &Chosen) {
        if *chosen != Chosen::DRIVER {
            self.change(|record| record.rare().backing = Some(chosen.clone()));
        }
    }

    /// Notes that one more handle was exported, and the identity by which importers of that handle know the memory.
    pub fn exported(&self, identity: Option<Identity>) {
        self.change(|record| {
            let rare = record.rare();
            rare.identity = identity.or(rare.identity);
            rare.exports += 1;
        });
    }

    /// Notes a process that a handle was sent to.
    pub fn sent_to(&self, party: Party) {
        self.change(|record| record.rare().add_party(party));
    }

    /// Notes where imported memory comes from, and the program's call. A label replaces the one known.
    pub fn imported(&self, imported: Imported, label: Option<Label>, site: Site) {
        self.change(|record| {
            record.rare().imported = Some(imported);
            record.label = label.or_else(|| record.label.take());
            record.site = site;
        });
    }

    /// Calls `free`, which gives the memory and its addresses back and returns whether they are lost.
    ///
    /// The entry has no addresses meanwhile: the driver may return the same ones to another thread before `free` has
    /// returned. It has them again if the memory is lost.
    pub fn give_back(&self, driver: &Driver, free: impl FnOnce() -> bool) {
        let mut mapped = Ranges::default();
        self.change(|record| mapped = mem::take(&mut record.mapped));
        if free() {
            self.change(|record| record.mapped = mapped);
            self.lost(driver);
        }
    }

    /// Notes that the driver refused to take the memory back: the entry stays until the process ends.
    pub fn lost(&self, driver: &Driver) {
        self.change(|record| record.lost = Some(driver.downgrade()));
    }
}

fn log_release(record: &Record) {
    if !tracing::enabled!(target: TARGET, Level::TRACE) {
        return;
    }
    trace!(
        target: TARGET,
        number = record.number,
        driver = record.driver_name,
        bytes = record.bytes,
        location = %record.location,
        path = record.path.name(),
        label = record.label.as_ref().map(Label::as_str),
        age_ms = record.age_ms(now_ms()),
        "released"
    );
}

impl Drop for Entry {
    fn drop(&mut self) {
        let shared = self.shared.take();
        let is_last = shared.is_none_or(|shared| Arc::into_inner(shared).is_some());
        if is_last
            && self.registry.is_current()
            && let Some(record) = self.registry.take(self.slot)
        {
            log_release(&record);
        }
    }
}

static HOOK: OnceLock<fn()> = OnceLock::new();

/// Sets the function that is called once in each process, after its first entry is made. It must not allocate memory of a
/// driver. The first function that is set stays; returns whether it is this one.
pub fn on_first_entry(hook: fn()) -> bool {
    HOOK.set(hook).is_ok()
}
