//! Stands for `etcd` in a build without it.

use crate::config::DirectoryConfig;
use crate::exchange::Server;
use crate::exchange::directory::Registration;
use crate::{Error, MemoryError, Result, ShareError};

/// Refuses every configuration of a directory.
pub(crate) fn check(_: &DirectoryConfig) -> Result<()> {
    Err(refusal())
}

/// Never called: [`check`] refuses first.
pub(crate) async fn register(_: &DirectoryConfig, _: &Server) -> Result<Registration> {
    Err(refusal())
}

fn refusal() -> Error {
    Error::Share(ShareError::Memory(MemoryError::PlatformUnsupported {
        what: "`directory`, because this program was built without the feature etcd",
        source: None,
    }))
}
