//! Memory between processes of one machine, over Unix sockets.

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use egmem::share::{Channel, DEFAULT_TIMEOUT, ImportOptions, Listener, Peers, Shared};

use crate::args::{handle, lock, milliseconds, read_access};
use crate::failure::{Failure, Outcome};
use crate::{
    answer, args, destroy, egm_buffer, egm_driver, egm_event, egm_heap, egm_status, make, noted, on,
};

/// A Unix socket that other processes of this user connect to. Any thread may use it, several at a time.
pub struct egm_listener(pub(crate) Mutex<Listener>);

/// A connection to another process of this user, which sends and receives memory. Any thread may use it: one sends while
/// another waits to receive; calls of the same direction take turns.
///
/// Any error except a timeout before the first byte closes the connection.
pub struct egm_channel {
    sender: Mutex<Channel>,
    receiver: Mutex<Channel>,
    /// Set apart from the two, so that setting it waits for no call.
    timeout_ms: AtomicU64,
}

impl egm_channel {
    fn new(channel: Channel) -> Outcome<Self> {
        Ok(Self {
            sender: Mutex::new(channel.try_clone()?),
            receiver: Mutex::new(channel),
            timeout_ms: AtomicU64::new(DEFAULT_TIMEOUT.as_millis() as u64),
        })
    }

    /// Returns the end that sends, once the calls before have sent.
    pub(crate) fn sender(&self) -> MutexGuard<'_, Channel> {
        self.lock(&self.sender)
    }

    /// Returns the end that receives, once the calls before have received.
    pub(crate) fn receiver(&self) -> MutexGuard<'_, Channel> {
        self.lock(&self.receiver)
    }

    fn lock<'a>(&self, direction: &'a Mutex<Channel>) -> MutexGuard<'a, Channel> {
        let mut channel = lock(direction);
        channel.set_timeout(Duration::from_millis(self.timeout_ms.load(Relaxed)));
        channel
    }
}

/// Listens at a path of the file system, which only this user can open. Replaces a socket that a dead process has
/// left.
///
/// # Safety
/// `path` is null or a string; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_listener_bind(
    path: *const c_char,
    out: Option<&mut MaybeUninit<*mut egm_listener>>,
) -> egm_status {
    answer(out, || {
        // SAFETY: the caller's promise.
        let path = unsafe { args::text(path, "path")? };
        let listener = Listener::bind(path, Peers::same_user())?;
        Ok(args::given(egm_listener(Mutex::new(listener))))
    })
}

/// Waits at most `timeout_ms` milliseconds, at least 1, for a process that connects.
///
/// Fails with ::EGM_TIMED_OUT, and with ::EGM_NOT_TRUSTED for a process of another user; the listener stays usable.
///
/// # Safety
/// `listener` is null or a listener; `out` is null or may be written. Any thread may call this; calls take turns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_listener_accept(
    listener: Option<&egm_listener>,
    timeout_ms: u64,
    out: Option<&mut MaybeUninit<*mut egm_channel>>,
) -> egm_status {
    make(listener, out, |listener| {
        let timeout = milliseconds(timeout_ms)?;
        let mut listener = lock(&listener.0);
        listener.set_timeout(timeout)?;
        egm_channel::new(listener.accept()?)
    })
}

/// Stops listening and removes the socket's file. A null pointer is left alone.
///
/// # Safety
/// `listener` is null, or a listener that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_listener_destroy(listener: *mut egm_listener) -> egm_status {
    // SAFETY: the caller's promise.
    unsafe { destroy(listener) }
}

/// Connects to a listener of this user.
///
/// Fails with ::EGM_UNREACHABLE if no process listens, ::EGM_NOT_TRUSTED for another user's.
///
/// # Safety
/// `path` is null or a string; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_channel_connect(
    path: *const c_char,
    out: Option<&mut MaybeUninit<*mut egm_channel>>,
) -> egm_status {
    answer(out, || {
        // SAFETY: the caller's promise.
        let path = unsafe { args::text(path, "path")? };
        egm_channel::new(Channel::connect(path, Peers::same_user())?).map(args::given)
    })
}

