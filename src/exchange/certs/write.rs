//! Writes files of certificates and keys.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::{Error, Result};

/// Writes a file beside the one at `path`, then renames it over that: a reader finds the old contents or the
/// new, never a part. With `secret` only its owner may read it.
///
/// # Errors
/// [`System`](crate::MemoryError::System) if it cannot be written or renamed; the old file is unchanged.
pub fn write_over(path: &Path, contents: &[u8], secret: bool) -> Result<()> {
    let what = || format!("writing {}", path.display());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let beside = path.with_file_name(format!(".{name}.{}.new", std::process::id()));
    write_new(&beside, contents, secret)?;
    std::fs::rename(&beside, path).map_err(|error| {
        let _ = std::fs::remove_file(&beside);
        Error::system(what(), &error)
    })?;
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    // Makes the rename durable.
    std::fs::File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(|error| Error::system(what(), &error))
}

/// Writes a new file; fails if one exists. With `secret` only its owner may read it, otherwise any user; the
/// umask may restrict it further.
///
/// # Errors
/// [`System`](crate::MemoryError::System) if the file exists or cannot be written; a partial file is removed.
pub fn write_new(path: &Path, contents: &[u8], secret: bool) -> Result<()> {
    let failed =
        |error: std::io::Error| Error::system(format!("writing {}", path.display()), &error);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(if secret { 0o600 } else { 0o644 })
        .open(path)
        .map_err(failed)?;
    let written = file.write_all(contents).and_then(|()| file.sync_all());
    written.map_err(|error| {
        // A partial key would block the next attempt.
        let _ = std::fs::remove_file(path);
        failed(error)
    })
}
