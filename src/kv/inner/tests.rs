use super::*;
use crate::driver::{Access, DevicePtr, Location};
use crate::memory::{AccessChecks, CpuMemory, CpuView, Engine, Memory};
use crate::{Buffer, Tier};
use egmem_core::Machine;

/// Memory that says that its second half is of another kind.
struct Mixed(Buffer);

// SAFETY: the buffer answers, and the kinds allow less than it does.
unsafe impl AccessChecks for Mixed {
    fn gpu_access(
        &self,
        gpu: i32,
        engine: Engine,
        offset: u64,
        len: u64,
    ) -> Result<Access, MemoryError> {
        self.0.gpu_access(gpu, engine, offset, len)
    }

    fn of_one_copy(&self, _offset: u64, len: u64) -> u64 {
        len / 2
    }

    fn may_be_on_host(&self, offset: u64, _len: u64) -> bool {
        offset == 0
    }
}

impl Memory for Mixed {
    fn driver(&self) -> &Driver {
        self.0.driver()
    }
    fn device_ptr(&self) -> DevicePtr {
        self.0.device_ptr()
    }
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn location(&self) -> Location {
        self.0.location()
    }
}

impl CpuMemory for Mixed {
    fn cpu(&self) -> Result<CpuView<'_>, MemoryError> {
        self.0.cpu()
    }
}

#[test]
fn a_tier_lies_in_memory_of_one_kind() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let buffer = Buffer::near(&driver, 0, 1 << 20).unwrap();
    let refused = Tier::attach(Arc::new(Mixed(buffer)))
        .page_bytes(4096)
        .open();
    let is_refused = matches!(
        refused,
        Err(Error::Memory(MemoryError::InvalidArgument {
            what: "memory",
            ..
        }))
    );
    assert!(is_refused, "{refused:?}");
}

#[test]
fn a_lock_that_a_living_process_keeps_is_waited_for_so_long() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let memory = Arc::new(Buffer::near(&driver, 0, 1 << 20).unwrap());
    let open = || Tier::attach(Arc::clone(&memory)).page_bytes(4096).open();
    let (one, other) = (open().unwrap(), open().unwrap());
    let pid = std::process::id();
    let busy = one.0.with(|_| {
        assert_eq!(other.0.glance(), Stats::default());
        assert_eq!(other.0.with_now(|_| ()), None);
        assert_eq!(one.0.with_now(|_| ()), None, "another thread's call");
        other.0.with(|_| ())
    });
    assert_eq!(busy, Ok(Err(Error::Busy { pid })));
    assert_eq!(other.0.with_now(|_| ()), Some(()), "it is free again");
    assert!(other.0.glance().pages > 0);
}

#[test]
fn a_tier_that_could_not_be_opened_has_no_member() {
    use crate::geometry::{MEMBER, MEMBERS};

    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let memory = Arc::new(Buffer::near(&driver, 0, 1 << 20).unwrap());
    let open = || Tier::attach(Arc::clone(&memory)).page_bytes(4096).open();
    let tier = open().unwrap();
    let pid = std::process::id();
    let refused = || tier.0.with(|_| open().map(drop));
    assert_eq!(refused(), Ok(Err(Error::Busy { pid })));
    assert_eq!(tier.members().len(), 1);
    // The number of one that has ended is its own again: nobody else would look for its pages.
    let view = memory.cpu().unwrap();
    let words = Words::new(&view).unwrap();
    let (number_5, living) = (MEMBERS + 5 * MEMBER, words.get(MEMBERS));
    (1..64).for_each(|number| words.put(MEMBERS + number * MEMBER, living));
    words.put(number_5, living ^ 1);
    assert_eq!(refused(), Ok(Err(Error::Busy { pid })));
    assert_eq!(words.get(number_5), living ^ 1);
}

#[test]
fn a_report_leaves_the_lock_of_an_ended_process_to_the_next_change() {
    use crate::geometry::{MEMBER, MEMBERS};
    use crate::header::LOCK;

    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let tier = Tier::on(crate::driver::NodeId(0));
    let tier = tier.pages(4).page_bytes(4096).create(&driver).unwrap();
    let view = tier.0.memory.cpu().unwrap();
    let words = Words::new(&view).unwrap();
    // A process that was killed with the lock: it has this one's number, and started at another time.
    let ended = words.get(MEMBERS) ^ 1;
    words.put(MEMBERS + 5 * MEMBER, ended);
    words.put(LOCK, 6 | (ended & 0xffff_ffff) << 32);
    assert_eq!(tier.0.glance(), Stats::default());
    assert_eq!(tier.0.with_now(|_| ()), None);
    assert_eq!((words.get(LOCK) & 0xff, words.get(DIRTY)), (6, 0));
    assert_eq!(tier.stats().free, 4);
    assert_eq!((words.get(DIRTY), words.get(MEMBERS + 5 * MEMBER)), (0, 0));
}

