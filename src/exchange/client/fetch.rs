//! Fetches memory: a lease, its handles, and the import.

use std::future::{Future, IntoFuture};
use std::pin::Pin;

use super::buffer::{Leased, RemoteBuffer};
use super::lease::Grant;
use super::session::Answered;
use super::{Client, open, probe};
use crate::driver::{Access, HandleType, Location};
use crate::ledger::Site;
use crate::protocol::{Answer, Ask, Fetch, Granted, Handles};
use crate::share::{Description, ImportOptions, InstanceId};
use crate::{Error, MemoryError, Mismatch, Owner, Refusal, Result};

/// Options for fetching a name; [`go`](Self::go), or awaiting this, does it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `go`"]
pub struct FetchOptions {
    pub(super) client: Client,
    pub(super) name: String,
    import: ImportOptions,
    /// `None`: as much as the exporter allows.
    access: Option<Access>,
    via: Option<HandleType>,
    probe: bool,
    instance: Option<InstanceId>,
    owner: Option<Owner>,
    /// The program's call, for the ledger.
    site: Site,
}

impl FetchOptions {
    /// Sets which GPUs may use the memory, besides the host. The default is every GPU that can reach it.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        self.import = self.import.access_by(who);
        self
    }

    /// Sets the access of one location; [`Location::Host`] stands for the CPU.
    pub fn access(mut self, who: impl Into<Location>, access: Access) -> Self {
        self.import = self.import.access(who, access);
        self
    }

    /// Asks for read access only, for all locations of this process.
    pub const fn read_only(mut self) -> Self {
        self.access = Some(Access::Read);
        self
    }

    /// Fails if the exporter does not allow writing. Without this and [`read_only`](Self::read_only), the
    /// fetch takes the access that the exporter allows.
    pub const fn read_write(mut self) -> Self {
        self.access = Some(Access::ReadWrite);
        self
    }

    /// Sets the type of handle to import. By default: a POSIX fd from the same machine if that works,
    /// otherwise a fabric handle.
    pub const fn via(mut self, handle_type: HandleType) -> Self {
        self.via = Some(handle_type);
        self
    }

    /// Sets whether the two ends prove that they see the same bytes of memory that comes by fabric handle, if the
    /// exporter has room for an unused word; by default they do. The first GPU that may read the memory takes part,
    /// otherwise the CPU. Memory of whole 2 MiB has room only if its owner allocated it with
    /// [`room_for_probes`](egmem_core::BufferOptions::room_for_probes), or as `egmem serve` does. A window on larger
    /// memory, such as a heap's block, has none. A POSIX fd names memory of this machine, and is not probed. See
    /// [`RemoteBuffer::proved`].
    pub const fn probe(mut self, on: bool) -> Self {
        self.probe = on;
        self
    }

    /// Refuses memory of another instance of the server.
    pub const fn instance(mut self, instance: InstanceId) -> Self {
        self.instance = Some(instance);
        self
    }

    /// Refuses memory of another owner. The server checks it before it grants a lease, and this client checks
    /// the grant before it imports anything. This overrides the client's
    /// [`expect_owner`](super::ClientOptions::expect_owner). Without either, memory of any owner is accepted:
    /// a peer that created the name first may then read and write the bytes that this process stores there.
    pub fn expect_owner(mut self, owner: impl Into<Owner>) -> Self {
        self.owner = Some(owner.into());
        self
    }

    /// Takes a lease, imports the memory, maps and grants it, and proves it.
    ///
    /// If one type of handle does not work, it tries the other, if both ends support that and none was
    /// [requested](Self::via).
    ///
    /// # Errors
    /// [`Error::Refused`] by the server: `not_found`, `forbidden`, `no_common_handle`, `closing` …;
    /// [`Error::Mismatched`] for an [unexpected](Self::expect_owner) owner; [`Error::Import`] if the driver
    /// cannot import it; [`Error::DataPlane`] if the two ends do not see the same bytes;
    /// [`PeerLost`](crate::ShareError::PeerLost), [`TimedOut`](crate::ShareError::TimedOut),
    /// [`Protocol`](crate::ShareError::Protocol). Nothing stays leased or mapped then.
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing stays leased or mapped; a driver call in progress is undone when
    /// it returns.
    pub async fn go(self) -> Result<RemoteBuffer> {
        // Before a lease is taken.
        self.client.session().driver()?;
        let mut accept = self.accept()?;
        let mut failed = None;
        loop {
            let (via, error) = match self.attempt(&accept, failed.as_ref()).await {
                Ok(remote) if self.probe && remote.via() == HandleType::Fabric => {
                    return probe::prove(remote).await;
                }
                Ok(remote) => return Ok(remote),
                Err(failure) => failure,
            };
            accept.retain(|&other| Some(other) != via);
            // The first failure says more than that the other type does not work either.
            let Some(via) = via.filter(|_| !accept.is_empty()) else {
                return Err(failed.unwrap_or(error));
            };
            tracing::debug!(name = self.name, %via, %error, "trying the other handle type");
            failed.get_or_insert(error);
        }
    }

    /// Tries one type; the error contains the type of handle that failed, if any.
    async fn attempt(
        &self,
        accept: &[HandleType],
        failed: Option<&Error>,
    ) -> Result<RemoteBuffer, (Option<HandleType>, Error)> {
        let mut leased = self.lease_by(accept).await?;
        let via = leased.via;
        if let (Some(error), HandleType::PosixFd) = (failed, via) {
            leased.grant.no_fabric = Some(error.to_string());
        }
        let imported = leased.import(self.import.clone()).await;
        imported.map_err(|error| (Some(via), error))
    }

    /// Takes a lease and the handles, and leaves the import to the caller.
    ///
    /// # Errors
    /// As [`go`](Self::go), without those of the import.
    ///
    /// # Cancel safety
    /// As [`go`](Self::go).
    pub async fn lease(self) -> Result<Leased> {
        let mut accept = self.accept()?;
        loop {
            match self.lease_by(&accept).await {
                Ok(leased) => return leased.receive().await,
                Err((Some(via), _)) if accept.len() > 1 => accept.retain(|&other| other != via),
                Err((_, error)) => return Err(error),
            }
        }
    }

    /// Returns the types that this end can import, most wanted first.
    fn accept(&self) -> Result<Vec<HandleType>> {
        let session = self.client.0.session();
        let terms = session.terms();
        let same_machine = terms.welcome.boot == session.dial.boot;
        let can = |via| match via {
            HandleType::PosixFd => terms.unix,
            HandleType::Fabric => session.dial.no_fabric.is_none(),
        };
        let wanted = match &self.via {
            Some(via) => std::slice::from_ref(via),
            None => &[HandleType::PosixFd, HandleType::Fabric],
        };
        let accept: Vec<_> = wanted.iter().copied().filter(|&via| can(via)).collect();
        if !accept.is_empty() {
            return Ok(accept);
        }
        let mut reasons = Vec::new();
        if wanted.contains(&HandleType::PosixFd) {
            reasons.push(match same_machine {
                true => format!(
                    "{} is on this machine, but only TCP leads to it: {}",
                    terms.peer,
                    terms.no_unix.as_deref().unwrap_or("it has no Unix socket")
                ),
                false => format!("POSIX fds do not leave the machine of {}", terms.peer),
            });
        }
        let no_fabric = session.dial.no_fabric.as_ref();
        let no_fabric = no_fabric.filter(|_| wanted.contains(&HandleType::Fabric));
        reasons.extend(no_fabric.map(|why| format!("here: {why}")));
        Err(Error::NoCommonHandle { reasons })
    }

    /// Asks for a lease, read-only if the name allows no more and the caller asked for no access. Returns the access
    /// that was asked for, too.
    async fn ask(&self, accept: &[HandleType]) -> Result<(Answered, Access)> {
        let mut access = self.access.unwrap_or(Access::ReadWrite);
        loop {
            let ask = Ask::Fetch(Fetch {
                name: self.name.clone(),
                accept: accept.to_vec(),
                access,
                probe: self.probe && accept.contains(&HandleType::Fabric),
                instance: self.instance,
                owner: self.owner.clone(),
            });
            let may_read = self.access.is_none() && access == Access::ReadWrite;
            match self
                .client
                .exchange(ask, Vec::new(), self.client.patience())
                .await
            {
                Ok(answered) => return Ok((answered, access)),
                Err(error) if may_read && error.refusal() == Some(&Refusal::ReadOnly) => {
                    access = Access::Read;
                }
                Err(error) => return Err(self.mismatched(error)),
            }
        }
    }

    async fn lease_by(&self, accept: &[HandleType]) -> Result<Leased, (Option<HandleType>, Error)> {
        let session = self.client.0.session();
        let asked = self.ask(accept).await;
        let (answered, access) = asked.map_err(|error| (None, error))?;
        let (Answer::Granted(granted), Some(lease)) = (answered.answer, answered.lease) else {
            return Err((None, self.client.broken("unexpected answer, not a grant")));
        };
        // From here on the lease is released on every path.
        let Granted {
            mut memory,
            handles,
            probe,
            no_fabric,
            owner,
            ..
        } = granted;
        if let Some(expected) = self.owner.as_ref().filter(|expected| **expected != owner) {
            let found = owner.to_string();
            return Err((None, self.wrong_owner(expected, found)));
        }
        check(&memory, probe).map_err(|why| (None, self.client.broken(&why)))?;
        memory.access = memory.access.min(access);
        let via = type_of(&handles);
        if !accept.contains(&via) {
            let why = "handles of a type that is not accepted";
            return Err((None, self.client.broken(why)));
        }
        let handles = open::opened(&handles, answered.fds, memory.parts.len())
            .ok_or_else(|| (None, self.client.broken("not one handle for each part")))?;
        let no_fabric = match via {
            HandleType::Fabric => None,
            HandleType::PosixFd => no_fabric
                .map(|why| super::text::tidy(&why))
                .or_else(|| session.dial.no_fabric.as_ref().map(MemoryError::to_string)),
        };
        let grant = Grant {
            lease,
            name: self.name.clone(),
            probe,
            no_fabric,
            owner,
        };
        Ok(Leased {
            handles,
            grant,
            description: memory,
            via,
            site: self.site.clone(),
        })
    }

    fn wrong_owner(&self, expected: &Owner, found: String) -> Error {
        let expected = expected.to_string();
        Error::Mismatched {
            name: self.name.clone(),
            peer: self.client.peer(),
            what: Box::new(Mismatch::Owner { expected, found }),
        }
    }

    /// Converts the server's refusal for another owner to this client's own error.
    fn mismatched(&self, error: Error) -> Error {
        match (error, &self.owner) {
            (
                Error::Refused {
                    reason: Refusal::WrongOwner,
                    detail,
                    ..
                },
                Some(expected),
            ) => self.wrong_owner(expected, detail),
            (error, _) => error,
        }
    }
}

