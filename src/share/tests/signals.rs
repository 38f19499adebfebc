//! Time limits of processes that signals interrupt all the time, as a profiler's do.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Channel, Listener, Peers, fd, socket};

const SHORT: Duration = Duration::from_millis(100);

/// Calls `wait` while signals interrupt this thread, for a minute at most. Returns whether it ended before the signals.
fn ends_beside_signals(wait: impl FnOnce()) -> bool {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler: extern "C" fn(libc::c_int) = nothing;
    // SAFETY: the handler does nothing; this thread is this one.
    let thread = unsafe {
        libc::signal(libc::SIGUSR1, handler as usize);
        libc::pthread_self()
    };
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let signals = scope.spawn(|| {
            let begun = Instant::now();
            while !has_ended.load(Relaxed) && begun.elapsed() < Duration::from_secs(60) {
                // SAFETY: the thread waits for this one before it ends.
                unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
                thread::sleep(Duration::from_millis(1));
            }
            has_ended.load(Relaxed)
        });
        wait();
        has_ended.store(true, Relaxed);
        signals.join().unwrap()
    })
}

#[test]
fn a_message_that_does_not_come_is_waited_for_so_long() {
    let (one, _other) = UnixStream::pair().unwrap();
    let mut channel = Channel::new(one, &Peers::same_user()).unwrap();
    channel.set_timeout(SHORT);
    assert!(ends_beside_signals(|| {
        let error = channel.receive_text(1).unwrap_err();
        assert!(matches!(error, crate::Error::TimedOut { .. }), "{error}");
    }));
}

#[test]
fn room_for_a_message_is_waited_for_so_long() {
    let (one, _other) = UnixStream::pair().unwrap();
    assert!(ends_beside_signals(|| {
        while fd::send_within(one.as_fd(), &[0; 1 << 16], &[], SHORT).is_ok() {}
    }));
}

#[test]
fn a_connection_is_waited_for_so_long() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut listener = Listener::bind(&path, Peers::same_user()).unwrap();
    listener.set_timeout(SHORT).unwrap();
    assert!(ends_beside_signals(|| {
        let error = listener.accept().unwrap_err();
        assert!(matches!(error, crate::Error::TimedOut { .. }), "{error}");
    }));
    let (_file, full) = socket::listen(&folder.path().join("full"), &Peers::same_user()).unwrap();
    rustix::net::listen(&full, 0).unwrap();
    let connect = || socket::connect(&folder.path().join("full"), SHORT);
    let _waiting = connect().unwrap();
    assert!(ends_beside_signals(|| {
        let error = connect().unwrap_err();
        assert!(matches!(error, crate::Error::TimedOut { .. }), "{error}");
    }));
}
