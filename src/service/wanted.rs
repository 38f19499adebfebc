//! A request for memory under a name.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::reuse_policy::Past;
use crate::driver::{Access, NodeId};
use crate::exchange::{PeerList, PeerName};
use crate::{Error, Refusal};

/// Tells a creation in progress that its client no longer waits for it.
#[derive(Debug, Default)]
pub(super) struct Abandoned(Arc<AtomicBool>);

impl Abandoned {
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Memory to be published under a name.
pub(super) struct Wanted<'a> {
    pub name: &'a str,
    pub bytes: u64,
    pub node: NodeId,
    pub owner: Option<&'a PeerName>,
    pub who: PeerList,
    /// Whether peers other than the owner may fetch it.
    pub open: bool,
    pub access: Access,
    pub probe: bool,
}

impl Wanted<'_> {
    /// Returns the refusal of the request.
    pub fn refused(&self, reason: Refusal, detail: &str) -> Error {
        Error::Refused {
            peer: "the service".into(),
            what: format!("to create {}", self.name),
            reason,
            detail: detail.into(),
        }
    }

    /// Updates the histories of memory that is published now.
    pub fn shown(&self, mut pasts: Vec<Past<PeerName>>) -> Vec<Past<PeerName>> {
        for past in &mut pasts {
            match self.owner {
                // Any process on the machine is `local`.
                Some(owner) => past.shown(owner, *owner != PeerName::Local),
                None => past.open_to_others(),
            }
            if self.open {
                past.open_to_others();
            }
        }
        pasts
    }
}
