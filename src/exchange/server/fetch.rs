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

/// The driver's answers in one fetch.
#[derive(Default)]
struct Answered {
    fds: Option<Result<Vec<HeldFd>, String>>,
    no_fabric: Option<String>,
}

/// How the memory reaches the client.
enum Via {
    Fabric,
    Fds(Vec<HeldFd>),
    /// The fds are sent through a queue.
    Queue,
}

enum Choice {
    /// Grant it; with the reason if the client wanted a fabric handle and this is none.
    Grant(Via, Option<String>),
    /// Ask the driver first.
    Ask(HandleType),
}

/// Answers at once if the driver need not be asked.
pub(super) fn begin(inner: &Arc<ServerCore>, link: &Link, ask: Fetch) -> Result<Step, No> {
    let publication = inner.check(link, &ask)?;
    let mut answered = Answered::default();
    let mut wanted = match inner.choose(link, &ask, &publication, &mut answered)? {
        Choice::Ask(wanted) => wanted,
        Choice::Grant(via, no_fabric) => {
            let granted = inner.grant(link, &ask, &publication, via, no_fabric);
            return granted.map(Step::Now);
        }
    };
    let (inner, link) = (Arc::clone(inner), link.clone());
    Step::later(async move {
        loop {
            inner
                .ask_driver(&link, &publication, wanted, &mut answered)
                .await?;
            match inner.choose(&link, &ask, &publication, &mut answered)? {
                Choice::Ask(next) => wanted = next,
                Choice::Grant(via, no_fabric) => {
                    return inner.grant(&link, &ask, &publication, via, no_fabric);
                }
            }
        }
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

    /// Chooses the first type that the client wants and that works.
    fn choose(
        &self,
        link: &Link,
        ask: &Fetch,
        publication: &Publication,
        answered: &mut Answered,
    ) -> Result<Choice, No> {
        let most_fds = self.limits.frame_fds as usize;
        let parts = publication.description.parts.len();
        let is_queued = link.is_queued(parts);
        let mut no_fabric = None;
        let mut reasons = Vec::new();
        for &wanted in &ask.accept {
            match wanted {
                HandleType::Fabric => {
                    let why = publication.no_fabric.get();
                    match (
                        publication.fabric.get(),
                        why.or(answered.no_fabric.as_ref()),
                    ) {
                        (Some(_), _) => return Ok(Choice::Grant(Via::Fabric, None)),
                        (None, Some(why)) => no_fabric = Some(why.clone()),
                        (None, None) => return Ok(Choice::Ask(wanted)),
                    }
                }
                HandleType::PosixFd if !publication.handle_types.contains(wanted.into()) => {
                    reasons.push("the memory was made without POSIX fds".to_owned());
                }
                HandleType::PosixFd if !link.local && link.boot != self.boot => {
                    reasons.push("POSIX fds do not go to another machine".to_owned());
                }
                HandleType::PosixFd if parts > most_fds && !is_queued => {
                    reasons.push(format!("more than {most_fds} POSIX fds"));
                }
                HandleType::PosixFd if !link.local => {
                    reasons
                        .push("the session has not moved to the server's Unix socket".to_owned());
                }
                HandleType::PosixFd => match answered.fds.take() {
                    Some(Ok(_)) if is_queued => return Ok(Choice::Grant(Via::Queue, no_fabric)),
                    Some(Ok(fds)) => return Ok(Choice::Grant(Via::Fds(fds), no_fabric)),
                    Some(Err(why)) => {
                        reasons.push(why.clone());
                        answered.fds = Some(Err(why));
                    }
                    None => return Ok(Choice::Ask(wanted)),
                },
            }
        }
        reasons.extend(no_fabric);
        Err((Refusal::NoCommonHandle, reasons.join("; ")))
    }

    /// Asks the driver for handles. Its error is kept as the reason for the next choice.
    async fn ask_driver(
        &self,
        link: &Link,
        publication: &Arc<Publication>,
        wanted: HandleType,
        answered: &mut Answered,
    ) -> Result<(), No> {
        let publication = Arc::clone(publication);
        let account = link.session.account();
        match wanted {
            HandleType::PosixFd => {
                let parts = publication.description.parts.len();
                // Of fds that come through a queue, one tells whether the driver exports them.
                let count = if link.is_queued(parts) { 1 } else { parts };
                let room = link.fds.charge(count)?;
                let export = move || {
                    let fds = publication.export_fds(count).map_err(|e| e.to_string());
                    Ok(fds.map(|fds| HeldFd::counted(fds, room)))
                };
                answered.fds = Some(self.driver_call(account, export).await?);
            }
            HandleType::Fabric => {
                let export = move || Ok(publication.export_fabric().err());
                answered.no_fabric = self.driver_call(account, export).await?;
            }
        }
        Ok(())
    }

    /// Creates the lease and the answer.
    fn grant(
        &self,
        link: &Link,
        ask: &Fetch,
        publication: &Arc<Publication>,
        via: Via,
        no_fabric: Option<String>,
    ) -> Outcome {
        let session = &link.session;
        // Before the lease: beyond a limit there is none.
        let queue = match via {
            Via::Queue => self.feed(publication, (&link.fds, session.account()))?,
            _ => Vec::new(),
        };
        let now = Instant::now();
        let mut state = self.state();
        if !session.is_of(link.id) {
            // Another connection has taken over, and this lease could not be announced to it.
            return Err((Refusal::Expired, "the session is elsewhere".into()));
        }
        let probe = ask.probe && matches!(via, Via::Fabric);
        let (lease, probe) = state.grant(session, publication, probe, now)?;
        if let Some(process) = &link.process {
            state.leases.set_known(lease, process);
        }
        let (handles, fds) = match via {
            Via::Fabric => (None, Vec::new()),
            Via::Fds(fds) => {
                let count = fds.len() as u32;
                (Some(Handles::Fds(Fds::of(count))), fds)
            }
            Via::Queue => (Some(Handles::Fds(Fds::in_queue())), queue),
        };
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
            let granted = Granted {
                lease,
                memory: publication.description.clone(),
                handles: handles.unwrap_or_else(fabric),
                probe,
                no_fabric,
                owner: publication.owner.clone(),
            };
            (Answer::Granted(granted), fds)
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
