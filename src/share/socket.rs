//! Unix sockets at a path: listening and connecting.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with};

use super::{Channel, Peers, fd};
use crate::error::failed;
use crate::fork::Generation;
use crate::{Error, MemoryError, MemoryResult, Result, Unreachable};

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 1024;

/// How often a path that was free a moment ago may have a socket's file again.
const REMOVED_MEANWHILE: usize = 3;

/// A socket's file, removed when dropped, unless another socket has replaced it. A forked child leaves it. Drop it before the socket.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    born: Generation,
    /// Opened as a path only, so that the file's inode number is not reused.
    file: File,
}

impl SocketFile {
    fn at(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Self {
            path: path.to_owned(),
            born: Generation::current(),
            file: file.into(),
        })
    }

    fn is_there(&self) -> bool {
        let id = |found: fs::Metadata| (found.dev(), found.ino());
        let found = fs::symlink_metadata(&self.path).map(id).ok();
        found.is_some() && found == self.file.metadata().map(id).ok()
    }

    /// Removes the file while its socket still listens: no process replaces it then between the look and the removal.
    fn remove(&self) {
        if self.born.is_current() && self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.remove();
    }
}

fn new(of: SocketType) -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, of, SocketFlags::CLOEXEC, None)
}

fn address(path: &Path) -> MemoryResult<SocketAddrUnix> {
    SocketAddrUnix::new(path).map_err(failed(format!("the socket path {}", path.display())))
}

/// Creates a folder for sockets, for this user alone, unless it exists.
///
/// # Errors
/// Those of [`check_private`]; the system's.
pub fn make_private(folder: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    check_private(folder)
}

/// Checks that a folder is this user's own, so that no other user can put a socket there or list it.
///
/// # Errors
/// `PermissionDenied` with the reason why it is not; the system's.
pub fn check_private(folder: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(folder)?;
    let why = match found {
        _ if !found.is_dir() => "it is not a folder",
        _ if found.uid() != rustix::process::geteuid().as_raw() => "it belongs to another user",
        _ if found.mode() & 0o077 != 0 => "other users have access: its mode must be 0700",
        _ => return Ok(()),
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// Creates a listening socket at `path`: for its user only, unless `peers` admits others. The file is dropped before the socket, as
/// the result does: a process that begins to listen there once the socket is closed would lose its own.
///
/// Replaces a socket file at which no process listens any more, but not one at which a process does. Children that a process has forked
/// do not listen. The socket listens and has its permissions before its file appears at the path: it is bound to a name beside it,
/// then renamed.
///
/// # Errors
/// [`System`](MemoryError::System) that names the path: `AddrInUse` if a process listens there, or if the file is not a
/// socket.
pub fn listen(path: &Path, peers: &Peers) -> MemoryResult<(SocketFile, OwnedFd)> {
    address(path)?;
    let listening = listen_at(path, peers, &rename);
    listening.map_err(failed(format!("listening at {}", path.display())))
}

fn listen_at(path: &Path, peers: &Peers, rename: Rename<'_>) -> io::Result<(SocketFile, OwnedFd)> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut beside = free_name(folder)?;
    let mut opened = None;
    if SocketAddrUnix::new(&beside).is_err() {
        // That name is longer than the socket's, and makes the path too long. The folder has a short path, too.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = opened.insert(rustix::fs::open(folder, flags, Mode::empty())?);
        beside = free_name(Path::new(&format!("/proc/self/fd/{}", folder.as_raw_fd())))?;
    }
    // Binds under these permissions, so that the socket never has more than it will have.
    let socket = File::from(new(SocketType::STREAM)?);
    socket.set_permissions(Permissions::from_mode(0o600))?;
    let socket = OwnedFd::from(socket);
    rustix::net::bind(&socket, &SocketAddrUnix::new(&beside)?)?;
    let file = SocketFile::at(&beside).inspect_err(|_| drop(fs::remove_file(&beside)));
    let mut file = file?;
    rustix::net::listen(&socket, BACKLOG)?;
    // The credentials are checked in either case. The process's umask has no influence.
    let for_others = peers.reach_beyond_own_user();
    let mode = if for_others { 0o666 } else { 0o600 };
    fs::set_permissions(&beside, Permissions::from_mode(mode))?;
    place(&beside, path, rename)?;
    file.path = path.to_owned();
    Ok((file, socket))
}

/// Returns a free name in a folder.
fn free_name(folder: &Path) -> io::Result<PathBuf> {
    let random: [u8; 6] = crate::driver::random()?;
    let name: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(folder.join(format!(".{name}")))
}

/// Renames a file, with flags that some file systems (`INVAL`) and kernels (`NOSYS`) do not know.
type Rename<'a> = &'a dyn Fn(&Path, &Path, RenameFlags) -> rustix::io::Result<()>;

fn rename(from: &Path, to: &Path, flags: RenameFlags) -> rustix::io::Result<()> {
    rustix::fs::renameat_with(CWD, from, CWD, to, flags)
}

/// Moves a file to a name that is free.
fn move_to_free(from: &Path, to: &Path, rename: Rename<'_>) -> rustix::io::Result<()> {
    match rename(from, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) => {
            rustix::fs::linkat(CWD, from, CWD, to, AtFlags::empty())?;
            rustix::fs::unlink(from)
        }
        moved => moved,
    }
}

/// Replaces the file of a dead socket where files cannot be exchanged. A lock of the folder keeps processes that do the same at once
/// from replacing each other's. They hold it for a moment; a process that keeps it for longer keeps nobody from listening.
fn replace_dead(from: &Path, path: &Path, rename: Rename<'_>) -> rustix::io::Result<()> {
    let folder = from.parent().unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty())?;
    let lock = || rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive);
    let mut tries = 0..20;
    while lock() == Err(Errno::WOULDBLOCK) && tries.next().is_some() {
        std::thread::sleep(Duration::from_millis(10));
    }
    if !nobody_listens(path) {
        return Err(Errno::ADDRINUSE);
    }
    rename(from, path, RenameFlags::empty())
}

