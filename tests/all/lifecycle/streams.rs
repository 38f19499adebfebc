//! Streams and events.

use egmem::pinned::{DeviceMemory, PinnedHost};
use egmem::{Buffer, Driver, Error, Event, Stream};

use crate::lifecycle::{MIB, last};

pub fn streams_copy_in_all_directions(driver: &Driver) {
    let stream = Stream::new(driver, last(driver)).unwrap();
    let egm = Buffer::near(driver, 0, MIB).unwrap();
    let gpu = DeviceMemory::new(driver, last(driver), MIB).unwrap();
    let pinned = PinnedHost::new(driver, last(driver), MIB).unwrap();
    egm.write_at(0, b"extended gpu memory").unwrap();
    stream.copy(&gpu, 100, &egm, 0, 19).unwrap();
    stream.copy(&pinned, 3, &gpu, 100, 19).unwrap();
    let mut back = [0_u8; 19];
    pinned.cpu().read_at(3, &mut back).unwrap();
    assert_eq!(&back, b"extended gpu memory");
    assert!(matches!(
        stream.copy(&gpu, MIB - 1, &egm, 0, 2),
        Err(Error::OutOfRange { .. })
    ));
    stream.fill(&egm, 1, 3, 0xff).unwrap();
    assert_eq!(egm.get::<[u8; 4]>(0).unwrap(), [b'e', 0xff, 0xff, 0xff]);
}

pub fn events_order_streams(driver: &Driver) {
    let (first, second) = (
        Stream::new(driver, 0).unwrap(),
        Stream::new(driver, last(driver)).unwrap(),
    );
    let buffer = Buffer::near(driver, 0, 2 * MIB).unwrap();
    let event = Event::new(driver, 0, false).unwrap();
    // SAFETY: `buffer` outlives the work, which is waited for below.
    unsafe { first.memset_async(buffer.device_ptr(), 1, MIB).unwrap() };
    event.record(&first).unwrap();
    second.wait(&event).unwrap();
    // SAFETY: as above.
    unsafe { second.memset_async(buffer.device_ptr(), 2, 8).unwrap() };
    second.synchronize().unwrap();
    assert_eq!(buffer.get::<u8>(0).unwrap(), 2);
    assert_eq!(buffer.get::<u8>(8).unwrap(), 1);
    assert!(event.is_done().unwrap());
}
