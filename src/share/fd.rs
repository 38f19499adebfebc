//! Sends file descriptors over Unix sockets and reads the credentials of the other end.
//!
//! For blocking and non-blocking sockets: `WouldBlock` is returned.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::Credentials;
use crate::driver::ShareableHandle;
use crate::error::LOST;

/// The most fds that one message can carry. Source: unix(7), `SCM_MAX_FD`.
pub const MAX_FDS: usize = 253;

/// How long to wait for other processes of the same user to receive fds, of which the kernel has too many in flight.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(1);
/// The longest wait for a message.
pub(super) const FOREVER: Duration = Duration::from_secs(365 * 86_400);

/// Repeats a call of a blocking socket that signals interrupt, for at most `within` in all: each call's own limit is what is left.
///
/// # Errors
/// Those of the call; `WouldBlock` when the time is over.
pub(super) fn limited<T>(
    (socket, which): (BorrowedFd<'_>, Timeout),
    within: Duration,
    mut call: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    // Longer waits would overflow.
    let until = Instant::now() + within.min(FOREVER);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // A shorter wait rounds to 0, which the kernel takes for no limit.
        let left = left.max(Duration::from_micros(1));
        set_socket_timeout(socket, which, Some(left))?;
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if is_too_many_in_flight(&error) => std::thread::sleep(IN_FLIGHT_PAUSE),
            done => return done,
        }
    }
}

/// As [`try_send`], on a blocking socket, and waits for at most `within`, also while too many fds of this user are in flight
/// ([`is_too_many_in_flight`]) and if signals come. Sets the socket's timeout for sending.
///
/// # Errors
/// As [`try_send`]; `WouldBlock` when the time is over.
pub fn send_within(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    within: Duration,
) -> io::Result<usize> {
    limited((socket, Timeout::Send), within, || {
        send(socket, bytes, fds, SendFlags::empty())
    })
}

/// Returns whether a send failed because too many fds of this user are in flight: it succeeds once their receivers have
/// taken some.
pub fn is_too_many_in_flight(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ETOOMANYREFS)
}

/// Sends the beginning of `bytes`, at least one byte, with all of `fds` (at most [`MAX_FDS`]); returns the
/// number of bytes sent. The fds are sent then; the caller sends the remaining bytes without them. Never waits, whatever the
/// socket's mode: another process may have the same socket.
///
/// # Errors
/// The system's errors; `WouldBlock` if there is no room; `InvalidInput` for fds without a byte to carry them, or too many.
/// Nothing was sent then.
pub fn try_send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    send(socket, bytes, fds, SendFlags::DONTWAIT)
}

fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fits = || fds.len() <= MAX_FDS && !bytes.is_empty();
    let carried = fds.is_empty() || fits() && control.push(SendAncillaryMessage::ScmRights(fds));
    if !carried {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // NOSIGNAL: a peer that has closed causes an error, not a signal.
    let iov = [IoSlice::new(bytes)];
    Ok(sendmsg(
        socket,
        &iov,
        &mut control,
        SendFlags::NOSIGNAL | flags,
    )?)
}

/// Receives bytes, and the fds that arrived with them, close-on-exec. 0 bytes mean the connection's end.
///
/// # Errors
/// The system's errors, `Interrupted` if a signal ends the wait of a blocking socket; `InvalidData` for more than `max_fds` fds, or
/// if some were lost (this process may have too many open). All that arrived are closed then, and the bytes are lost: the connection
/// is unusable.
pub fn recv(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    max_fds: usize,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut iov = [IoSliceMut::new(bytes)];
    let message = recvmsg(socket, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    // On an error `fds` is dropped here, which closes them.
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(invalid(LOST));
    }
    if fds.len() > max_fds {
        return Err(invalid("more file descriptors than expected"));
    }
    Ok((message.bytes, fds))
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Returns the credentials of the process that made the other end of the connection, as the kernel reports
/// them.
///
/// # Errors
/// The system's errors.
pub fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    // Not through rustix, whose process id cannot be 0: the kernel reports 0 for a process in a PID namespace
    // that this one cannot see. The kernel's structure consists of these three.
    let [pid, uid, gid] = option(socket, libc::SO_PEERCRED)?;
    Ok(Credentials {
        pid: u32::try_from(pid).ok().filter(|&pid| pid != 0),
        uid: uid.cast_unsigned(),
        gid: gid.cast_unsigned(),
    })
}

/// Returns a socket's option, which consists of so many integers.
fn option<const N: usize>(
    socket: BorrowedFd<'_>,
    name: libc::c_int,
) -> io::Result<[libc::c_int; N]> {
    let mut found = [0; N];
    let mut len = size_of_val(&found) as libc::socklen_t;
    // SAFETY: the socket is open while borrowed; pointer and length are those of `found`, and the kernel
    // writes no more. Every bit pattern is valid for integers.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            found.as_mut_ptr().cast(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if len as usize != size_of_val(&found) {
        return Err(invalid("a socket's option is of another size"));
    }
    Ok(found)
}

/// Returns the process that made the other end of the connection, as a pidfd: unlike a process id it never
/// refers to another process. `None` if the kernel does not support this, as before Linux 6.5.
pub fn peer_process(socket: BorrowedFd<'_>) -> Option<OwnedFd> {
    let [found] = option(socket, libc::SO_PEERPIDFD).ok()?;
    if found < 0 {
        return None;
    }
    // SAFETY: the kernel has just opened it for this call, so nothing else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(found) })
}

