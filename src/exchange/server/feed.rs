//! Sends the fds of memory with many parts to a client, a few at a time: see [`queue`].

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::set_socket_send_buffer_size;
use tokio::net::UnixStream;
use tokio::time::timeout_at;
use tokio_util::task::TaskTracker;

use super::ServerCore;
use super::link::Link;
use super::outcome::No;
use super::publication::Publication;
use crate::account::{Account, REQUEST};
use crate::driver::{HandleType, ShareableHandle};
use crate::limits::deadline;
use crate::share::fd;
use crate::share::queue::{self, BATCH};
use crate::transport::{HeldFd, send_fds};
use crate::{Error, Refusal, Result};

/// The queue's bytes in the kernel. It raises this to its least, which is room for less than 10 batches: a client that
/// does not take its fds has no more of them in flight.
const KERNEL_BYTES: usize = 1;

impl Link {
    /// Returns whether the client gets the fds of so many parts through a queue.
    pub(super) const fn is_queued(&self, parts: usize) -> bool {
        self.queues && queue::is_needed(parts)
    }
}

impl ServerCore {
    /// Starts to send the memory's fds through a queue, and returns the client's end of it. The client is charged for the
    /// fds of one batch until all were sent, or it has closed its end.
    pub(super) fn feed(
        &self,
        publication: &Arc<Publication>,
        (fds, account): (&Arc<Account>, &Arc<Account>),
    ) -> Result<Vec<HeldFd>, No> {
        let charges = (account.charge(REQUEST)?, fds.charge(BATCH + 1)?);
        let theirs = fds.charge(1)?;
        let pair = pair().map_err(|error| (Refusal::Internal, error.to_string()));
        let (ours, end) = pair?;
        let (publication, write) = (Arc::clone(publication), self.limits.write);
        let (ended, tasks) = (self.ended.clone(), self.tasks.clone());
        self.tasks.spawn(async move {
            let fed = tokio::select! {
                () = ended.cancelled() => Ok(()),
                fed = fill(&ours, &publication, write, &tasks) => fed,
            };
            if let Err(error) = fed {
                let name = &*publication.name;
                tracing::info!(name, %error, "not all handles were sent");
            }
            drop((ours, charges));
        });
        Ok(HeldFd::counted(vec![end], theirs))
    }
}

/// Creates a queue: the server's end, and the client's.
fn pair() -> Result<(UnixStream, OwnedFd)> {
    let (ours, theirs) = queue::pair()?;
    let ours = ours.set_nonblocking(true).and_then(|()| {
        set_socket_send_buffer_size(&ours, KERNEL_BYTES)?;
        UnixStream::from_std(ours)
    });
    let ours = ours.map_err(|error| Error::system("a queue of handles", &error))?;
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
    for parts in queue::batches(publication.description.parts.len()) {
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
        send(queue, &sent, within).await?;
    }
    Ok(())
}

async fn send(queue: &UnixStream, batch: &[ShareableHandle], within: Duration) -> Result<()> {
    let failed = |error| Error::system("sending handles", &error);
    let fds = fd::all_posix(batch).map_err(failed)?;
    let sent = timeout_at(deadline(within), send_fds(queue, &[0], &fds)).await;
    let sent = sent.map_err(|_| Error::timed_out("sending handles", within))?;
    sent.map(drop).map_err(failed)
}
