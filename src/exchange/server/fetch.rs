//! Grants memory: handles and a lease.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_send_buffer_size;
use tokio::time::timeout_at;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::audit::audit;
use super::publication::Publication;
use super::quota::{CountedFds, Refused, What};
use super::requests::{Reply, Requester, elsewhere, not_found};
use crate::driver::{Access, HandleType};
use crate::ledger::Party;
use crate::limits::deadline;
use crate::protocol::{Answer, Fetch, Granted, Handles, Secret, check_name};
use crate::share::queue::{self, BATCH};
use crate::share::{Description, fd};
use crate::text::bounded;
use crate::transport::send_fds;
use crate::{Error, Owner, Refusal, Result};

/// The most handle types that a client may ask for.
const MAX_ACCEPT: usize = 16;
/// A queue's bytes in the kernel. It raises this to its least, which is room for less than 10 batches: a client that
/// does not take its fds has no more of them in flight.
const KERNEL_BYTES: usize = 1;

/// Fabric handles, or else the fds that go with the answer; or why there are none.
type Exported = Result<(Option<Arc<[Secret]>>, CountedFds), String>;

impl Requester {
    /// Grants memory. Does not wait if the driver need not be asked.
    pub async fn fetch(&self, ask: Fetch) -> Result<Reply, Refused> {
        let (publication, memory, exporting) = self.check(&ask)?;
        let (mut no_fabric, mut reasons) = (None, Vec::new());
        for (at, wanted) in ask.accept.iter().enumerate() {
            if ask.accept[..at].contains(wanted) {
                continue;
            }
            let is_fabric = *wanted == HandleType::Fabric;
            let exported = if is_fabric {
                self.export_fabric(&publication).await?
            } else {
                self.export_fds(&publication, &exporting).await?
            };
            match exported {
                Ok((fabric, fds)) => {
                    // Fds have one of their own.
                    drop(exporting);
                    // Before the lease, and before a long answer is built.
                    let _large = self.permit_for(&publication).await?;
                    // An fd names memory of this machine.
                    let probe = ask.probe && is_fabric;
                    let build = Box::new(move |by: &Self| {
                        let mut granted = by.grant(probe, &publication, &memory, fabric)?;
                        granted.no_fabric = no_fabric;
                        Ok((Answer::Granted(granted), fds))
                    });
                    return Ok(Reply { build, _large });
                }
                Err(why) if is_fabric => no_fabric = Some(why),
                Err(why) => reasons.push(why),
            }
        }
        reasons.extend(no_fabric);
        Err((Refusal::NoCommonHandle, reasons.join("; ")))
    }

    /// Checks whether the peer may have the memory at all. A withdrawal waits for the token.
    fn check(
        &self,
        ask: &Fetch,
    ) -> Result<(Arc<Publication>, Arc<Description>, TaskTrackerToken), Refused> {
        let (core, peer) = (&self.core, self.peer());
        check_name(&ask.name)?;
        if ask.accept.len() > MAX_ACCEPT || ask.access == Some(Access::None) {
            return Err((Refusal::Invalid, "handle types or access".into()));
        }
        if ask.instance.is_some_and(|named| named != core.instance) {
            let detail = format!("this is instance {}", core.instance);
            return Err((Refusal::Stale, detail));
        }
        let state = core.state();
        let found = state.find(&ask.name, peer).ok_or_else(not_found)?;
        if found.closing || state.closing {
            return Err((Refusal::Closing, String::new()));
        }
        let publication = Arc::clone(&found.publication);
        let memory = Arc::clone(&found.description);
        // Under the lock: from its withdrawal on there is no new one.
        let exporting = publication.exports.token();
        drop(state);
        let owner = &publication.owner;
        if ask.owner.as_ref().is_some_and(|expected| expected != owner) {
            return Err((Refusal::WrongOwner, owner.to_string()));
        }
        if matches!(owner, Owner::Peer(owner) if owner != peer)
            && let Ok(allocator) = core.allocator()
        {
            allocator.may_fetch(peer)?;
        }
        let most = memory.access;
        if ask.access.is_some_and(|access| access > most) {
            let detail = format!("{most} is the most that there is");
            return Err((Refusal::ReadOnly, detail));
        }
        Ok((publication, memory, exporting))
    }

    /// Returns fabric handles, or why there are none.
    async fn export_fabric(&self, publication: &Arc<Publication>) -> Result<Exported, Refused> {
        let exported = match publication.fabric() {
            Some(known) => known,
            None => {
                let publication = Arc::clone(publication);
                let export = move || Ok(publication.export_fabric());
                self.driver_call(export).await?
            }
        };
        Ok(exported.map(|all| (Some(all), CountedFds::default())))
    }

