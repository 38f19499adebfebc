//! Folders of doors, `egmem-<instance>`: each is locked for as long as its server lives, so that the
//! next server can tell those that killed ones have left, and removes them.

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

/// The socket in the folder.
pub(super) const DOOR: &str = "door";
/// The locked file in it. It says on which machine, since when it runs, the lock counts.
const LOCK: &str = "lock";
/// Its name until it is locked: whoever sees [`LOCK`] unlocked knows that its server is dead.
const UNLOCKED: &str = "lock.new";
/// How many entries of a place are looked through for folders.
const MOST: usize = 16 << 10;

fn name(instance: InstanceId) -> String {
    format!("egmem-{instance}")
}

/// A folder for a door, removed with what is in it when dropped. A forked child leaves it.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    born: Generation,
    /// `None` where files cannot be locked: then nobody ever removes the folder of a killed server.
    lock: Option<File>,
}

impl Folder {
    /// Where the folder of `instance` would be.
    pub fn path_in(place: &Path, instance: InstanceId) -> PathBuf {
        place.join(name(instance))
    }

    /// Makes it, for this user alone.
    ///
    /// # Errors
    /// [`Error::System`], also where something of the name is there already: who made that before us
    /// would own it.
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
        // The socket's own file is gone already, unless nobody has bound it.
        let _ = fs::remove_file(self.path.join(DOOR));
        if self.lock.is_some() {
            let _ = fs::remove_file(self.path.join(LOCK));
        }
        if let Err(error) = fs::remove_dir(&self.path) {
            tracing::warn!(%error, folder = %self.path.display(), "left behind");
        }
    }
}

/// Removes what killed servers of this user have left in `place`; says how many folders.
///
/// Nothing is removed that another user owns or may write to, that is not exactly as a server makes
/// it, that a living process has locked or listens at, or that is of another machine or of before
/// its last start, where this lock tells nothing.
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

/// A folder's name, exactly as it is written, and whose it is.
fn read_name(found: &str) -> Option<(String, InstanceId)> {
    let instance = found.strip_prefix("egmem-")?.parse().ok()?;
    (name(instance) == found).then(|| (found.to_owned(), instance))
}

/// Whether the folder `found` in `place` was a dead server's, and is removed. Symbolic links are
/// followed nowhere. Who else removes it at the same time finds nothing left to remove.
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
    match rustix::fs::statat(&folder, DOOR, AtFlags::SYMLINK_NOFOLLOW) {
        // It was killed before it listened.
        Err(Errno::NOENT) => {}
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Socket => {
            if !nobody_listens(&path.join(DOOR)) {
                return Ok(false);
            }
            rustix::fs::unlinkat(&folder, DOOR, AtFlags::empty())?;
        }
        Ok(_) => return Ok(false),
        Err(error) => return Err(error),
    }
    rustix::fs::unlinkat(&folder, LOCK, AtFlags::empty())?;
    rustix::fs::unlinkat(place, found, AtFlags::REMOVEDIR)?;
    Ok(true)
}

/// Whether it is this user's, and nobody else can write to it.
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

/// Whether the lock is of this machine since its last start: a place that several machines share
/// need not share its locks.
fn is_of_here(lock: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    let mut text = [0; 64];
    let read = rustix::io::read(lock, &mut text)?;
    let said = std::str::from_utf8(&text[..read]).ok();
    let said = said.and_then(|text| text.parse::<BootId>().ok());
    Ok(said.is_some() && said == BootId::current().ok())
}

#[cfg(test)]
mod tests;
