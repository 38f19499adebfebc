//! Which peers a rank accepts as the other ranks.

use std::fmt;
use std::path::Path;

use zeroize::Zeroizing;

use super::identity::LEAST_SECRET;
use crate::protocol::{self, MAX_SECRET, Secret};
use crate::{Error, Result, Who};

/// Which peers may be the ranks of a group. All ranks state the same.
///
/// The group's server keeps ranks with different admissions apart: each waits in a group of its own
/// until its deadline and is told that the other ranks are missing
/// ([`Error::RanksMissing`](super::Error::RanksMissing)). It learns nothing about the other group.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Admission {
    /// All ranks are the same peer as this one: the same user of one machine, or processes with the
    /// same certificate. Over plain TCP the server refuses it, because every process of the machine
    /// is the peer `local` there; ranks on the server's machine change to its Unix socket first.
    SamePeer,
    /// Every rank's peer name, as the server has verified it, matches this list. It must match this
    /// process's own name too, which on the server's machine is `uid:…`. `*` is refused.
    Peers(Who),
    /// All ranks know the same secret, for example from the launcher.
    Secret(GroupSecret),
}

impl Admission {
    pub(super) fn message(&self) -> protocol::Admission {
        match self {
            Self::SamePeer => protocol::Admission::SamePeer,
            Self::Peers(who) => protocol::Admission::Peers(who.patterns().clone()),
            Self::Secret(secret) => protocol::Admission::Secret(secret.0.clone()),
        }
    }
}

/// A secret that the ranks of a group share: 16 to 64 bytes that nobody else can guess.
///
/// A launcher makes one for each job, for example with `openssl rand -hex 32`, and passes it to all
/// ranks in an environment variable or a file. It is compared in constant time, wiped when dropped,
/// and never shown.
///
/// ```
/// use egmem::exchange::group::{Admission, GroupSecret};
///
/// let secret = GroupSecret::new(b"0123456789abcdef0123456789abcdef")?;
/// assert_eq!(format!("{secret:?}"), "GroupSecret(redacted)");
/// let admission = Admission::Secret(secret);
/// assert!(GroupSecret::new(b"too short").is_err());
/// # Ok::<(), egmem::exchange::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct GroupSecret(Secret);

impl GroupSecret {
    /// Creates a secret from these 16 to 64 bytes. They should hold at least 128 random bits.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for any other length.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self> {
        let bytes = bytes.as_ref();
        let secret = Secret::new(bytes).filter(|_| bytes.len() >= LEAST_SECRET);
        secret.map(Self).ok_or_else(|| {
            let count = bytes.len();
            let why = format!("it has {count} bytes, not {LEAST_SECRET} to {MAX_SECRET}");
            Error::invalid("group secret", why)
        })
    }

    /// Reads the secret from an environment variable, without a line break at the end.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) if the variable is not set, or as for
    /// [`new`](Self::new).
    pub fn from_env(variable: &str) -> Result<Self> {
        use std::os::unix::ffi::OsStringExt;
        let Some(value) = std::env::var_os(variable) else {
            let why = format!("the environment variable {variable} is not set");
            return Err(Error::invalid("group secret", why));
        };
        let value = Zeroizing::new(value.into_vec());
        Self::new(without_line_break(&value))
    }

    /// Reads the secret from a file, without a line break at the end.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) if the file cannot be read;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) as for [`new`](Self::new).
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let value = std::fs::read(path).map(Zeroizing::new);
        let value = value
            .map_err(|error| Error::system(format!("cannot read {}", path.display()), &error))?;
        Self::new(without_line_break(&value))
    }
}

fn without_line_break(bytes: &[u8]) -> &[u8] {
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    bytes.strip_suffix(b"\r").unwrap_or(bytes)
}

impl fmt::Debug for GroupSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupSecret(redacted)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryError, ShareError};

    #[test]
    fn secrets_are_long_enough_and_not_shown() {
        for len in [0, 15, 65] {
            assert!(GroupSecret::new(vec![b'x'; len]).is_err(), "{len}");
        }
        for len in [16, 64] {
            let admission = Admission::Secret(GroupSecret::new(vec![b'x'; len]).unwrap());
            let message = admission.message();
            assert!(!format!("{admission:?} {message:?}").contains("120"));
            assert!(!format!("{admission:?} {message:?}").contains('x'));
        }
    }

    #[test]
    fn secrets_come_from_files_and_the_environment() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let expected = GroupSecret::new(b"0123456789abcdef").unwrap();
        for text in [
            "0123456789abcdef",
            "0123456789abcdef\n",
            "0123456789abcdef\r\n",
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(GroupSecret::from_file(&path).unwrap(), expected);
        }
        let error = GroupSecret::from_file(folder.path().join("none")).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Share(ShareError::Memory(MemoryError::System { .. }))
            ),
            "{error}"
        );
        let error = GroupSecret::from_env("EGMEM_TEST_NO_SUCH_SECRET").unwrap_err();
        assert!(error.to_string().contains("EGMEM_TEST_NO_SUCH_SECRET"));
        let path = GroupSecret::from_env("PATH");
        assert_eq!(
            path.is_ok(),
            (16..=64).contains(&std::env::var_os("PATH").unwrap().len())
        );
    }
}
