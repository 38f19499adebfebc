//! Grants memory: handles and a lease.

use std::sync::Arc;
use std::time::Instant;

use super::ServerCore;
use super::audit::audit;
use super::link::Link;
use super::outcome::{Content, No, Outcome, Step, invalid, not_found};
use super::process::Known;
use super::publication::Publication;
use crate::driver::{Access, HandleType};
use crate::ledger::Party;
use crate::protocol::{Answer, Fds, Fetch, Granted, Handles, check_name};
use crate::transport::HeldFd;
use crate::{Owner, PeerName, Refusal};

/// The most handle types that a client may ask for.
const MAX_ACCEPT: usize = 16;

/// The handles of the memory for the client.
struct Exported {
    /// `None`: fabric handles, which the publication has.
    fds: Option<Fds>,
    held: Vec<HeldFd>,
    /// Why it is not a fabric handle, if the client wanted one.
    no_fabric: Option<String>,
}

/// Answers at once if the driver need not be asked.
pub(super) fn begin(inner: &Arc<ServerCore>, link: &Link, ask: Fetch) -> Result<Step, No> {
    let publication = inner.check(link, &ask)?;
    let wanted = ask.accept.first();
    if wanted == Some(&HandleType::Fabric) && publication.fabric.get().is_some() {
        let exported = Exported {
            fds: None,
            held: Vec::new(),
            no_fabric: None,
        };
        return inner
            .grant(link, &ask, &publication, exported)
            .map(Step::Now);
    }
    let (inner, link) = (Arc::clone(inner), link.clone());
    Step::later(async move {
        let exported = inner.export(&link, &ask, &publication).await?;
        inner.grant(&link, &ask, &publication, exported)
    })
}

impl ServerCore {
    /// Checks whether the peer may have the memory at all.
    fn check(&self, link: &Link, ask: &Fetch) -> Result<Arc<Publication>, No> {
        check_name(&ask.name).map_err(invalid)?;
        if ask.accept.len() > MAX_ACCEPT || ask.access == Access::None {
            return Err((Refusal::Invalid, "handle types or access".into()));
        }
        if ask.instance.is_some_and(|named| named != self.instance) {
            let detail = format!("this is instance {}", self.instance);
            return Err((Refusal::Stale, detail));
        }
        let state = self.state();
        let found = state.find(&ask.name, &link.session.peer);
        let found = found.ok_or_else(not_found)?;
        if found.closing || state.closing {
            return Err((Refusal::Closing, String::new()));
        }
        let publication = Arc::clone(&found.publication);
        drop(state);
        let owner = &publication.owner;
        if ask.owner.as_ref().is_some_and(|expected| expected != owner) {
            return Err((Refusal::WrongOwner, owner.to_string()));
        }
        if matches!(owner, Owner::Peer(owner) if *owner != link.session.peer)
            && let Ok(allocator) = self.allocator()
        {
            allocator.may_fetch(&link.session.peer)?;
        }
        if ask.access > publication.access() {
            let detail = format!("{} is the most that there is", publication.access());
            return Err((Refusal::ReadOnly, detail));
        }
        Ok(publication)
    }

    /// Exports handles of the first type that the client wants and that works.
    async fn export(
        &self,
        link: &Link,
        ask: &Fetch,
        publication: &Arc<Publication>,
    ) -> Result<Exported, No> {
        let (mut no_fabric, mut reasons) = (None, Vec::new());
        for (at, wanted) in ask.accept.iter().enumerate() {
            if ask.accept[..at].contains(wanted) {
                continue;
            }
            let exported = match wanted {
                HandleType::Fabric => self.export_fabric(link, publication).await?,
                HandleType::PosixFd => self.export_fds(link, publication).await?,
            };
            match (exported, wanted) {
                (Ok((fds, held)), _) => {
                    return Ok(Exported {
                        fds,
                        held,
                        no_fabric,
                    });
                }
                (Err(why), HandleType::Fabric) => no_fabric = Some(why),
                (Err(why), HandleType::PosixFd) => reasons.push(why),
            }
        }
        reasons.extend(no_fabric);
        Err((Refusal::NoCommonHandle, reasons.join("; ")))
    }