/// Nobody but the caller can know that such a process has ended.
#[test]
fn a_process_elsewhere_that_was_killed_with_the_lock_is_taken_over() {
    use crate::geometry::{MEMBER, MEMBERS};
    use crate::header::LOCK;

    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let memory = Arc::new(Buffer::near(&driver, 0, 1 << 20).unwrap());
    let attach = || Tier::attach(Arc::clone(&memory)).page_bytes(4096);
    let tier = attach().open().unwrap();
    let view = memory.cpu().unwrap();
    let words = Words::new(&view).unwrap();
    let elsewhere = words.get(MEMBERS) ^ 1 << 22;
    drop(tier);
    let number_5 = MEMBERS + 5 * MEMBER;
    words.put(number_5, elsewhere);
    words.put(LOCK, 6 | (elsewhere & 0xffff_ffff) << 32);
    assert!(matches!(attach().open(), Err(Error::InUse { .. })));
    let tier = attach().take_over(true).open().unwrap();
    assert_eq!((words.get(DIRTY), words.get(number_5)), (0, 0));
    assert_eq!(tier.members().len(), 1);
}

/// A call that meets damage gives back the pages that it has taken, and tells functions what it has evicted.
#[test]
fn a_call_that_meets_damage_keeps_no_page() {
    use std::sync::atomic::AtomicUsize;

    use crate::Key;

    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let tier = Tier::on(crate::driver::NodeId(0));
    let tier = tier.pages(3).page_bytes(4096).create(&driver).unwrap();
    let keys: Vec<Key> = (0..5).map(|n| Key::new([n; 32])).collect();
    let view = tier.0.memory.cpu().unwrap();
    let words = Words::new(&view).unwrap();
    // The neighbours of a page in its list.
    let links = |page: u32| tier.0.geometry.slot_at(page) + 104;
    let told = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&told);
    let _subscription = tier.on_event(move |event| {
        counted.fetch_add(event.keys.len(), Relaxed);
    });
    let counts = || (tier.stats().free, tier.stats().writing, tier.stats().pinned);

    words.put(links(1), 0);
    let damaged = tier.prepare_store(&keys[..1]).map(drop);
    assert_eq!(damaged, Err(Error::Damaged));
    assert_eq!(counts(), (3, 0, 0));

    tier.prepare_store(&keys[..3]).unwrap().commit().unwrap();
    words.put(links(1), 0);
    let page = tier.keys()[1].1.number();
    assert_eq!(page, 1, "it is in the middle");
    let damaged = tier.prepare_load(&keys[2..3]).map(drop);
    assert_eq!(damaged, Err(Error::Damaged));
    assert_eq!(counts(), (0, 0, 0));
    assert_eq!(tier.lookup(&keys[..3]), 3);

    told.store(0, Relaxed);
    words.put(links(0), 0);
    let damaged = tier.prepare_store(&keys[3..4]).map(drop);
    assert_eq!(damaged, Err(Error::Damaged));
    assert_eq!(counts(), (1, 0, 0));
    assert_eq!(told.load(Relaxed), 1);

    words.put(links(0), 0);
    assert_eq!(tier.try_touch(&keys[2..3]), None, "it repairs nothing");
    assert_eq!(words.get(DIRTY), 1);
    assert_eq!((tier.lookup(&keys[..2]), words.get(DIRTY)), (1, 0));
}

#[test]
fn an_end_that_meets_damage_is_written_once() {
    use crate::Key;
    use crate::geometry::GROUPS;

    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let tier = Tier::on(crate::driver::NodeId(0));
    let tier = tier.pages(3).page_bytes(4096).create(&driver).unwrap();
    let keys = [Key::new([1; 32]), Key::new([2; 32])];
    tier.prepare_store(&keys).unwrap().commit().unwrap();
    let both = tier.prepare_load(&keys).unwrap();
    let _first = tier.prepare_load(&keys[..1]).unwrap();
    let view = tier.0.memory.cpu().unwrap();
    // The newest page of the list of use is none of the tier's.
    let newest = GROUPS + 24;
    Words::new(&view).unwrap().put(newest, 9 << 32);
    drop(both);
    let stats = tier.stats();
    assert_eq!((stats.ready, stats.pinned), (2, 1));
}

#[test]
fn a_tier_that_was_taken_over_changes_nothing() {
    use crate::geometry::MEMBERS;

    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let memory = Arc::new(Buffer::near(&driver, 0, 1 << 20).unwrap());
    let tier = Tier::attach(Arc::clone(&memory)).page_bytes(4096).open();
    let tier = tier.unwrap();
    let view = memory.cpu().unwrap();
    let words = Words::new(&view).unwrap();
    let other = words.get(MEMBERS) ^ 1;
    words.put(MEMBERS, other);
    assert!(matches!(tier.0.with(|_| ()), Err(Error::Memory(_))));
    assert_eq!(tier.0.with_now(|_| ()), None);
    drop(tier);
    assert_eq!(words.get(MEMBERS), other);
}