/// Moves the file of a listening socket to `path`, in place of one at which no process listens any more.
fn place(from: &Path, path: &Path, rename: Rename<'_>) -> io::Result<()> {
    for _ in 0..REMOVED_MEANWHILE {
        match move_to_free(from, path, rename) {
            Err(Errno::EXIST) => {}
            result => return Ok(result?),
        }
        if !nobody_listens(path) {
            let found = fs::symlink_metadata(path);
            // A listener that has ended has removed its file.
            if found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
                continue;
            }
            return Err(io::ErrorKind::AddrInUse.into());
        }
        // Exchanged, because another process may have replaced the dead file meanwhile: then that one stays.
        match rename(from, path, RenameFlags::EXCHANGE) {
            Ok(()) if nobody_listens(from) => {
                // The new socket is in place, even if the dead one's file stays.
                let _ = fs::remove_file(from);
                return Ok(());
            }
            Ok(()) => {
                rename(from, path, RenameFlags::EXCHANGE)?;
                return Err(io::ErrorKind::AddrInUse.into());
            }
            Err(Errno::INVAL | Errno::NOSYS) => return Ok(replace_dead(from, path, rename)?),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

/// Returns whether there is a socket at `path` at which no process listens any more.
fn nobody_listens(path: &Path) -> bool {
    let connected = || {
        let socket = new(SocketType::STREAM)?;
        // A listener may have a full backlog.
        set_socket_timeout(&socket, Timeout::Send, Some(Duration::from_millis(1)))?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?).map(|()| socket)
    };
    let is_socket = fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    is_socket
        && match connected() {
            Ok(socket) => fd::peer_has_ended(socket.as_fd()),
            Err(error) => error == Errno::CONNREFUSED,
        }
}

/// Connects to the socket at `path`.
///
/// # Errors
/// [`Error::TimedOut`] if no process accepts within `timeout`; [`Error::Unreachable`] if no process listens, or the one that did has ended
/// and a child that it forked still has its socket.
pub fn connect(path: &Path, timeout: Duration) -> Result<OwnedFd> {
    let address = address(path)?;
    let socket = new(SocketType::STREAM).map_err(failed("making a socket"))?;
    let connected = fd::limited((socket.as_fd(), Timeout::Send), timeout, || {
        Ok(rustix::net::connect(&socket, &address)?)
    });
    let shown = path.display();
    let error = match connected {
        Ok(()) if !fd::peer_has_ended(socket.as_fd()) => return Ok(socket),
        // Nobody would accept the connection.
        Ok(()) => Errno::CONNREFUSED.into(),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(Error::timed_out(format!("connecting to {shown}"), timeout));
        }
        Err(error) => error,
    };
    Err(Error::Unreachable {
        peer: shown.to_string(),
        cause: Unreachable::of(error.kind()),
        why: error.to_string(),
    })
}

