//! Sends memory from one process to another over a Unix socket.

use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::fd::{self, MAX_FDS, posix};
use super::frame::{self, Body, MAX_PIECE};
use super::queue;
use super::socket;
use super::{Credentials, Description, Offer, PartHandles, Peers, Shared};
use crate::driver::{Access, HandleType, ShareableHandle};
use crate::{Error, MemoryError, Result};

/// The default time limit of one operation of a [`Channel`].
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// A connection to another process of this machine, which sends and receives memory.
///
/// Any error except a timeout before the first byte closes the connection, because the position in the byte
/// stream is lost.
///
/// ```
/// use egmem::driver::{Access, NodeId};
/// use egmem::share::{Channel, ImportOptions, Listener, Peers, Shared};
/// use egmem::{Buffer, Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("socket");
/// // One process:
/// let listener = Listener::bind(&path, Peers::same_user())?;
/// # let other = std::thread::spawn({ let driver = driver.clone(); move || -> egmem::share::Result<u64> {
/// // Another:
/// let mut channel = Channel::connect(&path, Peers::same_user())?;
/// let imported = channel.receive()?.import(&driver, ImportOptions::new())?;
/// let found = imported.get::<u64>(0)?;
/// # Ok(found) }});
/// // The first again:
/// let buffer = Buffer::on(NodeId(0)).bytes(3 << 20).shareable().allocate(&driver)?;
/// buffer.put(0, 42_u64)?;
/// let shared = Shared::from(buffer);
/// listener.accept()?.send(&shared, Access::ReadWrite)?;
/// # assert_eq!(other.join().unwrap()?, 42);
/// # Ok::<(), egmem::share::Error>(())
/// ```
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
    peer: Credentials,
    timeout: Duration,
    /// The end of an operation that consists of several messages.
    until: Option<Instant>,
    /// Set after an error: the socket's buffer may still contain bytes, but they mean nothing.
    closed: bool,
}

impl Channel {
    /// Connects to a [`Listener`](super::Listener)'s socket at `path`, if `peers` admits its process.
    ///
    /// # Errors
    /// [`Error::Unreachable`] if no process listens, [`Error::NotTrusted`], [`Error::TimedOut`], the system's
    /// errors.
    pub fn connect(path: impl AsRef<Path>, peers: Peers) -> Result<Self> {
        Self::connect_within(path, peers, DEFAULT_TIMEOUT)
    }

