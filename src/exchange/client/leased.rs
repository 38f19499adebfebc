//! Memory that is leased and not imported yet.

use super::lease::Grant;
use super::open;
use super::probe::Proof;
use super::remote::RemoteBuffer;
use crate::driver::{HandleType, ShareableHandle};
use crate::ledger::{Party, Site};
use crate::share::{Description, ImportOptions, Origin, PartHandles};
use crate::{End, Error, Owner, PeerName, Result};

/// Memory that is leased and not imported yet; dropping it releases the lease.
#[derive(Debug)]
pub struct Leased {
    // In this order: the handles are closed before the lease is released.
    pub(super) handles: PartHandles,
    pub(super) grant: Grant,
    pub(super) description: Description,
    pub(super) via: HandleType,
    /// The program's call, for the ledger.
    pub(super) site: Site,
}

impl Leased {
    /// Returns the name's owner, as the server reports it.
    pub const fn owner(&self) -> &Owner {
        &self.grant.owner
    }

    /// Returns the exporter's description of the memory.
    pub const fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the handles, one for each part: secrets. Code that imports them without
    /// [`import`](Self::import) unmaps the memory before this is dropped.
    pub fn handles(&self) -> &[ShareableHandle] {
        self.handles.here()
    }

    /// Returns the type of the handles.
    pub const fn via(&self) -> HandleType {
        self.via
    }

    /// Receives the fds that come through a queue, so that all are here.
    pub(super) async fn receive(mut self) -> Result<Self> {
        let handles = std::mem::replace(&mut self.handles, Vec::new().into());
        let count = self.description.parts.len();
        let handles = open::attempt("receiving handles", move || handles.all(count)).await?;
        self.handles = handles?.into();
        Ok(self)
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
        drop(self.handles);
        self.grant.lease.release(self.grant.name).await
    }

    /// Imports the memory, maps and grants it.
    ///
    /// # Errors
    /// [`Error::Import`], which says at which end to look. The lease is released then.
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing stays leased or mapped.
    pub async fn import(self, options: ImportOptions) -> Result<RemoteBuffer> {
        let session = self.grant.lease.keep.session().clone();
        let terms = session.terms();
        let options = match origin(&terms.server) {
            Some(origin) => options.origin(origin),
            None => options,
        };
        let work = move || {
            let Self {
                handles,
                grant,
                description,
                via,
                site,
            } = self;
            let server = Party {
                pid: terms.pid,
                name: terms.peer.clone(),
            };
            let options = options.sender(server).or_label(grant.name.as_str());
            let options = options.or_called_at(site);
            // On every path the lease is dropped after the import.
            let imported = options.import_from(&session.driver, &description, handles);
            let memory = imported.map_err(|error| Error::Import {
                what: format!("'{}'", grant.name),
                peer: terms.peer.clone(),
                end: End::of(&error, via, terms.welcome.boot == session.dial.boot),
                source: Box::new(error),
            })?;
            let proof = Proof::none(match via {
                HandleType::PosixFd => "a POSIX fd names memory of this machine",
                HandleType::Fabric => "no probe was asked for",
            });
            Ok(RemoteBuffer {
                memory,
                grant,
                proof,
            })
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