/// Returns whether the process that made the other end of a connection, or that began to listen for it, has certainly ended. A child
/// that it forked may still have the socket.
pub fn peer_has_ended(socket: BorrowedFd<'_>) -> bool {
    if let Some(process) = peer_process(socket) {
        return has_ended(&process);
    }
    // The kernel gives no pidfd of a process that has been reaped.
    let pid = credentials(socket).ok().and_then(|found| found.pid);
    let pid = pid.and_then(|pid| Pid::from_raw(pid.cast_signed()));
    match pid.map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
        Some(Ok(process)) => has_ended(&process),
        Some(Err(error)) => error == Errno::SRCH,
        None => false,
    }
}

/// Returns whether a pidfd's process has ended.
pub fn has_ended(process: &OwnedFd) -> bool {
    wait_for(process, PollFlags::IN, Duration::ZERO).is_ok_and(|found| !found.is_empty())
}

/// Waits for events of a file for so long at most; returns those that came. A signal ends the wait.
pub(super) fn wait_for(fd: impl AsFd, what: PollFlags, within: Duration) -> io::Result<PollFlags> {
    let mut fds = [PollFd::new(&fd, what)];
    // `None`, without an end, for more than the kernel counts.
    match poll(&mut fds, Timespec::try_from(within).ok().as_ref()) {
        Ok(_) => Ok(fds[0].revents()),
        Err(Errno::INTR) => Ok(PollFlags::empty()),
        Err(error) => Err(error.into()),
    }
}

/// Returns whether no process has the other end of a socket or a pipe any more.
pub(super) fn has_hung_up(fd: impl AsFd) -> bool {
    let found = wait_for(fd, PollFlags::empty(), Duration::ZERO);
    found.is_ok_and(|found| found.contains(PollFlags::HUP))
}

/// Returns the fds of POSIX handles.
///
/// # Errors
/// `InvalidInput` for another handle.
pub fn all_posix(handles: &[ShareableHandle]) -> io::Result<Vec<BorrowedFd<'_>>> {
    let fds: Option<Vec<_>> = handles.iter().map(posix).collect();
    fds.ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Returns the fd of a POSIX handle.
pub(super) fn posix(handle: &ShareableHandle) -> Option<BorrowedFd<'_>> {
    match handle {
        ShareableHandle::PosixFd(fd) => Some(fd.as_fd()),
        ShareableHandle::Fabric(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn file(text: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text).unwrap();
        file.rewind().unwrap();
        file
    }

    fn closed_on_exec(fd: &OwnedFd) -> bool {
        let flags = rustix::io::fcntl_getfd(fd).unwrap();
        flags.contains(rustix::io::FdFlags::CLOEXEC)
    }

    #[test]
    fn fds_arrive_with_the_first_byte() {
        let (a, b) = UnixStream::pair().unwrap();
        let files = [file(b"one"), file(b"two")];
        let fds = [files[0].as_fd(), files[1].as_fd()];
        assert_eq!(try_send(a.as_fd(), b"xyz", &fds).unwrap(), 3);
        let mut first = [0];
        let (n, fds) = recv(b.as_fd(), &mut first, 2).unwrap();
        assert_eq!((n, first, fds.len()), (1, *b"x", 2));
        assert!(fds.iter().all(closed_on_exec));
        for (fd, text) in fds.into_iter().zip(["one", "two"]) {
            let mut found = String::new();
            File::from(fd).read_to_string(&mut found).unwrap();
            assert_eq!(found, text);
        }
        let mut rest = [0; 8];
        let (n, fds) = recv(b.as_fd(), &mut rest, 0).unwrap();
        assert_eq!((n, fds.len()), (2, 0));
        drop(a);
        assert_eq!(recv(b.as_fd(), &mut rest, 0).unwrap().0, 0);
    }

    /// A pipe's reader sees its end only when every copy of the writer is closed.
    #[test]
    fn too_many_fds_are_an_error_and_closed() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        try_send(a.as_fd(), b"x", &[writer.as_fd(), writer.as_fd()]).unwrap();
        drop(writer);
        let error = recv(b.as_fd(), &mut [0], 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn as_many_as_a_message_can_carry() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = file(b"");
        let fds = [file.as_fd(); MAX_FDS + 1];
        let error = try_send(a.as_fd(), b"x", &fds).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        try_send(a.as_fd(), b"x", &fds[1..]).unwrap();
        let (_, fds) = recv(b.as_fd(), &mut [0], MAX_FDS).unwrap();
        assert_eq!(fds.len(), MAX_FDS);
        assert!(try_send(a.as_fd(), b"", &[file.as_fd()]).is_err());
    }

    #[test]
    fn would_block_is_passed_on_and_a_lost_peer_is_no_signal() {
        let (a, b) = UnixStream::pair().unwrap();
        a.set_nonblocking(true).unwrap();
        let error = recv(a.as_fd(), &mut [0], 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let error = loop {
            if let Err(error) = try_send(a.as_fd(), &[0; 1 << 16], &[]) {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(b);
        let error = try_send(a.as_fd(), b"x", &[]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn credentials_of_our_own() {
        let (a, _b) = UnixStream::pair().unwrap();
        let found = credentials(a.as_fd()).unwrap();
        assert_eq!(found.pid, Some(std::process::id()));
        assert_eq!(found.uid, rustix::process::getuid().as_raw());
        assert_eq!(found.gid, rustix::process::getgid().as_raw());
        let file = file(b"");
        assert!(credentials(file.as_fd()).is_err());
    }
}