    /// As [`connect`](Self::connect), with a time limit for connecting alone. It can expire only while the listener's
    /// backlog is full.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_within(path: impl AsRef<Path>, peers: Peers, timeout: Duration) -> Result<Self> {
        Self::new(socket::connect(path.as_ref(), timeout)?.into(), &peers)
    }

    /// Wraps a connection made by other means: one end of a pair, or an inherited socket.
    ///
    /// # Errors
    /// [`Error::NotTrusted`], the system's errors.
    pub fn new(stream: UnixStream, peers: &Peers) -> Result<Self> {
        let peer = fd::credentials(stream.as_fd())
            .map_err(|error| MemoryError::system("reading the credentials of a socket", &error))?;
        peers.admit(&peer)?;
        stream
            .set_nonblocking(false)
            .map_err(|error| MemoryError::system("a socket's mode", &error))?;
        Ok(Self {
            stream,
            peer,
            timeout: DEFAULT_TIMEOUT,
            until: None,
            closed: false,
        })
    }

    /// Sets how long each operation may take from now on, including all its waits. Default
    /// [`DEFAULT_TIMEOUT`].
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the credentials of the other end, as the kernel reports them.
    pub fn peer(&self) -> Credentials {
        self.peer
    }

    /// Returns another handle of the same connection, so that one thread can send while another waits to receive.
    ///
    /// At most one handle may send at a time, and one receive: the messages of several would mix, and the other process
    /// would close the connection. Each handle has its own [time limit](Self::set_timeout), which begins as this one's.
    /// An error that closes the connection closes it for both; memory that had arrived by then may still be received.
    ///
    /// # Errors
    /// [`System`](MemoryError::System) if this process may open no more file descriptors.
    pub fn try_clone(&self) -> Result<Self> {
        Ok(Self {
            stream: self.closer()?.0,
            until: None,
            ..*self
        })
    }

    /// Returns a handle by which another thread can end an operation that waits.
    ///
    /// # Errors
    /// [`System`](MemoryError::System) if this process may open no more file descriptors.
    pub fn closer(&self) -> Result<Closer> {
        let stream = self.stream.try_clone();
        let stream = stream.map_err(|error| MemoryError::system("duplicating a socket", &error))?;
        Ok(Closer(stream))
    }

    /// Shares memory with the other process and asks it to keep to `access`.
    ///
    /// From now on the other process may use all of the memory, and keeps it alive for as long as it likes.
    ///
    /// Of memory with more than 32 parts the fds are exported, sent and closed 16 at a time. The kernel holds them until
    /// the other process imports them, and this waits if it has no room: for instance if more are in flight than the
    /// user may have fds open in one process. A process with an older version of this library gets a protocol error for such
    /// memory.
    ///
    /// # Errors
    /// Those of [`Shared::describe`] and [`Shared::export`] as POSIX fd, before anything is sent (of memory with many
    /// parts, of the first one);
    /// [`Error::PeerLost`], [`Error::TimedOut`], the system's errors.
    pub fn send(&mut self, shared: &Shared, access: Access) -> Result<()> {
        let description = shared.describe(access)?;
        if queue::is_needed(description.parts.len()) {
            return self.send_queued(shared, description);
        }
        let handles = shared.export(HandleType::PosixFd)?;
        let fds: Vec<_> = handles.iter().filter_map(posix).collect();
        self.send_body(&Body::Memory(description), &fds)?;
        shared.sent_to(&self.peer.into());
        Ok(())
    }

    /// Sends memory whose fds come through a queue.
    fn send_queued(&mut self, shared: &Shared, description: Description) -> Result<()> {
        // Before anything is sent: whether the memory can be exported at all.
        drop(shared.export_parts(0..1, HandleType::PosixFd)?);
        let (queue, theirs) = queue::pair()?;
        self.send_body(&Body::Queued(description), &[theirs.as_fd()])?;
        drop(theirs);
        shared.sent_to(&self.peer.into());
        match queue::fill(&queue, shared, &self.peer.to_string(), self.timeout) {
            // It does not want the memory, and may want other.
            Err(Error::PeerLost { .. }) if !self.is_gone() => Ok(()),
            filled => filled,
        }
    }

    /// Waits for memory from the other process.
    ///
    /// # Errors
    /// [`Error::TimedOut`], after which the caller may retry if no byte had arrived; [`Error::PeerLost`],
    /// [`Error::Protocol`], the system's errors.
    pub fn receive(&mut self) -> Result<Offer> {
        let (description, handles) = match self.receive_body()? {
            (Body::Memory(description), fds) => {
                let handles: Vec<_> = fds.into_iter().map(ShareableHandle::PosixFd).collect();
                (description, handles.into())
            }
            (Body::Queued(description), mut fds) => match fds.pop() {
                Some(queue) => (description, PartHandles::from_queue(queue)),
                None => return Err(self.refuse("memory without its fds")),
            },
            (other, _) => return Err(self.unexpected(&other)),
        };
        Ok(Offer {
            description,
            handles,
            peer: self.peer,
        })
    }

    /// Waits until a message has begun to arrive, or the other process has closed the connection; returns `false` if
    /// neither comes within `timeout`, or a signal comes first. For callers that do other work between waits: a
    /// [`receive`](Self::receive) whose time limit ends within a message closes the connection.
    ///
    /// # Errors
    /// The system's errors.
    pub fn wait_for_message(&self, timeout: Duration) -> Result<bool> {
        let mut poll = [PollFd::new(&self.stream, PollFlags::IN)];
        let timeout = Timespec::try_from(timeout).ok();
        match rustix::event::poll(&mut poll, timeout.as_ref()) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(MemoryError::system("waiting for a message", &error.into()).into()),
        }
    }

    /// Returns whether the other end is closed, and has left nothing to read.
    pub(super) fn is_gone(&self) -> bool {
        let mut poll = [PollFd::new(&self.stream, PollFlags::empty())];
        let hung_up = rustix::event::poll(&mut poll, Some(&Timespec::default())).is_ok()
            && poll[0].revents().contains(PollFlags::HUP);
        hung_up && rustix::io::ioctl_fionread(&self.stream) == Ok(0)
    }

    /// Closes the connection after an unexpected message.
    pub(super) fn unexpected(&mut self, found: &Body) -> Error {
        self.refuse(format!("it sent {}", found.name()))
    }

    /// Closes the connection after a message that breaks the rules.
    pub(super) fn refuse(&mut self, detail: impl Into<String>) -> Error {
        self.close();
        self.protocol(detail)
    }

    pub(super) fn protocol(&self, detail: impl Into<String>) -> Error {
        Error::protocol(self.peer.to_string(), detail)
    }

    fn close(&mut self) {
        self.closed = true;
        // The other end may have closed it already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn check_open(&self) -> Result<()> {
        if !self.closed {
            return Ok(());
        }
        let why = "the connection was closed after an error";
        Err(Error::peer_lost(self.peer.to_string(), why))
    }

    pub(super) fn send_body(&mut self, body: &Body, fds: &[BorrowedFd<'_>]) -> Result<()> {
        debug_assert_eq!(body.fds(), fds.len());
        self.check_open()?;
        let frame = frame::encode(body)?;
        let result = self.write(&frame, fds);
        if result.is_err() {
            self.close();
        }
        result
    }

    fn write(&self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let wait = self.deadline("sending");
        let (first, more) = fds.split_at(fds.len().min(MAX_FDS));
        let mut sent = wait.send(frame, first)?;
        while sent < frame.len() {
            sent += wait.send(&frame[sent..], &[])?;
        }
        for batch in more.chunks(MAX_FDS) {
            wait.send(&[0], batch)?;
        }
        Ok(())
    }

    pub(super) fn receive_body(&mut self) -> Result<(Body, Vec<OwnedFd>)> {
        self.check_open()?;
        let mut idle = true;
        let result = self.read(&mut idle);
        let again = idle && matches!(result, Err(Error::TimedOut { .. }));
        if result.is_err() && !again {
            self.close();
        }
        result
    }

    /// `idle` stays true until a byte arrives.
    fn read(&self, idle: &mut bool) -> Result<(Body, Vec<OwnedFd>)> {
        let wait = self.deadline("waiting for memory");
        let mut fds = Vec::new();
        let mut prefix = [0; 4];
        wait.fill(&mut prefix, &mut fds, MAX_FDS, idle)?;
        let len = frame::length(prefix).map_err(|why| self.protocol(why))?;
        let mut bytes = vec![0; len];
        wait.fill(&mut bytes, &mut fds, MAX_FDS, idle)?;
        let body = frame::decode(&bytes).map_err(|why| self.protocol(why))?;
        let mut expected = body.fds().min(MAX_FDS);
        loop {
            if fds.len() != expected {
                let why = format!("{} fds instead of {expected}", fds.len());
                return Err(self.protocol(why));
            }
            if expected == body.fds() {
                return Ok((body, fds));
            }
            expected = body.fds().min(expected + MAX_FDS);
            wait.fill(&mut [0], &mut fds, expected, idle)?;
        }
    }

    fn deadline(&self, what: &'static str) -> Wait<'_> {
        Wait {
            channel: self,
            what,
            until: self
                .until
                .or_else(|| Instant::now().checked_add(self.timeout)),
        }
    }

    /// Calls `work`, which sends or receives several messages that belong together, and closes the connection if it fails:
    /// the next message would be taken for one of these.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn together<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let result = work(self);
        if result.is_err() {
            self.close();
        }
        result
    }

    /// Calls `work`, whose messages have one time limit together.
    pub(super) fn as_one<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.until = Instant::now().checked_add(self.timeout);
        let result = work(self);
        self.until = None;
        result
    }
}

