//! Fetches memory: a lease and its handles, the import, and the proof that both ends see the same bytes.

use std::future::{Future, IntoFuture};
use std::os::fd::OwnedFd;
use std::pin::Pin;

use super::Client;
use super::buffer::{Grant, Leased, RemoteBuffer, prove};
use super::session::Reply;
use crate::driver::{Access, FabricHandle, HandleType, Location, ShareableHandle};
use crate::ledger::Site;
use crate::protocol::{Answer, Ask, Fetch, Handles, Secret};
use crate::share::{Description, ImportOptions, InstanceId, PartHandles};
use crate::{Error, MemoryError, Mismatch, Owner, Refusal, Result};

/// Options for fetching a name; [`go`](Self::go), or awaiting this, does it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `go`"]
pub struct FetchOptions {
    pub(super) client: Client,
    /// The request, without the handle types.
    pub(super) ask: Fetch,
    import: ImportOptions,
    via: Option<HandleType>,
    /// The program's call, for the ledger.
    site: Site,
}

impl FetchOptions {
    /// Sets which GPUs may use the memory, besides the host. The default is every GPU that can reach it.
    pub fn access_by<L: Into<Location>>(mut self, locations: impl IntoIterator<Item = L>) -> Self {
        self.import = self.import.access_by(locations);
        self
    }

    /// Sets the access of one location; [`Location::Host`] stands for the CPU.
    pub fn access(mut self, location: impl Into<Location>, access: Access) -> Self {
        self.import = self.import.access(location, access);
        self
    }

    /// Asks for read access only, for all locations of this process.
    pub const fn read_only(mut self) -> Self {
        self.ask.access = Some(Access::Read);
        self
    }