    /// Exports fds, or starts to send them through a queue; returns why there are none otherwise.
    async fn export_fds(
        &self,
        publication: &Arc<Publication>,
        exporting: &TaskTrackerToken,
    ) -> Result<Exported, Refused> {
        let (link, quota) = (&self.link, &self.core.quota);
        let parts = publication.parts;
        let is_queued = queue::is_needed(parts);
        let has_fds = publication
            .handle_types
            .contains(HandleType::PosixFd.into());
        let why = if !has_fds {
            "the memory was made without POSIX fds".to_owned()
        } else if link.user.is_none() && link.boot != self.core.boot {
            "POSIX fds do not go to another machine".to_owned()
        } else if link.user.is_none() {
            "the session has not moved to the server's Unix socket".to_owned()
        } else {
            // Of fds that come through a queue, one tells whether the driver exports them.
            let count = if is_queued { 1 } else { parts };
            let room = quota.count(self.peer(), What::Fd, count)?;
            let (of, token) = (Arc::clone(publication), exporting.clone());
            let export = move || {
                let fds = of.export_fds(count).map_err(|e| e.to_string());
                let (_count, _exported) = (Some(room), Some(token));
                Ok(fds.map(|fds| CountedFds {
                    fds,
                    _count,
                    _exported,
                }))
            };
            let mut exported = self.driver_call(export).await?;
            if let (Ok(fds), true) = (&mut exported, is_queued) {
                // Given back before those of the queue are counted.
                *fds = CountedFds::default();
                *fds = self.feed(publication, exporting.clone())?;
            }
            return Ok(exported.map(|fds| (None, fds)));
        };
        Ok(Err(why))
    }

    /// Starts to send the memory's fds through a [`queue`], a few at a time, and returns the client's end of it. The fds of one
    /// batch are counted until all were sent, or the client has closed its end.
    fn feed(
        &self,
        publication: &Arc<Publication>,
        exporting: TaskTrackerToken,
    ) -> Result<CountedFds, Refused> {
        let core = &self.core;
        let ours_counted = core.quota.count(self.peer(), What::Fd, BATCH + 1)?;
        let _count = Some(core.quota.count(self.peer(), What::Fd, 1)?);
        let _exported = Some(exporting.clone());
        let (ours, theirs) = pair()?;
        let (publication, counted) = (Arc::clone(publication), self.counted.clone());
        let (write, ended, tasks) = (
            core.options.limits.write,
            core.ended.clone(),
            core.tasks.clone(),
        );
        core.tasks.spawn(async move {
            let filling = fill(&ours, &publication, write, &tasks);
            if let Some(Err(error)) = ended.run_until_cancelled(filling).await {
                let name = &*publication.name;
                tracing::info!(name, %error, "not all handles were sent");
            }
            drop((ours, ours_counted, counted, exporting));
        });
        let fds = vec![theirs];
        Ok(CountedFds {
            fds,
            _count,
            _exported,
        })
    }

    /// Creates the lease, and the answer, which the caller writes next: with fabric handles, or for fds that go with it.
    fn grant(
        &self,
        probe: bool,
        publication: &Publication,
        memory: &Description,
        fabric: Option<Arc<[Secret]>>,
    ) -> Result<Granted, Refused> {
        let (core, link) = (&self.core, &self.link);
        let session = &link.session;
        let mut state = core.state();
        if !session.is_of(link) {
            // Another connection has taken over, and this lease could not be announced to it.
            return Err(elsewhere());
        }
        let process = link.process.clone();
        let (lease, probe) =
            state.grant(session, publication.id, probe, process, Instant::now())?;
        drop(state);
        let (peer, pid) = (&session.peer, link.pid());
        if let Ok(shared) = publication.shared() {
            // Kept for each part, as long as the memory lives.
            let name = bounded(&peer.to_string(), 255);
            shared.sent_to(&Party { pid, name });
        }
        core.count(|stats| &mut stats.fetches);
        let (name, owner) = (&*publication.name, &publication.owner);
        let (session, bytes) = (session.id, memory.len);
        audit! {
            core.audit, Memory, Some(peer), "granted", session, pid, lease, name, %owner, bytes
        }
        tracing::debug!(%peer, name, lease, "granted");
        let parts = publication.parts;
        Ok(Granted {
            lease,
            memory: memory.clone(),
            handles: match fabric {
                Some(all) => Handles::Fabric(all.to_vec()),
                None if queue::is_needed(parts) => Handles::Queue,
                None => Handles::Fds(parts as u32),
            },
            probe,
            no_fabric: None,
            owner: owner.clone(),
        })
    }
}

/// Creates a queue: the server's end, and the client's.
fn pair() -> Result<(UnixStream, OwnedFd)> {
    let (ours, theirs) = queue::pair()?;
    let size = set_socket_send_buffer_size(&ours, KERNEL_BYTES);
    size.map_err(|error| Error::system("a queue of handles", &error.into()))?;
    Ok((ours, theirs))
}

/// Sends all fds, and waits up to `within` for room for each batch.
async fn fill(
    queue: &UnixStream,
    publication: &Arc<Publication>,
    within: Duration,
    tasks: &TaskTracker,
) -> Result<()> {
    let mut sent = Vec::new();
    for parts in queue::batches(publication.parts) {
        let publication = Arc::clone(publication);
        let export = move || {
            // The last batch is closed there too: both take the driver's time.
            drop(sent);
            let shared = publication.shared()?;
            Ok::<_, Error>(shared.export_parts(parts, HandleType::PosixFd)?)
        };
        // The server's end waits for a driver call that this no longer does.
        let exported = tasks.spawn_blocking(export).await;
        let exported = exported.map_err(|error| Error::failed("exporting", error.to_string()))?;
        sent = exported?;
        let failed = |error| Error::system("sending handles", &error);
        let fds = fd::all_posix(&sent).map_err(failed)?;
        let sending = timeout_at(deadline(within), send_fds(queue.as_fd(), &[0], &fds)).await;
        let sending = sending.map_err(|_| Error::timed_out("sending handles", within))?;
        sending.map_err(failed)?;
    }
    Ok(())
}