/// Makes a channel of a connected Unix stream socket: one end of socketpair(2), or an inherited one. The channel owns
/// the file descriptor from then on; if the call fails, it is closed, unless it is negative or `out` is null.
///
/// # Safety
/// `fd` is negative, or an open file descriptor that nothing else uses; `out` is null or may be written. Any thread
/// may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_channel_from_fd(
    fd: i32,
    out: Option<&mut MaybeUninit<*mut egm_channel>>,
) -> egm_status {
    answer(out, || {
        if fd < 0 {
            let why = format!("{fd} is no file descriptor");
            return Err(Failure::invalid("fd", why));
        }
        // SAFETY: the caller gives an open file descriptor away.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        egm_channel::new(Channel::new(socket.into(), &Peers::same_user())?).map(args::given)
    })
}

/// Sets how long each call that begins from now on may take, in milliseconds, at least 1; 30 s at first.
///
/// # Safety
/// `channel` is null or a channel. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_channel_set_timeout(
    channel: Option<&egm_channel>,
    timeout_ms: u64,
) -> egm_status {
    on(channel, |channel| {
        milliseconds(timeout_ms)?;
        channel.timeout_ms.store(timeout_ms, Relaxed);
        Ok(())
    })
}

/// Shares a buffer that was allocated here and is shareable with the other process, and asks that process to keep to
/// `access`. From now on it may use all of the memory, and keeps it alive for as long as it likes.
///
/// Fails with ::EGM_INVALID_ARGUMENT for memory that is not shareable; ::EGM_PEER_LOST, ::EGM_TIMED_OUT.
///
/// # Safety
/// `channel` is null or a channel; `buffer` is null or a buffer. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_channel_send(
    channel: Option<&egm_channel>,
    buffer: Option<&egm_buffer>,
    access: i32,
) -> egm_status {
    on(channel, |channel| {
        let buffer = handle(buffer)?;
        let access = read_access(access)?;
        let shared = Shared::from(Arc::clone(buffer.own_memory()?));
        Ok(channel.sender().send(&shared, access)?)
    })
}

/// Shares a block of a heap that is shareable. The other process gets the block's usable bytes, but could access all
/// of its chunk: put data that it must not see into a heap of its own.
///
/// Keep the block until the other process has confirmed that it and its GPU work are done with it: a freed block is
/// reused.
///
/// # Safety
/// `channel` is null or a channel; `heap` is null or a heap. No other call frees or resizes the block meanwhile. Any
/// thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_channel_send_block(
    channel: Option<&egm_channel>,
    heap: Option<&egm_heap>,
    block: *const c_void,
    access: i32,
) -> egm_status {
    on(channel, |channel| {
        let heap = handle(heap)?;
        let access = read_access(access)?;
        heap.with_shared(block, |shared| Ok(channel.sender().send(shared, access)?))
    })
}

/// Waits for memory from the other process and maps it, for the CPU and every GPU that can reach it, as far as the
/// other process allows.
///
/// Fails with ::EGM_TIMED_OUT, after which the call may be made again if no byte had arrived; ::EGM_PEER_LOST,
/// ::EGM_PROTOCOL, and others of the driver.
///
/// # Safety
/// `channel` is null or a channel; `driver` is null or a driver; `out` is null or may be written. Any thread may call
/// this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_channel_receive(
    channel: Option<&egm_channel>,
    driver: Option<&egm_driver>,
    out: Option<&mut MaybeUninit<*mut egm_buffer>>,
) -> egm_status {
    let receive = |channel: &egm_channel| {
        let driver = handle(driver)?;
        let offer = channel.receiver().receive()?;
        let imported = offer.import(&driver.0, ImportOptions::new())?;
        Ok(egm_buffer::Imported(imported))
    };
    noted(|| make(channel, out, receive))
}

