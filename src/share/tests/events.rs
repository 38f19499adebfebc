//! Events over a channel.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use crate::driver::{Call, Code};
use crate::frame::{Body, Pointer};
use crate::{BootId, Channel, Driver, Error, Event, Machine, Peers};

fn pair() -> (Channel, Channel) {
    let (one, other) = UnixStream::pair().unwrap();
    let channel = |stream| Channel::new(stream, &Peers::same_user()).unwrap();
    (channel(one), channel(other))
}

fn driver() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

fn body(boot: BootId, gpu: [u8; 16]) -> Body {
    let handle = Pointer([7; 64]);
    Body::Event { boot, gpu, handle }
}

/// Sends a message and an fd as a peer could make them, and receives it as an event.
fn received(body: &Body) -> Error {
    let (mut one, mut other) = pair();
    let (_holder, tether) = io::pipe().unwrap();
    one.send_body(body, &[tether.as_fd()]).unwrap();
    other.receive_event(&driver()).unwrap_err()
}

#[test]
fn an_event_of_another_boot_or_another_gpu_is_refused() {
    let boot = BootId::current().unwrap();
    let gpu = driver().device_uuid(1).unwrap();
    for (body, why) in [
        (body(BootId::from_bytes([9; 16]), gpu), "another machine"),
        (body(boot, [9; 16]), "CUDA_VISIBLE_DEVICES"),
    ] {
        let error = received(&body).to_string();
        assert!(error.contains(why), "{error}");
    }
    // Bytes that are no handle: the driver says so, for the right GPU.
    let error = received(&body(boot, gpu));
    let call = error.driver_error().map(|error| error.call);
    assert_eq!(call, Some(Call::IpcOpenEventHandle), "{error}");
}

#[test]
fn an_event_of_this_process_cannot_be_received() {
    let driver = driver();
    let event = Event::interprocess(&driver, 2).unwrap();
    let (mut one, mut other) = pair();
    one.send_event(&event).unwrap();
    let error = other.receive_event(&driver).unwrap_err();
    let code = error.driver_error().map(|error| error.code);
    assert_eq!(code, Some(Code::INVALID_CONTEXT), "{error}");
}

#[test]
fn other_messages_are_no_event() {
    let (mut one, mut other) = pair();
    one.send_text("event").unwrap();
    let error = other.receive_event(&driver()).unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error}");
}
