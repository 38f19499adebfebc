//! Folders of fd sockets, `egmem-<instance>`: each is locked while its server lives, so that the next server
//! recognises and removes those of killed servers.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::fork::Generation;
use crate::share::socket::nobody_listens;
use crate::share::{BootId, InstanceId};
use crate::{Error, Result};

/// The file name of the fd socket in the folder.
pub(super) const FD_SOCKET: &str = "door";
/// The locked file in it. Its content names the machine and its boot, on which the lock counts.
const LOCK: &str = "lock";
/// Its name until it is locked: an unlocked [`LOCK`] means that its server is dead.
const UNLOCKED: &str = "lock.new";
/// How many entries of a directory are searched for folders.
const MOST: usize = 16 << 10;

fn name(instance: InstanceId) -> String {
    format!("egmem-{instance}")
}

/// A folder for an fd socket, removed with its contents when dropped. A forked child leaves it.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    born: Generation,
    /// `None` if files cannot be locked: then no server ever removes the folder of a killed one.
    lock: Option<File>,
}

impl Folder {
    /// Returns the path of the folder of `instance`.
    pub fn path_in(place: &Path, instance: InstanceId) -> PathBuf {
        place.join(name(instance))
    }

    /// Creates it, for this user only.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System), also if the name exists already: another user may have created
    /// it first and would own it.
    pub fn create(place: &Path, instance: InstanceId) -> Result<Self> {
        let path = Self::path_in(place, instance);
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|error| Error::system(format!("creating {}", path.display()), &error))?;
        let mut folder = Self {
            path,
            born: Generation::current(),
            lock: None,
        };
        match folder.lock() {
            Ok(lock) => folder.lock = Some(lock),
            Err(error) => {
                tracing::debug!(%error, folder = %folder.path.display(), "not locked");
                let _ = fs::remove_file(folder.path.join(UNLOCKED));
            }
        }
        Ok(folder)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn lock(&self) -> io::Result<File> {
        let boot = BootId::current().map_err(io::Error::other)?;
        let (unlocked, locked) = (self.path.join(UNLOCKED), self.path.join(LOCK));
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&unlocked)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        file.write_all(boot.to_string().as_bytes())?;
        fs::rename(&unlocked, &locked)?;
        Ok(file)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.born.is_current() {
            return;
        }
        // The socket's own file is gone already, unless it was never bound.
        let _ = fs::remove_file(self.path.join(FD_SOCKET));
        if self.lock.is_some() {
            let _ = fs::remove_file(self.path.join(LOCK));
        }
        if let Err(error) = fs::remove_dir(&self.path) {
            tracing::warn!(%error, folder = %self.path.display(), "left behind");
        }
    }
}

/// Removes the folders that killed servers of this user have left in `place`; returns their number.
///
/// Does not remove a folder that another user owns or may write to, that a server would create differently,
/// that a living process has locked or listens at, or that belongs to another machine or an earlier boot,
/// where the lock means nothing.
pub(super) fn sweep(place: &Path) -> usize {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let Ok(dir) = rustix::fs::open(place, flags, Mode::empty()) else {
        return 0;
    };
    let Ok(entries) = Dir::read_from(&dir) else {
        return 0;
    };
    let mut removed = 0;
    for entry in entries.take(MOST).map_while(|entry| entry.ok()) {
        let Some((found, instance)) = entry.file_name().to_str().ok().and_then(read_name) else {
            continue;
        };
        match remove_dead(dir.as_fd(), &found, &Folder::path_in(place, instance)) {
            Ok(true) => removed += 1,
            Ok(false) => {}
            Err(error) => tracing::debug!(%error, folder = found, "not removed"),
        }
    }
    if removed > 0 {
        tracing::info!(removed, place = %place.display(), "killed servers had left folders");
    }
    removed
}

/// Parses a folder's name; returns it with its instance.
fn read_name(found: &str) -> Option<(String, InstanceId)> {
    let instance = found.strip_prefix("egmem-")?.parse().ok()?;
    (name(instance) == found).then(|| (found.to_owned(), instance))
}

/// Removes the folder `found` in `place` if its server is dead; returns whether it did. Follows no symbolic
/// links. If another process removes it at the same time, this finds nothing left.
fn remove_dead(place: BorrowedFd<'_>, found: &str, path: &Path) -> rustix::io::Result<bool> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::RDONLY | OFlags::CLOEXEC;
    let folder = rustix::fs::openat(place, found, flags | OFlags::DIRECTORY, Mode::empty())?;
    if !is_ours(folder.as_fd())? || !has_only_ours(folder.as_fd())? {
        return Ok(false);
    }
    let lock = rustix::fs::openat(&folder, LOCK, flags, Mode::empty())?;
    if !is_ours(lock.as_fd())? || !is_of_here(lock.as_fd())? {
        return Ok(false);
    }
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(false),
        result => result?,
    }
    match rustix::fs::statat(&folder, FD_SOCKET, AtFlags::SYMLINK_NOFOLLOW) {
        // It was killed before it listened.
        Err(Errno::NOENT) => {}
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Socket => {
            if !nobody_listens(&path.join(FD_SOCKET)) {
                return Ok(false);
            }
            rustix::fs::unlinkat(&folder, FD_SOCKET, AtFlags::empty())?;
        }
        Ok(_) => return Ok(false),
        Err(error) => return Err(error),
    }
    rustix::fs::unlinkat(&folder, LOCK, AtFlags::empty())?;
    rustix::fs::unlinkat(place, found, AtFlags::REMOVEDIR)?;
    Ok(true)
}

/// Returns whether it belongs to this user, and no other user can write to it.
fn is_ours(file: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    let stat = rustix::fs::fstat(file)?;
    let others = Mode::WGRP | Mode::WOTH;
    Ok(stat.st_uid == rustix::process::geteuid().as_raw()
        && !Mode::from_raw_mode(stat.st_mode).intersects(others))
}

fn has_only_ours(folder: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    for entry in Dir::read_from(folder)? {
        if !matches!(
            entry?.file_name().to_bytes(),
            b"." | b".." | b"door" | b"lock"
        ) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns whether the lock is from this machine since its last boot: machines that share a directory need
/// not share its locks.
fn is_of_here(lock: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    let mut text = [0; 64];
    let read = rustix::io::read(lock, &mut text)?;
    let said = std::str::from_utf8(&text[..read]).ok();
    let said = said.and_then(|text| text.parse::<BootId>().ok());
    Ok(said.is_some() && said == BootId::current().ok())
}

#[cfg(test)]
mod tests;