/// Lends an event, made by egm_event_create_interprocess(), to the other process, which may record it and make its streams
/// wait for it. It exists until that process has destroyed its own, even if this process destroys it first.
///
/// Fails with ::EGM_INVALID_ARGUMENT for another event; ::EGM_PEER_LOST, ::EGM_TIMED_OUT.
///
/// # Safety
/// `channel` is null or a channel; `event` is null or an event. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_channel_send_event(
    channel: Option<&egm_channel>,
    event: Option<&egm_event>,
) -> egm_status {
    on(channel, |channel| {
        let event = handle(event)?;
        Ok(channel.sender().send_event(&event.0)?)
    })
}

/// Waits for an event from the other process, and opens it for the same GPU, whatever its ordinal here. The other process is
/// trusted to keep its event until this one is destroyed, as egm_channel_send_event() does.
///
/// Fails with ::EGM_INVALID_ARGUMENT if this process does not have the event's GPU; ::EGM_TIMED_OUT, after which the call
/// may be made again if no byte had arrived; ::EGM_PEER_LOST, ::EGM_PROTOCOL; ::EGM_DRIVER_FAILED, also for an event of this
/// process itself.
///
/// # Safety
/// `channel` is null or a channel; `driver` is null or a driver; `out` is null or may be written. Any thread may call
/// this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_channel_receive_event(
    channel: Option<&egm_channel>,
    driver: Option<&egm_driver>,
    out: Option<&mut MaybeUninit<*mut egm_event>>,
) -> egm_status {
    make(channel, out, |channel| {
        let driver = handle(driver)?;
        let event = channel.receiver().receive_event(&driver.0)?;
        Ok(egm_event(Arc::new(event)))
    })
}

/// Closes a channel. Memory that was sent or received stays. A null pointer is left alone.
///
/// # Safety
/// `channel` is null, or a channel that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_channel_destroy(channel: *mut egm_channel) -> egm_status {
    // SAFETY: the caller's promise.
    unsafe { destroy(channel) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use egmem::driver::NodeId;
    use egmem::{Buffer, Driver, Machine};

    use super::*;
    use crate::EGM_ACCESS_READ;

    /// Returns how many bytes wait to be read.
    fn unread(socket: &UnixStream) -> i32 {
        let mut bytes = 0;
        // SAFETY: the socket is open, and `FIONREAD` writes one `int`.
        let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
        assert_eq!(result, 0);
        bytes
    }

    #[test]
    fn one_thread_sends_while_another_waits_to_receive() {
        let driver = egm_driver(Driver::simulated(Machine::gh200()).unwrap());
        let (end, mut other_end) = UnixStream::pair().unwrap();
        let seen = end.try_clone().unwrap();
        let channel = Channel::new(end, &Peers::same_user()).unwrap();
        let channel = egm_channel::new(channel).unwrap_or_else(|_| panic!());
        let buffer = Buffer::on(NodeId(0)).bytes(2 << 20).shareable();
        let buffer = Arc::new(buffer.allocate(&driver.0).unwrap());
        let buffer = egm_buffer::Own(buffer);
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| {
                let mut out = MaybeUninit::uninit();
                // SAFETY: all three are alive.
                unsafe { egm_channel_receive(Some(&channel), Some(&driver), Some(&mut out)) }
            });
            // A message has begun, and the thread that reads it waits for the rest.
            other_end.write_all(&[0]).unwrap();
            while unread(&seen) > 0 {
                std::thread::yield_now();
            }
            // SAFETY: both are alive.
            let sent = unsafe { egm_channel_send(Some(&channel), Some(&buffer), EGM_ACCESS_READ) };
            assert_eq!(sent, egm_status::EGM_OK);
            // SAFETY: it is alive.
            let set = unsafe { egm_channel_set_timeout(Some(&channel), 60_000) };
            assert_eq!(set, egm_status::EGM_OK);
            let mut other = Channel::new(other_end, &Peers::same_user()).unwrap();
            assert_eq!(other.receive().unwrap().description().len, 2 << 20);
            drop(other);
            assert_eq!(receiving.join().unwrap(), egm_status::EGM_PEER_LOST);
        });
    }
}
