//! The files of an authority and of its certificates.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use egmem::certs::{Authority, write_new};
use egmem::exchange::{Error, Result};
use zeroize::Zeroizing;

/// The authority's files.
pub(super) const CA: &str = "ca";

/// Loads the authority in a folder.
pub(super) fn authority(folder: &Path) -> Result<Authority> {
    let (cert, key) = (folder.join("ca.pem"), folder.join("ca.key"));
    if !cert.exists() {
        return Err(Error::invalid_of(
            "--ca",
            format!("there is no ca.pem in '{}'", folder.display()),
            "the folder that `egmem certs init --out` wrote ca.pem and ca.key to",
        ));
    }
    Authority::load(&read(&cert)?, &read_key(&key)?)
}

/// Reads a private key, which is wiped when dropped.
pub(super) fn read_key(path: &Path) -> Result<Zeroizing<String>> {
    read(path).map(Zeroizing::new)
}

/// Reads a file.
pub(super) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path)
        .map_err(|error| Error::system(format!("cannot read {}", path.display()), &error))
}

/// The paths of a certificate and its key; neither file exists yet.
pub(super) struct Pair {
    pub(super) cert: PathBuf,
    pub(super) key: PathBuf,
}

impl Pair {
    /// Returns the paths of a new pair in a folder, which it creates.
    pub(super) fn new(folder: &Path, stem: &str) -> Result<Self> {
        let pair = Self {
            cert: folder.join(format!("{stem}.pem")),
            key: folder.join(format!("{stem}.key")),
        };
        for path in [&pair.cert, &pair.key] {
            if path.symlink_metadata().is_ok() {
                let why = format!("{} is there already and is not overwritten", path.display());
                return Err(Error::invalid("output", why));
            }
        }
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|error| Error::system(format!("cannot make {}", folder.display()), &error))?;
        Ok(pair)
    }

    /// Writes both, or neither.
    pub(super) fn write(&self, cert: &str, key: &str) -> Result<()> {
        write_new(&self.key, key.as_bytes(), true)?;
        write_new(&self.cert, cert.as_bytes(), false).inspect_err(|_| {
            let _ = fs::remove_file(&self.key);
        })
    }
}
