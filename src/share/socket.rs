//! Unix sockets at a path.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::Peers;
use super::fd;
use crate::fork::Generation;
use crate::{Error, MemoryError, MemoryResult, Result, Unreachable};

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 1024;

/// How often a path that was free a moment ago may have a socket's file again.
const REMOVED_MEANWHILE: usize = 3;

/// A socket's file, removed when dropped, unless another socket has replaced it. A forked child leaves it.
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
        match (self.file.metadata(), fs::symlink_metadata(&self.path)) {
            (Ok(own), Ok(found)) => id(own) == id(found),
            _ => false,
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.born.is_current() && self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn new(of: SocketType) -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, of, SocketFlags::CLOEXEC, None)
}

fn address(path: &Path) -> MemoryResult<SocketAddrUnix> {
    SocketAddrUnix::new(path).map_err(|error| {
        MemoryError::system(format!("the socket path {}", path.display()), &error.into())
    })
}

/// Creates a listening socket at `path`: for its user only, unless `peers` admits others.
///
/// Replaces a socket file at which no process listens any more, but not one at which a process does. Children that a process has forked
/// do not listen. The socket listens and has its permissions before its file appears at the path: it is bound to a name beside it,
/// then renamed.
///
/// # Errors
/// [`System`](MemoryError::System) that names the path: `AddrInUse` if a process listens there, or if the file is not a
/// socket.
pub fn listen(path: &Path, peers: &Peers) -> MemoryResult<(OwnedFd, SocketFile)> {
    let failed =
        |error: io::Error| MemoryError::system(format!("listening at {}", path.display()), &error);
    address(path)?;
    let beside = beside(path).map_err(failed)?;
    // Binds under these permissions, so that the socket never has more than it will have.
    let socket = File::from(new(SocketType::STREAM).map_err(|error| failed(error.into()))?);
    socket
        .set_permissions(Permissions::from_mode(0o600))
        .map_err(failed)?;
    let socket = OwnedFd::from(socket);
    rustix::net::bind(&socket, &address(&beside)?).map_err(|error| failed(error.into()))?;
    let mut file = SocketFile::at(&beside).map_err(failed)?;
    rustix::net::listen(&socket, BACKLOG).map_err(|error| failed(error.into()))?;
    // The credentials are checked in either case. The process's umask has no influence.
    let mode = if peers.reach_beyond_own_user() {
        0o666
    } else {
        0o600
    };
    fs::set_permissions(&beside, Permissions::from_mode(mode)).map_err(failed)?;
    place(&beside, path).map_err(failed)?;
    file.path = path.to_owned();
    Ok((socket, file))
}

/// Returns a free name in the folder of `path`.
fn beside(path: &Path) -> io::Result<PathBuf> {
    let random: [u8; 6] = crate::driver::random()?;
    let name: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(path.with_file_name(format!(".{name}")))
}

/// Moves the file of a listening socket to `path`, in place of one at which no process listens any more.
fn place(from: &Path, path: &Path) -> io::Result<()> {
    let rename = |flags| rustix::fs::renameat_with(CWD, from, CWD, path, flags);
    for _ in 0..REMOVED_MEANWHILE {
        match rename(RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => {}
            result => return Ok(result?),
        }
        if !nobody_listens(path) {
            match fs::symlink_metadata(path) {
                // A listener that has ended has removed its file.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                _ => return Err(io::ErrorKind::AddrInUse.into()),
            }
        }
        // Exchanged, because another process may have replaced the dead file meanwhile: then that one stays.
        match rename(RenameFlags::EXCHANGE) {
            Ok(()) if nobody_listens(from) => {
                // The new socket is in place, even if the dead one's file stays.
                let _ = fs::remove_file(from);
                return Ok(());
            }
            Ok(()) => {
                rename(RenameFlags::EXCHANGE)?;
                return Err(io::ErrorKind::AddrInUse.into());
            }
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

/// Returns whether there is a socket at `path` at which no process listens any more.
pub fn nobody_listens(path: &Path) -> bool {
    address(path).is_ok_and(|address| is_dead(path, &address))
}

/// As [`nobody_listens`], with the path as an address.
fn is_dead(path: &Path, address: &SocketAddrUnix) -> bool {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    let connected = || {
        let socket = new(SocketType::STREAM)?;
        // A listener may have a full backlog.
        set_socket_timeout(&socket, Timeout::Send, Some(Duration::from_millis(1)))?;
        rustix::net::connect(&socket, address).map(|()| socket)
    };
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
    let socket = new(SocketType::STREAM)
        .map_err(|error| MemoryError::system("making a socket", &error.into()))?;
    let connected = set_socket_timeout(&socket, Timeout::Send, Some(timeout))
        .and_then(|()| rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address)));
    // Nobody would accept the connection.
    let connected = connected.and_then(|()| match fd::peer_has_ended(socket.as_fd()) {
        true => Err(Errno::CONNREFUSED),
        false => Ok(()),
    });
    match connected {
        Ok(()) => Ok(socket),
        Err(Errno::WOULDBLOCK) => Err(Error::timed_out(
            format!("connecting to {}", path.display()),
            timeout,
        )),
        Err(error) => {
            let error = io::Error::from(error);
            Err(Error::Unreachable {
                peer: path.display().to_string(),
                cause: Unreachable::of(error.kind()),
                why: error.to_string(),
            })
        }
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
    fn the_file_is_the_users_and_goes_with_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let (_socket, file) = listen(&path, &Peers::same_user()).unwrap();
        assert_eq!(mode(&path), 0o600);
        drop(connect(&path, SHORT).unwrap());
        drop(file);
        assert!(!path.exists());
        let (_socket, _file) = listen(&path, &Peers::default().any_user()).unwrap();
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
        let (first, first_file) = listen(&path, &peers).unwrap();
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
        let (_second, _second_file) = listen(&path, &peers).unwrap();
        // The first one's file is gone; dropping it leaves the second one's alone.
        drop(first_file);
        drop(connect(&path, SHORT).unwrap());

        let file = folder.path().join("file");
        fs::write(&file, "precious").unwrap();
        assert!(listen(&file, &peers).is_err());
        assert_eq!(fs::read(&file).unwrap(), b"precious");
        assert!(listen(&folder.path().join("x".repeat(200)), &peers).is_err());
    }

    #[test]
    fn a_full_backlog_does_not_hold_up_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let (socket, _file) = listen(&path, &Peers::same_user()).unwrap();
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
}
