//! IMEX channels: device nodes without which the driver refuses fabric handles.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Driver;
use crate::topology::add_once;

/// Where the NVIDIA kernel module lists the IMEX channels that this process may use.
pub const IMEX_CHANNELS: &str = "/dev/nvidia-caps-imex-channels";

/// Whether this process has an IMEX channel.
///
/// Source: NVIDIA IMEX service documentation; a channel is a character device `channelN`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum ImexChannel {
    /// A channel that can be opened for reading and writing.
    Accessible {
        /// Its device node.
        path: PathBuf,
    },
    /// Channels exist, but none can be opened.
    Denied {
        /// The first channel.
        path: PathBuf,
        /// The operating system's message.
        detail: String,
    },
    /// There is none.
    Absent {
        /// Where the first one would be.
        path: PathBuf,
    },
    /// The driver is simulated, and so is its channel.
    Simulated {
        /// Whether the simulated machine has one.
        present: bool,
    },
}

/// Returns the channels in a folder by number, and whether each can be opened for reading and writing.
pub fn imex_channels(folder: &Path) -> impl Iterator<Item = (PathBuf, io::Result<()>)> {
    let mut channels: Vec<(u32, PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("channel"));
        if let Some(number) = number.and_then(|number| number.parse().ok()) {
            add_once(&mut channels, (number, entry.path()));
        }
    }
    channels.into_iter().map(|(_, path)| {
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        (path, opened.map(drop))
    })
}

impl ImexChannel {
    /// Returns the channel for `driver`.
    pub fn of(driver: &Driver) -> Self {
        match driver.simulated_host() {
            Some(host) => Self::Simulated {
                present: host.imex_channel,
            },
            None => Self::find(),
        }
    }

    /// Finds this machine's channel.
    pub fn find() -> Self {
        Self::find_in(Path::new(IMEX_CHANNELS))
    }

    fn find_in(folder: &Path) -> Self {
        let mut denied = None;
        for (path, opened) in imex_channels(folder) {
            match opened {
                Ok(()) => return Self::Accessible { path },
                Err(error) => {
                    let detail = error.to_string();
                    denied.get_or_insert(Self::Denied { path, detail });
                }
            }
        }
        denied.unwrap_or_else(|| Self::Absent {
            path: folder.join("channel0"),
        })
    }

    /// Returns whether there is a usable channel.
    pub const fn usable(&self) -> bool {
        matches!(
            self,
            Self::Accessible { .. } | Self::Simulated { present: true }
        )
    }

    /// Returns the channel's device node, or the path where it would be.
    pub fn path(&self) -> PathBuf {
        match self {
            Self::Accessible { path } | Self::Denied { path, .. } | Self::Absent { path } => {
                path.clone()
            }
            Self::Simulated { .. } => Path::new(IMEX_CHANNELS).join("channel0"),
        }
    }
}

impl fmt::Display for ImexChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accessible { path } => write!(f, "{}", path.display()),
            Self::Denied { path, detail } => {
                write!(f, "{} cannot be opened: {detail}", path.display())
            }
            Self::Absent { path } => write!(f, "none ({} is not there)", path.display()),
            Self::Simulated { present: true } => f.write_str("present (simulated)"),
            Self::Simulated { present: false } => f.write_str("none (simulated)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_channel_of_least_number_that_opens_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let absent = ImexChannel::find_in(&folder.path().join("nothing"));
        assert_eq!(absent.path(), folder.path().join("nothing/channel0"));
        assert!(!absent.usable());

        fs::write(folder.path().join("other"), "").unwrap();
        assert!(matches!(
            ImexChannel::find_in(folder.path()),
            ImexChannel::Absent { .. }
        ));

        // A folder cannot be opened for writing, not even by root.
        fs::create_dir(folder.path().join("channel2")).unwrap();
        match ImexChannel::find_in(folder.path()) {
            ImexChannel::Denied { path, .. } => assert!(path.ends_with("channel2")),
            other => panic!("{other}"),
        }

        fs::write(folder.path().join("channel10"), "").unwrap();
        let found = ImexChannel::find_in(folder.path());
        assert!(found.usable());
        assert!(found.path().ends_with("channel10"));
    }
}
