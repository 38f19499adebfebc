//! Files of certificates and keys.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::{Error, Result};

/// Writes a new file: one that is there already stays as it is. With `secret` its owner alone may
/// read it, else everybody; the umask may take away more.
///
/// # Errors
/// [`Error::System`] where the file exists or cannot be written; then none is left.
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
        // Half a key would stand in the way of the next attempt.
        let _ = std::fs::remove_file(path);
        failed(error)
    })
}
