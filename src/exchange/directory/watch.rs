//! Watches names in a directory.

use std::fmt;

use tokio::sync::mpsc;

use super::exporter::Exporter;
use crate::Error;
use crate::share::InstanceId;

/// An event of a directory.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum DirectoryEvent {
    /// An exporter holds a name.
    Found {
        /// The name.
        name: String,
        /// The exporter.
        exporter: Exporter,
    },
    /// An exporter no longer holds a name, or is dead.
    Gone {
        /// The name.
        name: String,
        /// The exporter's instance.
        instance: InstanceId,
    },
    /// All names that existed when the watch began, or when the directory came back, have been reported.
    Current,
    /// The directory is away: earlier events may be out of date. When it is back, the changes made meanwhile
    /// are reported.
    Away(Error),
}

/// Events about names, in order and complete; from [`Directory::watch`](super::Directory::watch).
pub struct DirectoryWatch {
    pub(super) events: mpsc::Receiver<DirectoryEvent>,
}

impl DirectoryWatch {
    /// Waits for the next event; `None` if there will be no more, because the runtime is ending.
    ///
    /// # Cancel safety
    /// No event is lost.
    pub async fn recv(&mut self) -> Option<DirectoryEvent> {
        self.events.recv().await
    }
}

impl fmt::Debug for DirectoryWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectoryWatch").finish_non_exhaustive()
    }
}