/// Ends a [`Channel`]'s operations from another thread.
#[derive(Debug)]
pub struct Closer(UnixStream);

impl Closer {
    /// Closes the connection: the operation that waits and all later ones fail with [`Error::PeerLost`].
    pub fn close(&self) {
        // The other end may have closed it already.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// One operation on a channel, and its deadline.
struct Wait<'a> {
    channel: &'a Channel,
    what: &'static str,
    /// `None`: no deadline.
    until: Option<Instant>,
}

impl Wait<'_> {
    fn left(&self) -> Option<Duration> {
        let until = self.until?;
        Some(until.saturating_duration_since(Instant::now()))
    }

    fn what(&self) -> String {
        format!("{} ({})", self.what, self.channel.peer)
    }

    fn timed_out(&self) -> Error {
        Error::timed_out(self.what(), self.channel.timeout)
    }

    fn lost(&self, why: impl fmt::Display) -> Error {
        Error::peer_lost(self.channel.peer.to_string(), why.to_string())
    }

    fn explain(&self, error: io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::WouldBlock => self.timed_out(),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => self.lost(error),
            io::ErrorKind::InvalidData => self.channel.protocol(error.to_string()),
            _ => MemoryError::system(self.what(), &error).into(),
        }
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize> {
        let left = self.left().unwrap_or(Duration::MAX);
        fd::send_within(self.channel.stream.as_fd(), bytes, fds, left)
            .map_err(|error| self.explain(error))
    }

