//! Memory that is leased and not imported yet.

use std::panic::Location as Caller;

use super::lease::ClientLease;
use super::open;
use super::remote::RemoteBuffer;
use crate::driver::{HandleType, ShareableHandle};
use crate::ledger::Party;
use crate::share::{Description, ImportOptions, Origin};
use crate::{End, Error, Owner, PeerName, Result};

/// Memory that is leased and not imported yet; dropping it releases the lease.
#[derive(Debug)]
pub struct Leased {
    // In this order: the handles are closed before the lease is released.
    pub(super) handles: Vec<ShareableHandle>,
    pub(super) lease: ClientLease,
    pub(super) name: String,
    pub(super) description: Description,
    pub(super) via: HandleType,
    pub(super) probe: Option<u64>,
    pub(super) no_fabric: Option<String>,
    pub(super) owner: Owner,
    /// The program's call, for the ledger.
    pub(super) site: &'static Caller<'static>,
}

impl Leased {
    /// Returns the name's owner, as the server reports it.
    pub const fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Returns the exporter's description of the memory.
    pub const fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the handles, one for each part: secrets. Code that imports them without
    /// [`import`](Self::import) unmaps the memory before this is dropped.
    pub fn handles(&self) -> &[ShareableHandle] {
        &self.handles
    }

    /// Returns the type of the handles.
    pub const fn via(&self) -> HandleType {
        self.via
    }

    /// Ends the lease, and waits until the exporter has recorded it. Code that imported the handles has
    /// unmapped the memory before.
    ///
    /// # Errors
    /// Those of [`RemoteBuffer::release`].
    ///
    /// # Cancel safety
    /// If dropped before completion, the lease ends anyway.
    pub async fn release(self) -> Result<()> {
        let Self {
            handles,
            lease,
            name,
            ..
        } = self;
        drop(handles);
        lease.release().wait(&name).await
    }

    /// Imports the memory, maps and grants it.
    ///
    /// # Errors
    /// [`Error::Import`], which says at which end to look. The lease is released then.
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing stays leased or mapped.
    pub async fn import(self, options: ImportOptions) -> Result<RemoteBuffer> {
        let session = self.lease.keep.session().clone();
        let terms = session.terms();
        let options = match origin(&terms.server) {
            Some(origin) => options.origin(origin),
            None => options,
        };
        let work = move || {
            let Self {
                handles,
                lease,
                name,
                description,
                via,
                probe,
                no_fabric,
                owner,
                site,
            } = self;
            let server = Party {
                pid: terms.pid,
                name: terms.peer.clone(),
            };
            let options = options.sender(server).or_label(name.as_str());
            let options = options.or_called_at(site);
            // On every path the lease is dropped after the import.
            let imported = options.import(&session.driver, &description, handles);
            let imported = imported.map_err(|error| Error::Import {
                what: format!("'{name}'"),
                peer: terms.peer.clone(),
                end: End::of(&error, via),
                source: Box::new(error),
            })?;
            Ok(RemoteBuffer::new(
                imported, lease, name, probe, no_fabric, owner,
            ))
        };
        // The driver takes up to seconds for many gigabytes.
        open::elsewhere(work).await?
    }
}

/// Returns the origin under which imports of this server's memory are shared: only an authenticated one.
fn origin(server: &PeerName) -> Option<Origin> {
    match server {
        PeerName::Certificate(name) | PeerName::Spiffe(name) => {
            Some(Origin::Peer(name.to_string()))
        }
        PeerName::User(uid) => Some(Origin::User(*uid)),
        _ => None,
    }
}
