//! Memory that arrives over a channel, before it is imported.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::*;
use crate::{Channel, Error as ShareError, Peers};

const SHORT: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(300);

fn pair() -> (Channel, Channel) {
    let (one, other) = UnixStream::pair().unwrap();
    let channel = |stream| Channel::new(stream, &Peers::same_user()).unwrap();
    (channel(one), channel(other))
}

#[test]
fn an_offer_may_be_imported_to_read_alone() {
    let driver = driver();
    let shared = shared(&driver);
    let (mut one, mut other) = pair();
    one.send(&shared, Access::ReadWrite).unwrap();
    let offer = other.receive().unwrap().read_only();
    assert_eq!(offer.description().access, Access::Read);
    let imported = offer.import(&driver, ImportOptions::new()).unwrap();
    for location in [Location::Host, Location::Device(0), Location::Device(3)] {
        assert_eq!(imported.access(location).unwrap(), Access::Read);
    }
    assert!(imported.get::<u64>(0).is_ok() && imported.put(0, 1_u64).is_err());
    one.send(&shared, Access::Read).unwrap();
    let offer = other.receive().unwrap().read_only();
    assert_eq!(offer.description().access, Access::Read);
}

#[test]
fn a_wait_ends_with_a_message_and_with_the_connection() {
    let (mut one, mut other) = pair();
    assert!(!other.wait_for_message(SHORT).unwrap());
    one.send_text("x").unwrap();
    assert!(other.wait_for_message(LONG).unwrap());
    assert_eq!(other.receive_text(1).unwrap(), "x");
    assert!(!other.wait_for_message(Duration::ZERO).unwrap());
    drop(one);
    assert!(other.wait_for_message(LONG).unwrap());
    let error = other.receive_text(1).unwrap_err();
    assert!(matches!(error, ShareError::PeerLost { .. }), "{error}");
}