    /// Fills `bytes`; adds fds that arrive with them to `fds`, up to `max` in all.
    fn fill(
        &self,
        bytes: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        max: usize,
        idle: &mut bool,
    ) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let left = self.left();
            if left == Some(Duration::ZERO) {
                return Err(self.timed_out());
            }
            // A shorter wait rounds to 0, which the kernel takes for no limit.
            let left = left.map(|left| left.max(Duration::from_micros(1)));
            set_socket_timeout(&self.channel.stream, Timeout::Recv, left)
                .map_err(|error| MemoryError::system("a socket's timeout", &error.into()))?;
            let stream = self.channel.stream.as_fd();
            let room = max.saturating_sub(fds.len());
            let (n, more) =
                fd::recv(stream, &mut bytes[done..], room).map_err(|error| self.explain(error))?;
            if n == 0 {
                let when = if *idle {
                    ""
                } else {
                    " in the middle of a message"
                };
                return Err(self.lost(format!("it has closed the connection{when}")));
            }
            *idle = false;
            done += n;
            fds.extend(more);
        }
        Ok(())
    }
}

impl Channel {
    /// Sends a text to the other process, in pieces of at most half a MiB.
    ///
    /// # Errors
    /// As [`send`](Self::send). All pieces together have the channel's time limit.
    pub fn send_text(&mut self, text: &str) -> Result<()> {
        self.as_one(|channel| channel.send_pieces(text))
    }

    fn send_pieces(&mut self, text: &str) -> Result<()> {
        let mut rest = text;
        loop {
            let mut end = rest.len().min(MAX_PIECE);
            while !rest.is_char_boundary(end) {
                end -= 1;
            }
            let (piece, behind) = rest.split_at(end);
            let more = !behind.is_empty();
            let text = piece.to_owned();
            self.send_body(&Body::Text { text, more }, &[])?;
            if !more {
                return Ok(());
            }
            rest = behind;
        }
    }

    /// Waits for a text of at most `most` bytes from the other process.
    ///
    /// # Errors
    /// As [`receive`](Self::receive); [`Protocol`](crate::Error::Protocol) for a longer text, and for one that comes in more
    /// pieces than it needs. All pieces together have the channel's time limit.
    pub fn receive_text(&mut self, most: usize) -> Result<String> {
        self.as_one(|channel| channel.receive_pieces(most))
    }

    fn receive_pieces(&mut self, most: usize) -> Result<String> {
        let mut all = String::new();
        loop {
            let (text, more) = match self.receive_body()? {
                (Body::Text { text, more }, _) => (text, more),
                (other, _) => return Err(self.unexpected(&other)),
            };
            // A piece is short only at a text's end.
            let is_short = more && text.len() < MAX_PIECE - 3;
            if is_short || text.len() > most - all.len() {
                return Err(self.refuse(format!("a text of more than {most} bytes")));
            }
            all.push_str(&text);
            if !more {
                return Ok(all);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::{Error, Peers};

    fn pair() -> (Channel, Channel) {
        let (one, other) = UnixStream::pair().unwrap();
        let channel = |stream| Channel::new(stream, &Peers::same_user()).unwrap();
        (channel(one), channel(other))
    }

    fn through(text: &str, most: usize) -> Result<String> {
        let (mut one, mut other) = pair();
        std::thread::scope(|scope| {
            // A receiver that refuses closes the connection.
            scope.spawn(move || drop(one.send_text(text)));
            other.receive_text(most)
        })
    }

    #[test]
    fn texts_of_any_length_arrive_whole() {
        for bytes in [0, 1, MAX_PIECE - 1, MAX_PIECE, MAX_PIECE + 1, 3 * MAX_PIECE] {
            let text = "x".repeat(bytes);
            assert_eq!(through(&text, bytes).unwrap(), text);
        }
        let odd = "x".to_owned() + &"ä".repeat(MAX_PIECE);
        assert_eq!(through(&odd, odd.len()).unwrap(), odd);
    }

    #[test]
    fn longer_texts_are_refused() {
        for most in [0, MAX_PIECE, 2 * MAX_PIECE] {
            let error = through(&"x".repeat(most + 1), most).unwrap_err();
            assert!(matches!(error, Error::Protocol { .. }), "{error}");
        }
    }

    #[test]
    fn all_pieces_have_one_time_limit() {
        use std::time::Duration;

        let (mut one, mut other) = pair();
        other.set_timeout(Duration::from_millis(300));
        let sender = std::thread::spawn(move || {
            let piece = Body::Text {
                text: "x".repeat(MAX_PIECE),
                more: true,
            };
            while one.send_body(&piece, &[]).is_ok() {
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let error = other.receive_text(30 * MAX_PIECE).unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
        drop(other);
        sender.join().unwrap();
    }

    #[test]
    fn endless_small_pieces_are_refused() {
        let (mut one, mut other) = pair();
        let piece = Body::Text {
            text: String::new(),
            more: true,
        };
        one.send_body(&piece, &[]).unwrap();
        let error = other.receive_text(10).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
    }
}
