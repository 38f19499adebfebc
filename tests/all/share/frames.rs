//! Connections that are admitted, and frames that are accepted.

use std::fs;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use egmem::driver::{Access, HandleType, ShareableHandle};
use egmem::share::{Channel, Error, ImportOptions, Listener, Peers, Shared};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::process::{Place, Process, connect, receive};
use super::{IMPATIENCE, PATIENCE, buffer, nothing_held, open};

#[test]
fn another_user_is_refused_on_both_sides() {
    let place = Place::new();
    let stranger = rustix::process::geteuid().as_raw() + 1;
    let mut listener = Listener::bind(&place.socket, Peers::user(stranger)).unwrap();
    listener.set_timeout(PATIENCE).unwrap();
    let process = Process::start("stranger", &place.socket);
    let error = listener.accept().unwrap_err();
    assert!(matches!(error, Error::NotTrusted { .. }), "{error}");
    process.ends_well();
    // The connecting process's policy counts as well.
    let error = Channel::connect(&place.socket, Peers::user(stranger)).unwrap_err();
    assert!(matches!(error, Error::NotTrusted { .. }), "{error}");
}

pub fn stranger(path: &Path) {
    let error = connect(path).receive().unwrap_err();
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
}

fn pair() -> (UnixStream, Channel) {
    let (a, b) = UnixStream::pair().unwrap();
    let mut channel = Channel::new(b, &Peers::same_user()).unwrap();
    channel.set_timeout(PATIENCE);
    (a, channel)
}

/// A frame that describes `shared`, as a channel sends it.
fn frame(shared: &Shared) -> Vec<u8> {
    let (a, b) = UnixStream::pair().unwrap();
    let mut channel = Channel::new(a, &Peers::same_user()).unwrap();
    channel.send(shared, Access::ReadWrite).unwrap();
    drop(channel);
    // Read without looking at the fds, which the kernel then closes.
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut &b, &mut bytes).unwrap();
    bytes
}

