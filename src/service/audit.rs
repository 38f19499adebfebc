//! Writes the audit log to a file: JSON, one event per line.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::Dispatch;

use super::LineWriter;
use crate::{Error, Result};

/// How long the end of the service waits for a slow disk.
const LAST: Duration = Duration::from_secs(1);

/// The file and its queue. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct AuditFile {
    path: PathBuf,
    lines: LineWriter,
}

impl AuditFile {
    /// Opens the file to append to it; creates it with mode 0600.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) that names the file: if it cannot be opened, or is not a regular
    /// file of this process's user.
    pub fn open(path: &Path) -> Result<Self> {
        let lines = LineWriter::with_lost_line("audit log", file(path)?, |count| {
            format!("{{\"event\":\"lost\",\"count\":{count}}}\n")
        })?;
        Ok(Self {
            path: path.to_owned(),
            lines,
        })
    }

    /// Reopens the file at the path, after it was moved away.
    ///
    /// # Errors
    /// Those of [`open`](Self::open): events then still go to the old file.
    pub fn reopen(&self) -> Result<()> {
        self.lines.reopen(file(&self.path)?);
        Ok(())
    }

    /// Returns the subscriber for a server's events.
    pub fn subscriber(&self) -> Dispatch {
        let lines = self.lines.clone();
        let format = tracing_subscriber::fmt().json().flatten_event(true);
        let format = format.with_level(false).with_target(false);
        format.with_writer(move || lines.clone()).finish().into()
    }

    /// Returns the number of lines lost since the start.
    pub fn dropped(&self) -> u64 {
        self.lines.dropped()
    }

    /// Waits until queued lines are written, for at most a second.
    pub fn flush(&self) {
        if !self.lines.flush_within(LAST) {
            tracing::warn!(path = %self.path.display(), "not all of the audit log is written");
        }
    }
}

fn file(path: &Path) -> Result<File> {
    let failed = |error| Error::system(format!("audit log {}", path.display()), &error);
    let flags =
        rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::CLOEXEC | rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(flags.bits() as i32)
        .open(path)
        .map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    let own = rustix::process::geteuid().as_raw();
    if !found.is_file() || found.uid() != own {
        let why = format!("it is not a regular file of uid {own}; name another file");
        return Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, why)));
    }
    file.set_permissions(Permissions::from_mode(0o600))
        .map_err(failed)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(audit: &AuditFile, peer: &str) {
        tracing::dispatcher::with_default(&audit.subscriber(), || {
            tracing::info!(event = "granted", peer, lease = 7);
        });
        audit.flush();
    }

    #[test]
    fn events_are_appended_as_json_and_go_on_in_a_new_file_after_a_rotation() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.jsonl");
        let audit = AuditFile::open(&path).unwrap();
        write(&audit, "a\n\u{1b}");
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o600);
        let moved = folder.path().join("audit.jsonl.1");
        std::fs::rename(&path, &moved).unwrap();
        audit.reopen().unwrap();
        write(&audit, "b");
        for (file, peer) in [(&moved, "a\n\u{1b}"), (&path, "b")] {
            let text = std::fs::read_to_string(file).unwrap();
            assert_eq!(text.lines().count(), 1, "{text}");
            assert!(!text.trim_end().contains(crate::text::is_unsafe), "{text}");
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(value["peer"], peer);
            assert_eq!(value["lease"], 7);
            let time = value["timestamp"].as_str().unwrap();
            assert!(time.starts_with("20") && time.ends_with('Z'), "{time}");
        }
        assert_eq!(audit.dropped(), 0);
    }

    #[test]
    fn a_link_or_a_folder_is_no_audit_log() {
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        std::fs::write(&precious, "").unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        for wrong in [link.as_path(), folder.path()] {
            let error = AuditFile::open(wrong).unwrap_err().to_string();
            assert!(error.contains("audit log"), "{error}");
        }
    }
}
