//! Sends memory from one process to another over a Unix socket.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::net::AddressFamily;
use rustix::net::sockopt::{Timeout, socket_domain};

use super::fd::{self, MAX_FDS, posix};
use super::frame::{self, Body};
use super::{
    Credentials, Description, ImportedParts, Link, Offer, PartHandles, Peers, Shared, queue, socket,
};
use crate::driver::{Access, HandleType, ShareableHandle};
use crate::error::failed;
use crate::{Error, MemoryError, Result};

/// The default time limit of one operation of a [`Channel`].
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// How many bytes of a text are received at once.
const TEXT_PIECE: usize = 128 << 10;

/// A connection to another process of this machine, which sends and receives memory.
///
/// Any error closes the connection, because the position in the byte stream is lost, except a timeout before the first byte and
/// an error of the fds of memory with more than 32 parts, which are on their way apart.
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
        let peer = fd::credentials(stream.as_fd());
        let peer = peer.map_err(failed("reading the credentials of a socket"))?;
        peers.admit(&peer)?;
        let blocking = stream.set_nonblocking(false);
        blocking.map_err(failed("a socket's mode"))?;
        Ok(Self {
            stream,
            peer,
            timeout: DEFAULT_TIMEOUT,
            closed: false,
        })
    }

    /// Sets how long each operation may take from now on, including all its waits. Default
    /// [`DEFAULT_TIMEOUT`]. Of memory with more than 32 parts, [`send`](Self::send) may take as long for each 16 of the fds, and the
    /// importer waits for up to 30 s for the next ones: another process that is slow may hold a thread for longer.
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
            ..*self
        })
    }

    /// Returns a handle by which another thread can end an operation that waits.
    ///
    /// # Errors
    /// [`System`](MemoryError::System) if this process may open no more file descriptors.
    pub fn closer(&self) -> Result<Closer> {
        let stream = self.stream.try_clone();
        Ok(Closer(stream.map_err(failed("duplicating a socket"))?))
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
        let (body, mut fds) = self.receive_body(self.deadline()?)?;
        let (description, handles) = match (body, fds.len()) {
            (Body::Memory(description), _) => {
                let handles: Vec<_> = fds.into_iter().map(ShareableHandle::PosixFd).collect();
                (description, handles.into())
            }
            (Body::Queued(description), 1) => (description, PartHandles::from_queue(fds.remove(0))),
            _ => return Err(self.unexpected("memory")),
        };
        Ok(Offer {
            description,
            handles,
            peer: self.peer,
        })
    }

    /// Sends imported memory on to another process, with the description and the access that came with it.
    ///
    /// # Errors
    /// [`InvalidArgument`](MemoryError::InvalidArgument) for memory that came by fabric handles; as [`send`](Self::send).
    pub fn pass_on(&mut self, memory: &ImportedParts) -> Result<()> {
        let fds: Vec<_> = memory.fds.iter().map(OwnedFd::as_fd).collect();
        if fds.len() != memory.description().parts.len() {
            let why = "it came by fabric handles";
            return Err(MemoryError::invalid("imported memory", why).into());
        }
        self.send_body(&Body::Memory(memory.description().clone()), &fds)
    }

    /// Sends one end of a new link to the other process, and returns this process's. It counts as there until that process
    /// has received and dropped it, or the channel has ended before.
    ///
    /// # Errors
    /// As [`send`](Self::send). A process with an older version of this library gets a protocol error.
    pub fn send_link(&mut self) -> Result<Link> {
        let (ours, theirs) = queue::pair()?;
        self.send_body(&Body::Link {}, &[theirs.as_fd()])?;
        Ok(Link::new(ours.into()))
    }

    /// Waits for an end of a link from the other process.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn receive_link(&mut self) -> Result<Link> {
        match self.receive_one()? {
            // Another kind of file might keep a poll waiting.
            (Body::Link {}, Some(fd)) if socket_domain(&fd) == Ok(AddressFamily::UNIX) => {
                Ok(Link::new(fd))
            }
            (Body::Link {}, _) => Err(self.refuse("a link that is no Unix socket")),
            _ => Err(self.unexpected("a link")),
        }
    }

    /// Waits until a message has begun to arrive, or the other process has closed the connection; returns `false` if
    /// neither comes within `timeout`, or a signal comes first. For callers that do other work between waits: a
    /// [`receive`](Self::receive) whose time limit ends within a message closes the connection.
    ///
    /// # Errors
    /// The system's errors.
    pub fn wait_for_message(&self, timeout: Duration) -> Result<bool> {
        let found = fd::wait_for(&self.stream, PollFlags::IN, timeout);
        Ok(!found.map_err(failed("waiting for a message"))?.is_empty())
    }

    /// Returns whether the other end is closed, and has left nothing to read.
    pub(super) fn is_gone(&self) -> bool {
        fd::has_hung_up(&self.stream) && rustix::io::ioctl_fionread(&self.stream) == Ok(0)
    }

    /// Closes the connection after an unexpected message.
    pub(super) fn unexpected(&mut self, wanted: &str) -> Error {
        self.refuse(format!("it sent another message than {wanted}"))
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

    pub(super) fn send_body(&mut self, body: &Body, fds: &[BorrowedFd<'_>]) -> Result<()> {
        debug_assert_eq!(body.fds(), fds.len());
        let frame = frame::encode(body)?;
        self.together(|channel| channel.write(&frame, fds))
    }

    fn write(&self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let until = self.deadline()?;
        let (first, more) = fds.split_at(fds.len().min(MAX_FDS));
        let mut sent = self.send_some(frame, first, until)?;
        while sent < frame.len() {
            sent += self.send_some(&frame[sent..], &[], until)?;
        }
        for batch in more.chunks(MAX_FDS) {
            self.send_some(&[0], batch, until)?;
        }
        Ok(())
    }

    /// Waits for a message that has one fd at most.
    pub(super) fn receive_one(&mut self) -> Result<(Body, Option<OwnedFd>)> {
        let (body, mut fds) = self.receive_body(self.deadline()?)?;
        Ok((body, fds.pop()))
    }

    /// Waits for a message. The bytes of a text are left behind.
    fn receive_body(&mut self, until: Instant) -> Result<(Body, Vec<OwnedFd>)> {
        let mut idle = true;
        let result = self.read(&mut idle, until);
        let again = idle && matches!(result, Err(Error::TimedOut { .. }));
        if result.is_err() && !again {
            self.close();
        }
        result
    }

    /// `idle` stays true until a byte arrives.
    fn read(&self, idle: &mut bool, until: Instant) -> Result<(Body, Vec<OwnedFd>)> {
        let mut fds = Vec::new();
        let mut prefix = [0; 4];
        self.fill(&mut prefix, &mut fds, MAX_FDS, idle, until)?;
        let len = frame::length(prefix).map_err(|why| self.protocol(why))?;
        let mut bytes = vec![0; len];
        self.fill(&mut bytes, &mut fds, MAX_FDS, idle, until)?;
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
            self.fill(&mut [0], &mut fds, expected, idle, until)?;
        }
    }

    /// Returns when an operation that begins now has to end.
    fn deadline(&self) -> Result<Instant> {
        if self.closed {
            let why = "the connection was closed after an error";
            return Err(Error::peer_lost(self.peer.to_string(), why));
        }
        Ok(Instant::now() + self.timeout.min(fd::FOREVER))
    }

    fn explain(&self, error: &io::Error, what: &str) -> Error {
        Error::of_message(error, what, &self.peer.to_string(), self.timeout)
    }

    fn send_some(&self, bytes: &[u8], fds: &[BorrowedFd<'_>], until: Instant) -> Result<usize> {
        let left = until.saturating_duration_since(Instant::now());
        fd::send_within(self.stream.as_fd(), bytes, fds, left)
            .map_err(|error| self.explain(&error, "sending"))
    }

    /// Fills `bytes`; adds fds that arrive with them to `fds`, up to `max` in all.
    fn fill(
        &self,
        bytes: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        max: usize,
        idle: &mut bool,
        until: Instant,
    ) -> Result<()> {
        let stream = self.stream.as_fd();
        let mut done = 0;
        while done < bytes.len() {
            let room = max.saturating_sub(fds.len());
            let left = until.saturating_duration_since(Instant::now());
            let received = fd::limited((stream, Timeout::Recv), left, || {
                fd::recv(stream, &mut bytes[done..], room)
            });
            let received = received.map_err(|error| self.explain(&error, "waiting for memory"));
            let (n, more) = received?;
            if n == 0 {
                let when = if *idle {
                    ""
                } else {
                    " in the middle of a message"
                };
                let why = format!("it has closed the connection{when}");
                return Err(Error::peer_lost(self.peer.to_string(), why));
            }
            *idle = false;
            done += n;
            fds.extend(more);
        }
        Ok(())
    }

    /// Sends a text to the other process.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_text(&mut self, text: &str) -> Result<()> {
        let mut sent = frame::encode(&Body::Text { bytes: text.len() })?;
        sent.extend_from_slice(text.as_bytes());
        self.together(|channel| channel.write(&sent, &[]))
    }

    /// Waits for a text of at most `most` bytes from the other process.
    ///
    /// # Errors
    /// As [`receive`](Self::receive); [`Protocol`](crate::Error::Protocol) for a longer text.
    pub fn receive_text(&mut self, most: usize) -> Result<String> {
        let until = self.deadline()?;
        match self.receive_body(until)?.0 {
            Body::Text { bytes } if bytes <= most => self.together(|this| this.text(bytes, until)),
            Body::Text { .. } => Err(self.refuse(format!("a text of more than {most} bytes"))),
            _ => Err(self.unexpected("a text")),
        }
    }

    /// Receives the bytes of a text, after its frame.
    fn text(&self, bytes: usize, until: Instant) -> Result<String> {
        let mut read = Vec::new();
        // The number is the sender's: room is made as the bytes arrive.
        while read.len() < bytes {
            let start = read.len();
            let piece = (bytes - start).min(TEXT_PIECE);
            (read.try_reserve(piece))
                .map_err(|error| MemoryError::failed("receiving a text", error.to_string()))?;
            read.resize(start + piece, 0);
            self.fill(&mut read[start..], &mut Vec::new(), 0, &mut false, until)?;
        }
        String::from_utf8(read).map_err(|_| self.protocol("a text that is not UTF-8"))
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
        for bytes in [0, 1, 1 << 20, (3 << 20) + 1] {
            let text = "ä".repeat(bytes);
            assert_eq!(through(&text, 2 * bytes).unwrap(), text);
        }
    }

    #[test]
    fn longer_texts_are_refused() {
        for most in [0, 1, 1 << 20] {
            let error = through(&"x".repeat(most + 1), most).unwrap_err();
            assert!(matches!(error, Error::Protocol { .. }), "{error}");
            assert!(error.to_string().contains("more than"), "{error}");
        }
    }

    #[test]
    fn the_number_of_a_texts_bytes_is_not_believed() {
        let (one, mut other) = pair();
        let bytes = usize::MAX;
        let mut sent = frame::encode(&Body::Text { bytes }).unwrap();
        sent.push(b'x');
        one.write(&sent, &[]).unwrap();
        drop(one);
        let error = other.receive_text(usize::MAX).unwrap_err();
        assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    }

    #[test]
    fn all_of_a_text_has_one_time_limit() {
        let (mut one, mut other) = pair();
        other.set_timeout(Duration::from_millis(300));
        let sender = std::thread::spawn(move || {
            let mut bytes = frame::encode(&Body::Text { bytes: 1 << 20 }).unwrap();
            // A byte now and then, for as long as the receiver waits.
            while one.write(&bytes, &[]).is_ok() {
                bytes = vec![b'x'];
                std::thread::sleep(Duration::from_millis(20));
            }
            one.close();
        });
        let error = other.receive_text(1 << 20).unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
        drop(other);
        sender.join().unwrap();
    }

    #[test]
    fn a_text_that_is_no_text_is_refused() {
        let (one, mut other) = pair();
        let mut sent = frame::encode(&Body::Text { bytes: 2 }).unwrap();
        sent.extend([0xff, 0xff]);
        one.write(&sent, &[]).unwrap();
        let error = other.receive_text(10).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
        assert!(error.to_string().contains("UTF-8"), "{error}");
    }
}