/// A Unix socket that other processes of this machine connect to.
///
/// Only this process's user can open its file, unless the policy admits others. It replaces a file that a
/// dead process has left. Dropping or closing the listener removes the file.
#[derive(Debug)]
pub struct Listener {
    // Before the socket.
    file: SocketFile,
    socket: OwnedFd,
    peers: Peers,
    timeout: Option<Duration>,
}

impl Listener {
    /// Listens at `path`.
    ///
    /// # Errors
    /// [`System`](MemoryError::System) that names the path, also if another process listens there.
    pub fn bind(path: impl AsRef<Path>, peers: Peers) -> Result<Self> {
        let (file, socket) = listen(path.as_ref(), &peers)?;
        Ok(Self {
            file,
            socket,
            peers,
            timeout: None,
        })
    }

    /// Sets how long [`accept`](Self::accept) waits; the default is forever. At most twice as long if it
    /// skips processes that have disconnected, or signals interrupt it.
    ///
    /// # Errors
    /// [`InvalidArgument`](MemoryError::InvalidArgument) for a timeout of 0.
    pub fn set_timeout(&mut self, timeout: Duration) -> Result<()> {
        set_socket_timeout(&self.socket, Timeout::Recv, Some(timeout))
            .map_err(|error| MemoryError::invalid("timeout", error.to_string()))?;
        self.timeout = Some(timeout);
        Ok(())
    }