impl Client {
    /// Returns options for fetching a name: [`go`](FetchOptions::go) imports its memory.
    #[track_caller]
    pub fn fetch(&self, name: impl Into<String>) -> FetchOptions {
        FetchOptions {
            client: self.clone(),
            name: name.into(),
            import: ImportOptions::new(),
            access: None,
            via: None,
            probe: true,
            instance: None,
            owner: self.0.session().dial.options.owner.clone(),
            site: Site::here(),
        }
    }
}

impl IntoFuture for FetchOptions {
    type Output = Result<RemoteBuffer>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.go())
    }
}

const fn type_of(handles: &Handles) -> HandleType {
    match handles {
        Handles::Fabric(_) => HandleType::Fabric,
        Handles::Fds(_) => HandleType::PosixFd,
    }
}

/// Checks an exporter's description of its memory.
fn check(memory: &Description, probe: Option<u64>) -> Result<(), String> {
    memory.check().map_err(|error| error.to_string())?;
    match probe {
        // The bytes around a window belong to other memory, and those in it to the user.
        Some(_) if memory.is_window() => Err("a place for a probe of a window".into()),
        Some(at) if !at.is_multiple_of(8) || at < memory.len || at > memory.padded() - 8 => {
            let (len, padded) = (memory.len, memory.padded());
            Err(format!(
                "a place for a probe at {at}, not between {len} and {padded} bytes"
            ))
        }
        _ => Ok(()),
    }
}