    /// Fails if the exporter does not allow writing. Without this and [`read_only`](Self::read_only), the
    /// fetch takes the access that the exporter allows.
    pub const fn read_write(mut self) -> Self {
        self.ask.access = Some(Access::ReadWrite);
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
    pub const fn probe(mut self, probe: bool) -> Self {
        self.ask.probe = probe;
        self
    }

    /// Refuses memory of another instance of the server.
    pub const fn instance(mut self, instance: InstanceId) -> Self {
        self.ask.instance = Some(instance);
        self
    }

    /// Refuses memory of another owner. The server checks it before it grants a lease, and this client checks
    /// the grant before it imports anything. This overrides the client's
    /// [`expect_owner`](super::ClientOptions::expect_owner). Without either, memory of any owner is accepted:
    /// a peer that created the name first may then read and write the bytes that this process stores there.
    pub fn expect_owner(mut self, owner: impl Into<Owner>) -> Self {
        self.ask.owner = Some(owner.into());
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
        let mut failed: Option<Error> = None;
        loop {
            // The first failure says more than that the other type does not work either.
            let mut leased = match self.ask(&accept).await {
                Ok(leased) => leased,
                Err(error) => return Err(failed.unwrap_or(error)),
            };
            let via = leased.via;
            if let (Some(error), HandleType::PosixFd) = (&failed, via) {
                leased.grant.no_fabric = Some(error.to_string());
            }
            let error = match leased.import(self.import.clone()).await {
                Ok(remote) if self.ask.probe && via == HandleType::Fabric => {
                    return prove(remote).await;
                }
                Ok(remote) => return Ok(remote),
                Err(error) => error,
            };
            accept.retain(|&other| other != via);
            if accept.is_empty() {
                return Err(failed.unwrap_or(error));
            }
            tracing::debug!(name = self.ask.name, %via, %error, "trying the other handle type");
            failed.get_or_insert(error);
        }
    }

    /// Takes a lease and the handles, and leaves the import to the caller.
    ///
    /// # Errors
    /// As [`go`](Self::go), without those of the import.
    ///
    /// # Cancel safety
    /// As [`go`](Self::go).
    pub async fn lease(self) -> Result<Leased> {
        self.ask(&self.accept()?).await?.receive().await
    }

    /// Returns the types that this end can import, most wanted first.
    fn accept(&self) -> Result<Vec<HandleType>> {
        let session = self.client.session();
        let terms = session.terms();
        let peer = &terms.peer;
        let no_fd = if terms.unix {
            None
        } else if terms.welcome.boot == session.dial.boot {
            let why = terms.no_unix.as_deref().unwrap_or("it has no Unix socket");
            Some(format!(
                "{peer} is on this machine, but only TCP leads to it: {why}"
            ))
        } else {
            Some(format!("POSIX fds do not leave the machine of {peer}"))
        };
        let no_fabric = (session.dial.no_fabric.as_ref()).map(|why| format!("here: {why}"));
        let (mut accept, mut reasons) = (Vec::new(), Vec::new());
        for (via, why) in [
            (HandleType::PosixFd, no_fd),
            (HandleType::Fabric, no_fabric),
        ] {
            if self.via.is_none_or(|only| only == via) {
                match why {
                    None => accept.push(via),
                    Some(why) => reasons.push(why),
                }
            }
        }
        if accept.is_empty() {
            return Err(Error::NoCommonHandle { reasons });
        }
        Ok(accept)
    }

    /// Asks for a lease, and checks the grant.
    async fn ask(&self, accept: &[HandleType]) -> Result<Leased> {
        let session = self.client.session();
        let ask = Ask::Fetch(Fetch {
            accept: accept.to_vec(),
            probe: self.ask.probe && accept.contains(&HandleType::Fabric),
            ..self.ask.clone()
        });
        let asked = session.request(ask, session.timeout()).await;
        let reply = match (asked, &self.ask.owner) {
            (
                Err(Error::Refused {
                    reason: Refusal::WrongOwner,
                    detail,
                    ..
                }),
                Some(expected),
            ) => return Err(self.wrong_owner(expected, detail)),
            (asked, _) => asked?,
        };
        self.checked(reply, accept)
    }

    /// Checks a grant. On every path the lease is released, unless the caller keeps it.
    fn checked(&self, reply: Reply, accept: &[HandleType]) -> Result<Leased> {
        let broken = |why: &str| self.client.broken(why);
        let (Answer::Granted(granted), Some(lease)) = (reply.answer, reply.lease) else {
            return Err(broken("unexpected answer, not a grant"));
        };
        let owner = granted.owner;
        let expected = self.ask.owner.as_ref();
        if let Some(expected) = expected.filter(|expected| **expected != owner) {
            return Err(self.wrong_owner(expected, owner.to_string()));
        }
        let mut memory = granted.memory;
        check(&memory, granted.probe).map_err(|why| broken(&why))?;
        memory.access = self
            .ask
            .access
            .map_or(memory.access, |most| most.min(memory.access));
        let via = match &granted.handles {
            Handles::Fabric(_) => HandleType::Fabric,
            Handles::Fds(_) | Handles::Queue => HandleType::PosixFd,
        };
        if !accept.contains(&via) {
            return Err(broken("handles of a type that is not accepted"));
        }
        let handles = open(&granted.handles, reply.fds, memory.parts.len());
        let handles = handles.ok_or_else(|| broken("not one handle for each part"))?;
        let here = self.client.session().dial.no_fabric.as_ref();
        let no_fabric = granted
            .no_fabric
            .or_else(|| here.map(MemoryError::to_string));
        Ok(Leased {
            handles,
            grant: Grant {
                lease,
                name: self.ask.name.clone(),
                probe: granted.probe,
                no_fabric: no_fabric.filter(|_| via == HandleType::PosixFd),
                owner,
            },
            description: memory,
            via,
            site: self.site.clone(),
        })
    }

    fn wrong_owner(&self, expected: &Owner, found: String) -> Error {
        let expected = expected.to_string();
        Error::Mismatched {
            name: self.ask.name.clone(),
            peer: self.client.peer(),
            what: Box::new(Mismatch::Owner { expected, found }),
        }
    }
}

impl Client {
    /// Returns options for fetching a name: [`go`](FetchOptions::go) imports its memory.
    #[track_caller]
    pub fn fetch(&self, name: impl Into<String>) -> FetchOptions {
        FetchOptions {
            client: self.clone(),
            ask: Fetch {
                name: name.into(),
                accept: Vec::new(),
                access: None,
                probe: true,
                instance: None,
                owner: self.session().dial.options.owner.clone(),
            },
            import: ImportOptions::new(),
            via: None,
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

/// Returns the handles of so many parts, if they are complete or come through a queue.
fn open(handles: &Handles, mut fds: Vec<OwnedFd>, parts: usize) -> Option<PartHandles> {
    let handles: Vec<_> = match handles {
        Handles::Fabric(secrets) => fabric(secrets)?,
        Handles::Queue => {
            let queue = fds.pop().filter(|_| fds.is_empty());
            return queue.map(PartHandles::from_queue);
        }
        Handles::Fds(count) if *count as usize != fds.len() => return None,
        Handles::Fds(_) => fds.into_iter().map(ShareableHandle::PosixFd).collect(),
    };
    (handles.len() == parts).then(|| handles.into())
}

/// Returns fabric handles, unless one has another length.
pub(crate) fn fabric(secrets: &[Secret]) -> Option<Vec<ShareableHandle>> {
    let handle = |secret: &Secret| {
        let bytes = secret.expose().try_into().ok()?;
        Some(ShareableHandle::Fabric(FabricHandle::from_bytes(bytes)))
    };
    secrets.iter().map(handle).collect()
}

/// Checks an exporter's description of its memory.
fn check(memory: &Description, probe: Option<u64>) -> Result<(), String> {
    memory.check().map_err(|error| error.to_string())?;
    match probe {
        // The bytes around a window belong to other memory, and those in it to the user.
        Some(_) if memory.is_window() => Err("a place for a probe of a window".into()),
        Some(at) if !at.is_multiple_of(8) || at < memory.len || at > memory.padded() - 8 => {
            let (len, end) = (memory.len, memory.padded());
            Err(format!(
                "a place for a probe at {at}, not between {len} and {end} bytes"
            ))
        }
        _ => Ok(()),
    }
}