fn send(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = vec![std::mem::MaybeUninit::uninit(); 4096];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    let iov = [std::io::IoSlice::new(bytes)];
    rustix::net::sendmsg(socket, &iov, &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn fd(shared: &Shared) -> OwnedFd {
    match shared.export(HandleType::PosixFd).unwrap().remove(0) {
        ShareableHandle::PosixFd(fd) => fd,
        ShareableHandle::Fabric(_) => panic!("an fd was asked for"),
    }
}

/// After each the channel is closed, and the fds that came are too.
#[test]
fn violations_of_the_protocol_close_the_channel() {
    let driver = open();
    let shared = buffer(&driver);
    let good = frame(&shared);
    let fd = fd(&shared);
    let with = |len: u32, rest: &[u8]| [&len.to_be_bytes()[..], rest].concat();
    let mut long = good.clone();
    long[..4].copy_from_slice(&(good.len() as u32 - 3).to_be_bytes());
    long.push(0);
    let mut newer = good.clone();
    let version = b"\"version\":3";
    let at = newer.windows(version.len()).position(|w| w == version);
    newer[at.unwrap() + version.len() - 1] = b'4';
    let cases: [(&str, Vec<u8>, usize); 11] = [
        ("garbage", with(16, b"0123456789abcdef"), 0),
        ("garbage with an fd", with(16, b"0123456789abcdef"), 1),
        (
            "garbage before a message",
            [with(1, b"x"), good.clone()].concat(),
            1,
        ),
        ("an empty frame", with(0, b""), 0),
        ("an oversize frame", with((1 << 20) + 1, b"x"), 0),
        ("the largest length there is", with(u32::MAX, b"x"), 1),
        ("bytes after the message", long, 1),
        ("another version", newer, 1),
        ("no fds", good.clone(), 0),
        ("too many fds", good.clone(), 2),
        ("far too many fds", good.clone(), 253),
    ];
    for (what, bytes, fds) in cases {
        let (socket, mut channel) = pair();
        let (mut reader, writer) = std::io::pipe().unwrap();
        // The first is memory, so that only the number is wrong.
        let fds: Vec<_> = (0..fds)
            .map(|i| if i == 0 { fd.as_fd() } else { writer.as_fd() })
            .collect();
        send(&socket, &bytes, &fds);
        drop(fds);
        drop(writer);
        let error = channel.receive().unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{what}: {error}");
        let error = channel.receive().unwrap_err();
        assert!(matches!(error, Error::PeerLost { .. }), "{what}: {error}");
        // Every copy of the pipe's other end is closed, or this would wait.
        let n = std::io::Read::read(&mut reader, &mut [0]).unwrap();
        assert_eq!(n, 0, "{what}");
    }
    // The driver refuses an fd that is no memory.
    let (socket, mut channel) = pair();
    let null = fs::File::open("/dev/null").unwrap();
    send(&socket, &good, &[null.as_fd()]);
    let offer = channel.receive().unwrap();
    assert!(offer.import(&driver, ImportOptions::new()).is_err());
    // And a valid message is taken, in any pieces.
    for byte in &good[..1] {
        send(&socket, &[*byte], &[fd.as_fd()]);
    }
    for bytes in good[1..].chunks(7) {
        send(&socket, bytes, &[]);
    }
    let imported = receive(&mut channel, &driver);
    drop((imported, shared));
    nothing_held(&driver);
}

/// A channel that something has come over, and then no more. Bytes that were there already may be read in
/// time or not: then it tries again.
#[track_caller]
fn closes_after_a_time_out(channel: &mut Channel) {
    let end = Instant::now() + PATIENCE;
    let mut timed_out = false;
    while Instant::now() < end {
        match channel.receive().unwrap_err() {
            Error::TimedOut { .. } => timed_out = true,
            Error::PeerLost { .. } if timed_out => return,
            other => panic!("{other}"),
        }
    }
    panic!("it is open still");
}

#[test]
fn truncated_and_silent_peers_end_in_time() {
    let driver = open();
    let shared = buffer(&driver);
    let good = frame(&shared);
    for cut in [1, 4, 5, good.len() - 1] {
        // It ends in the middle.
        let (socket, mut channel) = pair();
        send(&socket, &good[..cut], &[]);
        drop(socket);
        let error = channel.receive().unwrap_err();
        assert!(matches!(error, Error::PeerLost { .. }), "{cut}: {error}");
        // It stays, and says no more.
        let (socket, mut channel) = pair();
        channel.set_timeout(IMPATIENCE);
        send(&socket, &good[..cut], &[]);
        closes_after_a_time_out(&mut channel);
    }
    // A peer that has sent nothing yet keeps its channel.
    let (socket, mut channel) = pair();
    channel.set_timeout(IMPATIENCE);
    let error = channel.receive().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    channel.set_timeout(PATIENCE);
    let fd = fd(&shared);
    send(&socket, &good, &[fd.as_fd()]);
    channel.receive().unwrap();
    // A byte now and then does not extend the deadline.
    channel.set_timeout(IMPATIENCE);
    let slow = std::thread::spawn(move || {
        let mut sent = (1_u32 << 20).to_be_bytes().into_iter().collect::<Vec<_>>();
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if (&socket).write_all(&sent).is_err() {
                return true;
            }
            sent = vec![0];
            std::thread::sleep(IMPATIENCE / 3);
        }
        false
    });
    let error = channel.receive().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    drop(channel);
    assert!(slow.join().unwrap(), "it was let go on");
    // The peer does not read.
    let (socket, mut channel) = pair();
    channel.set_timeout(IMPATIENCE);
    let error = loop {
        if let Err(error) = channel.send(&shared, Access::Read) {
            break error;
        }
    };
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    drop(socket);
    // No peer connects.
    let place = Place::new();
    let mut nobody = Listener::bind(&place.socket, Peers::same_user()).unwrap();
    nobody.set_timeout(IMPATIENCE).unwrap();
    let error = nobody.accept().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
}

#[test]
fn a_peer_that_goes_without_a_word_is_passed_over() {
    let place = Place::new();
    let mut listener = Listener::bind(&place.socket, Peers::same_user()).unwrap();
    listener.set_timeout(PATIENCE).unwrap();
    // A probe for a listener does not count as a connection; a peer that connects and closes does.
    Listener::bind(&place.socket, Peers::same_user()).unwrap_err();
    for _ in 0..3 {
        drop(UnixStream::connect(&place.socket).unwrap());
    }
    let driver = open();
    let shared = buffer(&driver);
    // A message counts although its sender has gone.
    let mut brief = Channel::connect(&place.socket, Peers::same_user()).unwrap();
    brief.send(&shared, Access::Read).unwrap();
    drop(brief);
    // A peer that sends nothing more, but listens, is there.
    let mut quiet = UnixStream::connect(&place.socket).unwrap();
    quiet.shutdown(std::net::Shutdown::Write).unwrap();
    let offer = listener.accept().unwrap().receive().unwrap();
    assert_eq!(offer.description().len, shared.len());
    listener
        .accept()
        .unwrap()
        .send(&shared, Access::Read)
        .unwrap();
    let mut length = [0; 4];
    std::io::Read::read_exact(&mut quiet, &mut length).unwrap();
    assert_ne!(length, [0; 4]);
    // It waits no longer for that.
    drop(UnixStream::connect(&place.socket).unwrap());
    listener.set_timeout(IMPATIENCE).unwrap();
    let error = listener.accept().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
}