    /// Waits for the next process that connects. Skips one that has disconnected without sending anything.
    ///
    /// Any other process may disconnect at any time, so every operation on the channel can fail with
    /// [`Error::PeerLost`]: that ends this channel, not the accept loop.
    ///
    /// # Errors
    /// [`Error::NotTrusted`] for a process that the policy does not admit, which is disconnected;
    /// [`Error::TimedOut`]; the system's errors. The listener stays usable after each.
    pub fn accept(&self) -> Result<Channel> {
        let begun = Instant::now();
        loop {
            match accept_with(&self.socket, SocketFlags::CLOEXEC) {
                Ok(stream) => {
                    let channel = Channel::new(stream.into(), &self.peers)?;
                    if !channel.is_gone() {
                        return Ok(channel);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => return Err(self.timed_out()),
                Err(error) => return Err(failed("accepting a connection")(error).into()),
            }
            if self.timeout.is_some_and(|after| begun.elapsed() >= after) {
                return Err(self.timed_out());
            }
        }
    }

    /// Ends listening, and removes the file: calls of [`accept`](Self::accept) that wait return an error, as all later ones do.
    /// Processes that connect are refused.
    pub fn close(&self) {
        self.file.remove();
        // It fails only for a socket that does not listen.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }

    fn timed_out(&self) -> Error {
        Error::timed_out("waiting for a connection", self.timeout.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(50);

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn only_an_own_folder_is_used() {
        let parent = tempfile::tempdir().unwrap();
        let own = parent.path().join("own");
        make_private(&own).unwrap();
        make_private(&own).unwrap();
        assert_eq!(mode(&own), 0o700);
        let link = parent.path().join("link");
        std::os::unix::fs::symlink(&own, &link).unwrap();
        assert!(make_private(&link).is_err());
        fs::set_permissions(&own, PermissionsExt::from_mode(0o750)).unwrap();
        assert!(make_private(&own).is_err());
        let file = parent.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(make_private(&file).is_err());
        assert!(make_private(&parent.path().join("no/such")).is_err());
    }

    #[test]
    fn the_file_is_the_users_and_goes_with_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let (file, _socket) = listen(&path, &Peers::same_user()).unwrap();
        assert_eq!(mode(&path), 0o600);
        drop(connect(&path, SHORT).unwrap());
        drop(file);
        assert!(!path.exists());
        let (_file, _socket) = listen(&path, &Peers::default().any_user()).unwrap();
        assert_eq!(mode(&path), 0o666);
    }

    #[test]
    fn a_user_with_read_access_to_the_folder_cannot_keep_others_from_listening() {
        let folder = tempfile::tempdir().unwrap();
        let opened = File::open(folder.path()).unwrap();
        rustix::fs::flock(&opened, rustix::fs::FlockOperation::LockExclusive).unwrap();
        listen(&folder.path().join("socket"), &Peers::same_user()).unwrap();
    }

    #[test]
    fn only_a_dead_socket_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let peers = Peers::same_user();
        let (first_file, first) = listen(&path, &peers).unwrap();
        let error = listen(&path, &peers).unwrap_err();
        assert!(matches!(error, MemoryError::System { .. }), "{error}");
        // As after a crash: closed, with the file still present.
        drop(first);
        assert!(matches!(
            connect(&path, SHORT),
            Err(Error::Unreachable {
                cause: Unreachable::NoSocket | Unreachable::NobodyListens,
                ..
            })
        ));
        let (_second_file, _second) = listen(&path, &peers).unwrap();
        // The first one's file is gone; dropping it leaves the second one's alone.
        drop(first_file);
        drop(connect(&path, SHORT).unwrap());

        let file = folder.path().join("file");
        fs::write(&file, "precious").unwrap();
        assert!(listen(&file, &peers).is_err());
        assert_eq!(fs::read(&file).unwrap(), b"precious");
        assert!(listen(&folder.path().join("x".repeat(200)), &peers).is_err());
    }

    /// Paths have at most 107 bytes.
    #[test]
    fn a_path_of_the_greatest_length_has_room_for_the_name_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let peers = Peers::same_user();
        for length in [94, 95, 107] {
            let more = length - folder.path().as_os_str().len() - "//s".len();
            let inner = folder.path().join("x".repeat(more));
            fs::create_dir(&inner).unwrap();
            let path = inner.join("s");
            assert_eq!(path.as_os_str().len(), length);
            let (dead, _dead_file) = listen(&path, &peers).unwrap();
            drop(dead);
            let (file, _socket) = listen(&path, &peers).unwrap();
            drop(connect(&path, SHORT).unwrap());
            assert_eq!(fs::read_dir(&inner).unwrap().count(), 1);
            drop(file);
            assert_eq!(fs::read_dir(&inner).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_file_system_that_knows_no_flags_of_rename_is_enough() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let peers = Peers::same_user();
        let plain = |from: &Path, to: &Path, flags: RenameFlags| {
            if !flags.is_empty() {
                return Err(Errno::INVAL);
            }
            rename(from, to, flags)
        };
        let files = || fs::read_dir(folder.path()).unwrap().count();
        // A process that may read the folder keeps nobody from listening.
        let reader = File::open(folder.path()).unwrap();
        rustix::fs::flock(&reader, FlockOperation::LockExclusive).unwrap();
        let (first_file, first) = listen_at(&path, &peers, &plain).unwrap();
        let error = listen_at(&path, &peers, &plain).unwrap_err();
        assert_eq!((error.kind(), files()), (io::ErrorKind::AddrInUse, 1));
        drop(connect(&path, SHORT).unwrap());
        drop(first);
        let (_second_file, _second) = listen_at(&path, &peers, &plain).unwrap();
        drop(first_file);
        drop(connect(&path, SHORT).unwrap());
        assert_eq!(files(), 1);
        // Neither is another file removed.
        let file = folder.path().join("file");
        fs::write(&file, "precious").unwrap();
        listen_at(&file, &peers, &plain).unwrap_err();
        assert_eq!(
            (fs::read(&file).unwrap(), files()),
            (b"precious".to_vec(), 2)
        );
    }

    /// Three processes find the same dead socket: the second starts after the first has looked at it, the third while the first
    /// replaces it.
    #[test]
    fn without_flags_of_rename_one_of_three_at_once_wins() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let peers = Peers::same_user();
        let (dead, _file) = listen(&path, &peers).unwrap();
        drop(dead);
        let plain = |from: &Path, to: &Path, flags: RenameFlags| match flags {
            RenameFlags::EXCHANGE | RenameFlags::NOREPLACE => Err(Errno::INVAL),
            _ => rename(from, to, flags),
        };
        let others = std::cell::RefCell::new(Vec::new());
        let start_another = || {
            let started = listen_at(&path, &peers, &plain);
            others.borrow_mut().push(started);
        };
        let first = |from: &Path, to: &Path, flags: RenameFlags| {
            if flags == RenameFlags::EXCHANGE {
                start_another();
            }
            let renamed = plain(from, to, flags);
            if flags.is_empty() {
                start_another();
            }
            renamed
        };
        let first = listen_at(&path, &peers, &first);
        let all: Vec<_> = others.into_inner().into_iter().chain([first]).collect();
        let listening = all.iter().filter(|started| started.is_ok()).count();
        assert_eq!(
            (listening, fs::read_dir(folder.path()).unwrap().count()),
            (1, 1)
        );
        drop(connect(&path, SHORT).unwrap());
    }

    #[test]
    fn a_full_backlog_does_not_hold_up_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let (_file, socket) = listen(&path, &Peers::same_user()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let _waiting = connect(&path, SHORT).unwrap();
        let error = connect(&path, SHORT).unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
        // A busy listener is not a dead one.
        assert!(listen(&path, &Peers::same_user()).is_err());
    }

    #[test]
    fn of_many_at_once_one_wins() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        // A dead socket at the path.
        let (dead, _file) = listen(&path, &Peers::same_user()).unwrap();
        drop(dead);
        let barrier = std::sync::Barrier::new(8);
        let listening = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        let result = listen(&path, &Peers::same_user());
                        barrier.wait();
                        result.is_ok()
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|t| t.join().unwrap())
                .filter(|ok| *ok)
                .count()
        });
        assert_eq!(listening, 1);
    }

    /// Otherwise another process could replace the file between the last look at it and its removal: its own would be removed.
    #[test]
    fn the_file_goes_before_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let bind = || Listener::bind(&path, Peers::same_user()).unwrap();
        for _ in 0..200 {
            let listener = bind();
            let client = connect(&path, SHORT).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| drop(listener));
                while !fd::has_hung_up(&client) {}
                assert!(!path.exists());
            });
        }
        let listener = bind();
        listener.close();
        assert!(!path.exists());
        let _next = bind();
        drop(listener);
        assert!(path.exists());
    }

    #[test]
    #[cfg(not(miri))]
    fn a_process_without_a_free_fd_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        assert!(crate::fork_check::in_a_child(|| {
            // The socket's is the last one.
            let next = new(SocketType::STREAM).map_or(0, |fd| fd.as_raw_fd() as u64 + 1);
            let limit = libc::rlimit {
                rlim_cur: next,
                rlim_max: next,
            };
            // SAFETY: the limit is a local variable.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
            listen(&path, &Peers::same_user()).is_err()
        }));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn waits_are_ended_by_other_threads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, Peers::same_user()).unwrap();
        let client = Channel::connect_within(&path, Peers::same_user(), Duration::from_secs(60));
        let _client = client.unwrap();
        let mut channel = listener.accept().unwrap();
        let closer = channel.closer().unwrap();
        std::thread::scope(|scope| {
            let receiving = scope.spawn(move || channel.receive_text(1).unwrap_err());
            let accepting = scope.spawn(|| listener.accept().unwrap_err());
            closer.close();
            listener.close();
            let lost = receiving.join().unwrap();
            assert!(matches!(lost, Error::PeerLost { .. }), "{lost}");
            let ended = accepting.join().unwrap();
            assert!(ended.memory().is_some(), "{ended}");
        });
        let refused = Channel::connect(&path, Peers::same_user()).unwrap_err();
        let cause = Unreachable::NoSocket;
        assert!(matches!(refused, Error::Unreachable { cause: found, .. } if found == cause));
    }
}
