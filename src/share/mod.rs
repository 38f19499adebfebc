//! Memory shared with other processes of the same machine: as POSIX fds over Unix sockets.
//!
//! For other nodes, and for finding memory by name, see the feature `exchange`.

mod description;
mod identity;

pub use description::{Description, MAX_PARTS, Part};
pub use identity::{BootId, Identity, InstanceId};
