//! Grants memory: handles and a lease.

use std::sync::Arc;
use std::time::Instant;

use super::grant::{Grant, Via};
use super::link::Link;
use super::outcome::{Content, No, Outcome, Step, not_found, over};
use super::process::Known;
use super::publication::Publication;
use super::session::ServerSession;
use super::state::ServerState;
use super::stats::count;
use super::{ServerCore, ServerEvent};
use crate::PeerName;
use crate::Refusal;
use crate::account::{Account, REQUEST};
use crate::driver::{Access, HandleType};
use crate::ledger::Party;
use crate::protocol::{Answer, Fds, Fetch, Secret, check_name};
use crate::transport::{FdShare, HeldFd, Reserved};

/// The most handle types that a client may ask for.
const MAX_ACCEPT: usize = 16;

/// The driver's handles for one fetch.
#[derive(Default)]
struct Prepared {
    fds: Option<Result<Vec<HeldFd>, String>>,
    fabric: Option<String>,
}

/// How the memory reaches the client.
enum Choice {
    Fabric,
    Fds(Vec<HeldFd>),
    Ticket,
    /// The driver has to be asked first.
    Ask(Need),
}

enum Need {
    Fds,
    Fabric,
    NoFabric,
}

/// Answers at once if the driver need not be asked.
pub(super) fn begin(inner: &Arc<ServerCore>, link: &Link, ask: Fetch) -> Step {
    let publication = match inner.check(link, &ask) {
        Ok(publication) => publication,
        Err(no) => return Step::Now(Err(no)),
    };
    let mut prepared = Prepared::default();
    let need = match inner.choose(link, &ask, &publication, &mut prepared) {
        Ok((Choice::Ask(need), _)) => need,
        Ok((choice, no_fabric)) => {
            return Step::Now(inner.grant(link, &ask, &publication, choice, no_fabric));
        }
        Err(no) => return Step::Now(Err(no)),
    };
    let (inner, link) = (Arc::clone(inner), link.clone());
    Step::later(async move {
        let mut need = need;
        loop {
            inner
                .prepare(&link, &publication, need, &mut prepared)
                .await?;
            match inner.choose(&link, &ask, &publication, &mut prepared)? {
                (Choice::Ask(next), _) => need = next,
                (choice, no_fabric) => {
                    return inner.grant(&link, &ask, &publication, choice, no_fabric);
                }
            }
        }
    })
}

/// Reserves room for a publication's fds before they exist.
fn room(share: &Arc<FdShare>, publication: &Publication) -> Result<Reserved, No> {
    let parts = publication.description.parts.len();
    share.reserve(parts).map_err(|why| (Refusal::Limit, why))
}

impl ServerCore {
    /// Checks whether the peer may have the memory at all.
    fn check(&self, link: &Link, ask: &Fetch) -> Result<Arc<Publication>, No> {
        check_name(&ask.name).map_err(|e| (Refusal::Invalid, e.to_string()))?;
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
        if ask.access > publication.access() {
            let detail = format!("{} is the most that there is", publication.access());
            return Err((Refusal::ReadOnly, detail));
        }
        Ok(publication)
    }

    /// Chooses the first type that the client wants and that works, and the reason why it is not a fabric
    /// handle if it wanted one.
    fn choose(
        &self,
        link: &Link,
        ask: &Fetch,
        publication: &Publication,
        prepared: &mut Prepared,
    ) -> Result<(Choice, Option<String>), No> {
        let most_fds = self.limits.frame_fds as usize;
        let mut no_fabric = None;
        let mut reasons = Vec::new();
        for &wanted in &ask.accept {
            let exists = publication.handle_types.contains(wanted.into());
            match wanted {
                HandleType::Fabric if !exists => match publication.no_fabric.get() {
                    Some(why) => no_fabric = Some(why.clone()),
                    None => return Ok((Choice::Ask(Need::NoFabric), None)),
                },
                HandleType::Fabric => match (publication.fabric.get(), &prepared.fabric) {
                    (Some(_), _) => return Ok((Choice::Fabric, None)),
                    (None, Some(why)) => no_fabric = Some(why.clone()),
                    (None, None) => return Ok((Choice::Ask(Need::Fabric), None)),
                },
                HandleType::PosixFd if !exists => {
                    reasons.push("the memory was made without POSIX fds".to_owned());
                }
                HandleType::PosixFd if !link.local && link.boot != self.boot => {
                    reasons.push("POSIX fds do not go to another machine".to_owned());
                }
                HandleType::PosixFd if publication.description.parts.len() > most_fds => {
                    reasons.push(format!("more than {most_fds} POSIX fds"));
                }
                HandleType::PosixFd if link.local => match prepared.fds.take() {
                    Some(Ok(fds)) => return Ok((Choice::Fds(fds), no_fabric)),
                    Some(Err(why)) => {
                        reasons.push(why.clone());
                        prepared.fds = Some(Err(why));
                    }
                    None => return Ok((Choice::Ask(Need::Fds), None)),
                },
                HandleType::PosixFd if self.fd_socket.is_some() => {
                    return Ok((Choice::Ticket, no_fabric));
                }
                HandleType::PosixFd => {
                    reasons.push("the server has no socket for POSIX fds".to_owned());
                }
            }
        }
        reasons.extend(no_fabric);
        Err((Refusal::NoCommonHandle, reasons.join("; ")))
    }