    /// Makes sure that the publication has fabric handles; returns why it has none otherwise.
    async fn export_fabric(
        &self,
        link: &Link,
        publication: &Arc<Publication>,
    ) -> Result<Result<(Option<Fds>, Vec<HeldFd>), String>, No> {
        let exported = match (publication.fabric.get(), publication.no_fabric.get()) {
            (Some(_), _) => Ok(()),
            (None, Some(why)) => Err(why.clone()),
            (None, None) => {
                let publication = Arc::clone(publication);
                let export = move || Ok(publication.export_fabric());
                self.driver_call(link.session.account(), export).await?
            }
        };
        Ok(exported.map(|()| (None, Vec::new())))
    }

    /// Exports fds, or starts to send them through a queue; returns why there are none otherwise.
    async fn export_fds(
        &self,
        link: &Link,
        publication: &Arc<Publication>,
    ) -> Result<Result<(Option<Fds>, Vec<HeldFd>), String>, No> {
        let most = self.limits.frame_fds as usize;
        let parts = publication.description.parts.len();
        let is_queued = link.is_queued(parts);
        let why = if !publication
            .handle_types
            .contains(HandleType::PosixFd.into())
        {
            "the memory was made without POSIX fds".to_owned()
        } else if !link.local && link.boot != self.boot {
            "POSIX fds do not go to another machine".to_owned()
        } else if !link.local {
            "the session has not moved to the server's Unix socket".to_owned()
        } else if parts > most && !is_queued {
            format!("more than {most} POSIX fds")
        } else {
            // Of fds that come through a queue, one tells whether the driver exports them.
            let count = if is_queued { 1 } else { parts };
            let room = link.fds.charge(count)?;
            let exporting = Arc::clone(publication);
            let export = move || {
                let fds = exporting.export_fds(count).map_err(|e| e.to_string());
                Ok(fds.map(|fds| HeldFd::counted(fds, room)))
            };
            let account = link.session.account();
            let fds = match self.driver_call(account, export).await? {
                Ok(one) if is_queued => {
                    drop(one);
                    let queue = self.feed(publication, (&link.fds, account))?;
                    (Fds::in_queue(), queue)
                }
                Ok(fds) => (Fds::of(fds.len() as u32), fds),
                Err(why) => return Ok(Err(why)),
            };
            return Ok(Ok((Some(fds.0), fds.1)));
        };
        Ok(Err(why))
    }

    /// Creates the lease and the answer.
    fn grant(
        &self,
        link: &Link,
        ask: &Fetch,
        publication: &Arc<Publication>,
        exported: Exported,
    ) -> Outcome {
        let Exported {
            fds,
            held,
            no_fabric,
        } = exported;
        let session = &link.session;
        let now = Instant::now();
        let mut state = self.state();
        if !session.is_of(link.id) {
            // Another connection has taken over, and this lease could not be announced to it.
            return Err((Refusal::Expired, "the session is elsewhere".into()));
        }
        let probe = ask.probe && fds.is_none();
        let (lease, probe) = state.grant(session, publication, probe, now)?;
        if let Some(process) = &link.process {
            state.leases.set_known(lease, process);
        }
        drop(state);
        note(publication, &session.peer, link.process.as_ref());
        self.counters.count(|counters| &counters.fetches);
        let (name, owner) = (&*publication.name, &publication.owner);
        let bytes = publication.description.len;
        audit!(
            self.audit, Memory, Some(&session.peer), "granted",
            session = session.id, pid = link.pid(), lease, name, %owner, bytes,
        );
        tracing::debug!(peer = %session.peer, name = &*publication.name, lease, "granted");
        let publication = Arc::clone(publication);
        Ok(Content::Built(Box::new(move || {
            let fabric = || Handles::Fabric(publication.fabric.get().cloned().unwrap_or_default());
            let handles = fds.map_or_else(fabric, Handles::Fds);
            let granted = Granted {
                lease,
                memory: publication.description.clone(),
                handles,
                probe,
                no_fabric,
                owner: publication.owner.clone(),
            };
            (Answer::Granted(granted), held)
        })))
    }
}

/// Notes in the ledger the process that gets handles of a publication.
fn note(publication: &Publication, peer: &PeerName, process: Option<&Known>) {
    if let Ok(shared) = publication.shared() {
        shared.sent_to(&Party {
            pid: process.map(|known| known.shown.pid),
            name: peer.to_string(),
        });
    }
}
