use super::*;
use crate::memory::{AccessChecks, CpuMemory, Engine, Memory};
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
        other.0.with(|_| ())
    });
    assert_eq!(busy, Ok(Err(Error::Busy { pid })));
    assert_eq!(other.0.with(|_| ()), Ok(()), "it is free again");
    assert!(other.0.glance().pages > 0);
}

#[test]
fn a_report_leaves_the_repair_to_the_next_change() {
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
    assert_eq!(tier.0.glance().pages, 4);
    assert_eq!((words.get(LOCK), words.get(DIRTY)), (0, 1));
    assert_eq!(tier.stats().free, 4);
    assert_eq!((words.get(DIRTY), words.get(MEMBERS + 5 * MEMBER)), (0, 0));
}
