//! The lock file beside a Unix socket.
//!
//! A lock on the folder itself would let any user who can read the folder keep others from listening there.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use egmem_core::{Error, Result};

/// How long another process of the same user may hold the lock.
const BUSY: Duration = Duration::from_secs(2);

/// An exclusive lock for replacing the socket at a path. Dropping it removes the file, then releases the
/// lock.
///
/// The lock is `flock(2)` on `<socket>.lock`, a file of mode 0600. A file that a crash left behind is
/// unlocked, so the next process takes it over.
#[derive(Debug)]
pub(super) struct SocketLock {
    path: PathBuf,
    _file: File,
}

impl SocketLock {
    /// Takes the lock for the socket at `socket`; waits up to 2 s for a process that holds it.
    ///
    /// # Errors
    /// [`Error::System`] that names the lock file: if it cannot be created, is held for longer, or is not a
    /// private file of this process's user. Such a file is not followed, changed or removed.
    pub(super) fn take(socket: &Path) -> Result<Self> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        let deadline = Instant::now() + BUSY;
        loop {
            let attempt = attempt(&path)
                .map_err(|error| Error::system(format!("lock file {}", path.display()), &error))?;
            match attempt {
                Some(file) => return Ok(Self { path, _file: file }),
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
                None => {
                    let what = format!("lock file {}", path.display());
                    return Err(Error::system(what, &Errno::WOULDBLOCK.into()));
                }
            }
        }
    }
}

impl Drop for SocketLock {
    fn drop(&mut self) {
        // Still locked, so the path names this file: see `attempt`.
        let _ = fs::remove_file(&self.path);
    }
}

/// Opens and locks the file; `None` if another process has locked it, or has removed it meanwhile.
fn attempt(path: &Path) -> io::Result<Option<File>> {
    // Nonblocking, because opening a fifo would wait for a writer.
    let flags =
        OFlags::RDONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
    check(&file.metadata()?)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(None),
        result => result?,
    }
    // The previous holder removes the file, then releases the lock: a lock on a removed file excludes no other
    // process.
    let id = |found: &fs::Metadata| (found.dev(), found.ino());
    let opened = id(&file.metadata()?);
    match fs::symlink_metadata(path) {
        Ok(found) if id(&found) == opened => Ok(Some(file)),
        Ok(_) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Refuses a file that another user created, can lock, or linked here from elsewhere.
fn check(found: &fs::Metadata) -> io::Result<()> {
    let own = rustix::process::geteuid().as_raw();
    let refuse = |why: String| {
        let what = format!("{why}; remove it, or choose another path for the socket");
        Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
    };
    if !found.is_file() {
        return refuse("it is not a regular file".into());
    }
    if found.uid() != own {
        return refuse(format!(
            "it belongs to uid {}, not to uid {own}",
            found.uid()
        ));
    }
    if found.mode() & 0o077 != 0 {
        return refuse(format!(
            "other users have access to it (mode {:04o})",
            found.mode() & 0o7777
        ));
    }
    // 0 after the previous holder removed it; the caller tries again.
    if found.nlink() > 1 {
        return refuse("it has a second link".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// A folder like /tmp: shared, and sticky.
    fn shared_folder() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        let socket = folder.path().join("socket");
        let lock = folder.path().join("socket.lock");
        (folder, socket, lock)
    }

    fn refused(socket: &Path) -> String {
        let text = SocketLock::take(socket).unwrap_err().to_string();
        assert!(text.contains("socket.lock"), "{text}");
        text
    }

    #[test]
    fn a_lock_file_is_private_and_is_removed_with_the_lock() {
        let (_folder, socket, lock) = shared_folder();
        let held = SocketLock::take(&socket).unwrap();
        assert_eq!(fs::metadata(&lock).unwrap().mode() & 0o7777, 0o600);
        drop(held);
        assert!(!lock.exists());
    }

    #[test]
    fn a_lock_that_is_held_is_named() {
        let (_folder, socket, lock) = shared_folder();
        let _held = SocketLock::take(&socket).unwrap();
        refused(&socket);
        assert!(lock.exists(), "the holder's file stays");
    }

    #[test]
    fn a_lock_file_left_by_a_crash_is_taken_over() {
        let (_folder, socket, lock) = shared_folder();
        fs::write(&lock, "").unwrap();
        fs::set_permissions(&lock, fs::Permissions::from_mode(0o600)).unwrap();
        drop(SocketLock::take(&socket).unwrap());
        assert!(!lock.exists());
    }

    #[test]
    fn a_symlink_is_not_followed() {
        let (folder, socket, lock) = shared_folder();
        let precious = folder.path().join("precious");
        fs::write(&precious, "bytes").unwrap();
        fs::set_permissions(&precious, fs::Permissions::from_mode(0o600)).unwrap();
        for target in [precious.clone(), folder.path().join("absent")] {
            symlink(&target, &lock).unwrap();
            refused(&socket);
            assert_eq!(fs::read(&precious).unwrap(), b"bytes");
            assert!(!folder.path().join("absent").exists());
            fs::remove_file(&lock).unwrap();
        }
    }

    #[test]
    fn a_hard_link_to_a_private_file_is_neither_locked_nor_changed() {
        let (folder, socket, lock) = shared_folder();
        let precious = folder.path().join("precious");
        fs::write(&precious, "bytes").unwrap();
        fs::set_permissions(&precious, fs::Permissions::from_mode(0o600)).unwrap();
        fs::hard_link(&precious, &lock).unwrap();
        assert!(refused(&socket).contains("second link"));
        assert_eq!(fs::read(&precious).unwrap(), b"bytes");
        assert!(lock.exists());
    }

    #[test]
    fn a_file_that_others_can_lock_is_refused_and_keeps_its_bytes() {
        let (_folder, socket, lock) = shared_folder();
        fs::write(&lock, "bytes").unwrap();
        fs::set_permissions(&lock, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(refused(&socket).contains("0644"));
        assert_eq!(fs::read(&lock).unwrap(), b"bytes");
    }

    #[test]
    fn a_file_of_another_user_is_refused() {
        let (_folder, socket, lock) = shared_folder();
        fs::write(&lock, "").unwrap();
        fs::set_permissions(&lock, fs::Permissions::from_mode(0o600)).unwrap();
        // Only root can give a file to another user.
        if std::os::unix::fs::chown(&lock, Some(65_534), None).is_ok() {
            refused(&socket);
            assert!(lock.exists());
        }
    }

    #[test]
    fn what_is_no_file_is_refused_at_once() {
        let (_folder, socket, lock) = shared_folder();
        fs::create_dir(&lock).unwrap();
        refused(&socket);
        fs::remove_dir(&lock).unwrap();
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &lock, fifo, Mode::RUSR, 0).unwrap();
        refused(&socket);
    }
}
