//! Memory that is never given back because a GPU may still use it. AddressSanitizer does not
//! report it (`ci/lsan.supp`).

use egmem::driver::{Call, Code};
use egmem::stream::TransferFailed;
use egmem::{Buffer, Driver, Stream};

use crate::lifecycle::transfers::fill;
use crate::lifecycle::{MIB, grace};

#[test]
fn a_forgotten_ticket_leaves_its_memory_mapped() {
    let driver = grace();
    let stream = Stream::new(&driver, 0).unwrap();
    let memory = Buffer::near(&driver, 0, MIB).unwrap();
    std::mem::forget(stream.start_fill((memory, 0), MIB, 7).unwrap());
    stream.synchronize().unwrap();
    assert!(!driver.sim().unwrap().held().is_empty());
}

/// Makes the driver refuse to wait for an event and to query it, for longer than a ticket retries.
fn silence(driver: &Driver) {
    let sim = driver.sim().unwrap();
    for call in [Call::EventSynchronize, Call::EventQuery] {
        for nth in 1..=100 {
            sim.fail(call, nth, Code::UNKNOWN);
        }
    }
}

#[test]
fn memory_is_leaked_where_the_driver_never_tells_of_the_end() {
    for dropped in [true, false] {
        let driver = grace();
        let (stream, fill) = fill(&driver);
        silence(&driver);
        if dropped {
            drop(fill);
        } else {
            let TransferFailed { error, operands } = fill.wait().unwrap_err();
            assert_eq!(error.code(), Some(Code::UNKNOWN));
            assert!(operands.is_none());
        }
        driver.sim().unwrap().cancel_all();
        // The work touches its memory only now.
        stream.synchronize().unwrap();
        assert!(!driver.sim().unwrap().held().is_empty());
    }
}

#[test]
fn a_refused_start_whose_end_is_unknown_is_a_ticket() {
    let driver = grace();
    let stream = Stream::new(&driver, 0).unwrap();
    let memory = Buffer::near(&driver, 0, MIB).unwrap();
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemsetD8Async, 1, Code::UNKNOWN);
    for call in [Call::StreamSynchronize, Call::StreamQuery] {
        for nth in 1..=100 {
            sim.fail(call, nth, Code::UNKNOWN);
        }
    }
    let fill = stream.start_fill((memory, 0), MIB, 7).unwrap();
    sim.cancel_all();
    assert!(fill.is_done().is_err());
    assert!(fill.wait().unwrap_err().operands.is_none());
    drop(stream);
    assert!(!sim.held().is_empty());
}

#[test]
#[cfg(feature = "portable")]
fn memory_is_leaked_where_a_task_is_never_told() {
    crate::lifecycle::awaiting::refused(1000, false);
}
