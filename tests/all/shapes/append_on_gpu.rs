//! Kernels that append; nothing on the simulator, which knows no such kernels.

use egmem::driver::Location;
use egmem::shapes::{Appender, device};
use egmem::{Buffer, Driver};

use crate::shapes::append_threads::Record;
use crate::shapes::appender::items;
use crate::shapes::kernels::{Kernels, PATIENCE};
use crate::shapes::{MIB, node};

const ITEMS: u64 = 2_000_000;
const SHARE: u64 = 100;

/// The items that make a record, as shapes.cu chooses them.
fn chosen() -> Vec<u64> {
    let makes = |&item: &u64| {
        let z = item.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z >> 56 < SHARE
    };
    (0..ITEMS).filter(makes).collect()
}

fn flags(driver: &Driver) -> Buffer {
    let flags = Buffer::near(driver, 0, ITEMS).unwrap();
    flags.fill(0).unwrap();
    flags
}

/// Runs the kernel; returns how many records came, and how many were missed.
fn round(
    kernels: &Kernels,
    appender: &mut Appender<Record>,
    done: &Buffer,
    ns: u64,
) -> (usize, u64) {
    let args = [
        appender.device_ptr().0,
        ITEMS,
        SHARE,
        done.device_ptr().0,
        ns,
    ];
    let run = kernels.run();
    // SAFETY: the appender and the flags live until the kernel was waited for.
    unsafe { kernels.start(&run, device::APPEND_ITEMS, (64, 256), &args) };
    appender.pump_while(run.stream()).unwrap();
    let came = appender.collect().unwrap();
    assert_eq!(came.stopped, None);
    (came.records.len(), came.missed)
}

/// With the cursor on the host node and in the GPU's memory.
pub fn kernels_append_while_the_host_maps(driver: &Driver) {
    let Some(kernels) = Kernels::load(driver) else {
        return;
    };
    let expected = chosen();
    for cursor in [node(driver).into(), Location::Device(0)] {
        let options = Appender::<Record>::on(node(driver)).max_len(ITEMS as usize);
        let options = options.step(2 * MIB).ahead(100_000).cursor_on(cursor);
        let mut appender = options.create(driver).unwrap();
        let done = flags(driver);
        // The kernel waits long enough for the host to map the missing memory; a driver may map nothing while it
        // runs.
        let mut left = expected.len();
        for _ in 0..20 {
            let (came, missed) = round(&kernels, &mut appender, &done, PATIENCE);
            left -= came;
            assert_eq!(missed, left as u64);
            if left == 0 {
                break;
            }
        }
        assert!(items(&appender) == expected);
        assert!(appender.records().chunks() > 2);
    }
}

/// The kernel waits for nothing: each launch appends the records that have memory, and the next one goes on.
pub fn kernels_append_later_what_had_no_memory(driver: &Driver) {
    let Some(kernels) = Kernels::load(driver) else {
        return;
    };
    let expected = chosen();
    let options = Appender::<Record>::on(node(driver)).max_len(ITEMS as usize);
    let options = options
        .step(2 * MIB)
        .ahead(1)
        .cursor_on(Location::Device(0));
    let mut appender = options.create(driver).unwrap();
    let done = flags(driver);
    let (mut left, mut rounds) = (expected.len(), 0);
    while left > 0 {
        let (came, missed) = round(&kernels, &mut appender, &done, 0);
        left -= came;
        assert_eq!(missed, left as u64);
        let mut set = vec![0_u8; ITEMS as usize];
        done.read_at(0, &mut set).unwrap();
        let set = set.iter().map(|&flag| usize::from(flag)).sum::<usize>();
        assert_eq!(set, expected.len() - left);
        rounds += 1;
        assert!(rounds < 100, "{left} are missing");
    }
    assert!(items(&appender) == expected);
    println!("{rounds} launches for {} records", expected.len());
}

/// More records than there may be: none is written behind the last.
pub fn kernels_stop_at_the_greatest_length(driver: &Driver) {
    let Some(kernels) = Kernels::load(driver) else {
        return;
    };
    let expected = chosen().len();
    let options = Appender::<Record>::on(node(driver)).max_len(300_000);
    let mut appender = options.create(driver).unwrap();
    let done = flags(driver);
    let (came, missed) = round(&kernels, &mut appender, &done, PATIENCE);
    assert_eq!((came, missed), (300_000, (expected - 300_000) as u64));
    let found = items(&appender);
    assert!(found.windows(2).all(|pair| pair[0] < pair[1]));
}
