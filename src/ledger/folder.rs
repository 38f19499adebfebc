//! The folder of the sockets at which processes offer their ledgers.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The folders that processes of this user may use, the preferred one first: a process may lack the environment
/// variable that another has.
pub(crate) fn places() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let runtime = runtime.filter(|path| path.is_absolute());
    let user = rustix::process::geteuid().as_raw();
    let temporary = PathBuf::from(format!("/tmp/egmem-{user}"));
    let runtime = runtime.map(|path| path.join("egmem"));
    runtime.into_iter().chain([temporary]).collect()
}

/// Returns whether `folder` is this user's own, so that no other user can put a socket there or list it.
///
/// # Errors
/// The reason why it is not, or the system's error.
pub(crate) fn check(folder: &Path) -> io::Result<()> {
    let found = std::fs::symlink_metadata(folder)?;
    let why = match found {
        _ if !found.is_dir() => "it is not a folder",
        _ if found.uid() != rustix::process::geteuid().as_raw() => "it belongs to another user",
        _ if found.mode() & 0o077 != 0 => "other users have access: its mode must be 0700",
        _ => return Ok(()),
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// Creates `folder` for this user alone, unless it exists.
pub(crate) fn make(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    check(folder)
}

/// Returns the name of a process's socket.
pub(crate) fn name(pid: u32, instance: &str) -> String {
    let instance: String = instance.chars().take(12).collect();
    format!("ps-{pid}-{instance}.sock")
}

/// Returns the process id in a socket's name.
pub(crate) fn pid_of(name: &str) -> Option<u32> {
    let rest = name.strip_prefix("ps-")?.strip_suffix(".sock")?;
    rest.split_once('-')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn only_an_own_folder_is_used() {
        let parent = tempfile::tempdir().unwrap();
        let own = parent.path().join("own");
        make(&own).unwrap();
        make(&own).unwrap();
        assert_eq!(std::fs::metadata(&own).unwrap().mode() & 0o777, 0o700);
        let link = parent.path().join("link");
        symlink(&own, &link).unwrap();
        assert!(make(&link).is_err());
        std::fs::set_permissions(&own, PermissionsExt::from_mode(0o750)).unwrap();
        assert!(make(&own).is_err());
        let file = parent.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(make(&file).is_err());
        assert!(make(&parent.path().join("no/such")).is_err());
    }

    #[test]
    fn names_tell_the_process() {
        let name = name(77, "0123456789abcdef");
        assert_eq!(name, "ps-77-0123456789ab.sock");
        assert_eq!(pid_of(&name), Some(77));
        for wrong in [
            "ps-77.sock",
            "ps-x-1.sock",
            "77-1.sock",
            "ps-77-1.sock.lock",
        ] {
            assert_eq!(pid_of(wrong), None);
        }
    }
}