    /// Asks the driver. Its error is kept as the reason for the next choice.
    async fn prepare(
        &self,
        link: &Link,
        publication: &Arc<Publication>,
        need: Need,
        prepared: &mut Prepared,
    ) -> Result<(), No> {
        let publication = Arc::clone(publication);
        let account = link.session.account();
        match need {
            Need::Fds => {
                let room = room(&link.fds, &publication)?;
                let export = move || {
                    let fds = publication.export_fds();
                    Ok(fds.map(|fds| room.hold(fds)).map_err(|e| e.to_string()))
                };
                prepared.fds = Some(self.driver_call(account, export).await?);
            }
            Need::Fabric => {
                let export = move || Ok(publication.export_fabric().map_err(|e| e.to_string()));
                prepared.fabric = self.driver_call(account, export).await?.err();
            }
            Need::NoFabric => {
                let find = move || {
                    publication.find_no_fabric();
                    Ok(())
                };
                self.driver_call(account, find).await?;
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
        choice: Choice,
        no_fabric: Option<String>,
    ) -> Outcome {
        let session = &link.session;
        let now = Instant::now();
        let mut state = self.state();
        if !session.is_of(link.id) {
            // Another connection has taken over, and this lease could not be announced to it.
            return Err((Refusal::Expired, "the session is elsewhere".into()));
        }
        let limit = self.limits.leases_per_peer;
        let (lease, probe) = state.grant(session, publication, ask.probe, now, limit)?;
        if let Some(process) = &link.process {
            state.leases.set_known(lease, process);
        }
        let via = match choice {
            Choice::Fabric => Via::Fabric,
            Choice::Fds(fds) => Via::Fds(fds),
            Choice::Ticket | Choice::Ask(_) => {
                let until = now + self.ticket;
                Via::Ticket(self.ticket_for(&mut state, session, publication, lease, until)?)
            }
        };
        let ticket = matches!(via, Via::Ticket(_));
        drop(state);
        if ticket {
            self.janitor.notify_one();
        }
        note(publication, &session.peer, link.process.as_ref());
        count(&self.counters.fetches);
        self.audit.granted(link, lease, publication);
        tracing::debug!(peer = %session.peer, name = &*publication.name, lease, "granted");
        if self.events.receiver_count() > 0 {
            self.emit(ServerEvent::Fetched {
                peer: session.peer.clone(),
                name: publication.name.to_string(),
                lease,
            });
        }
        let grant = Grant {
            lease,
            publication: Arc::clone(publication),
            via,
            probe,
            no_fabric,
        };
        Ok(Content::Granted(Box::new(grant)))
    }

    /// Issues the ticket of a lease, or ends the lease.
    fn ticket_for(
        &self,
        state: &mut ServerState,
        session: &ServerSession,
        publication: &Arc<Publication>,
        lease: u64,
        until: Instant,
    ) -> Result<Secret, No> {
        state.leases.not_handed(lease);
        let most = self.limits.tickets_per_peer;
        let memory = Arc::clone(publication);
        let issued = state
            .tickets
            .issue(lease, &session.peer, until, memory, most);
        let ticket = match issued {
            Ok(Some(ticket)) => return Ok(ticket),
            Ok(None) => Err((Refusal::Limit, format!("{most} tickets of this peer"))),
            Err(error) => Err((Refusal::Internal, error.to_string())),
        };
        let lease = state.leases.release(session.id, &session.peer, lease);
        lease.iter().for_each(|lease| state.returned(lease));
        ticket
    }

    /// Returns the fds for a ticket, which is then used up: for the peer, and its process if known.
    pub(super) async fn redeem(
        &self,
        by: &PeerName,
        process: Option<&Known>,
        (share, account): (&Arc<FdShare>, &Arc<Account>),
        ticket: &Secret,
    ) -> Outcome {
        // Only then is the ticket used up: beyond a limit, the client can retry later.
        let charge = account.charge(REQUEST).map_err(over)?;
        let room = {
            let state = self.state();
            let publication = state.tickets.peek(ticket, Instant::now());
            room(share, publication.ok_or_else(not_found)?)?
        };
        let (lease, publication, peer) = {
            let mut state = self.state();
            let redeemed = state.tickets.redeem(ticket, Instant::now());
            let (lease, publication, peer) = redeemed.ok_or_else(not_found)?;
            state.leases.handed(lease);
            if let Some(process) = process {
                state.leases.set_known(lease, process);
            }
            (lease, publication, peer)
        };
        note(&publication, by, process);
        let pid = process.map(|known| known.shown.pid);
        self.audit.redeemed(by, pid, lease, &publication);
        let name = Arc::clone(&publication.name);
        let export = move || publication.export_fds().map(|fds| room.hold(fds));
        let fds = self.charged_call(charge, export).await?;
        count(&self.counters.redeemed);
        tracing::info!(%peer, %by, name = &*name, "ticket redeemed");
        let count = fds.len() as u32;
        Ok(Content::with_fds(Answer::Fds(Fds { count }), fds))
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
