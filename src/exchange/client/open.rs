//! Opens the handles of an answer, redeems tickets at a server's fd socket, and runs blocking work.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::time::timeout_at;

use super::greet::{self, Dial, Established};
use super::session::ClientSession;
use super::text;
use crate::driver::{FabricHandle, ShareableHandle};
use crate::protocol::{Answer, Ask, Fds, FromServer, Handles, Redeem, Secret, decode, encode};
use crate::share::PartHandles;
use crate::{Address, Error, Result, Security, ShareError, limits};

/// Returns the fds for a ticket, from the Unix socket that the server has named.
async fn redeem(session: &Arc<ClientSession>, ticket: Secret) -> Result<(Fds, Vec<OwnedFd>)> {
    let terms = session.terms();
    let patience = session.patience();
    let deadline = limits::deadline(patience);
    let broken = |detail: &str| Error::protocol(terms.peer.clone(), detail);
    let fd_socket = terms.welcome.door.clone().map(PathBuf::from);
    let fd_socket =
        fd_socket.ok_or_else(|| broken("a ticket, and no fd socket to redeem it at"))?;
    if !fd_socket.is_absolute() {
        return Err(broken("an fd socket without an absolute path"));
    }
    let mut options = session.dial.options.clone();
    options.address = Address::Unix(fd_socket);
    options.security = Security::Plain;
    let dial = Dial {
        options,
        ..session.dial.clone()
    };
    let what = format!("redeeming a ticket at {}", dial.options.address);
    let work = async {
        let connection = greet::establish(&dial, None, deadline).await;
        let mut connection = connection.map_err(|error| no_fd_socket(error.into()))?;
        if connection.terms.welcome.instance != terms.welcome.instance {
            return Err(Error::Stale {
                what: format!("a ticket from {}", terms.peer),
                why: "another server is at its fd socket".into(),
            });
        }
        let request = encode(&(1, Ask::Redeem(Redeem { ticket })));
        connection.writer.write(&request, &[]).await?;
        read_fds(&mut connection, dial.options.limits.frame_bytes).await
    };
    let done = timeout_at(deadline, work).await;
    done.unwrap_or(Err(Error::timed_out(what, patience)))
}

/// Adds to an error of connecting to an fd socket how a process in a container reaches it.
fn no_fd_socket(error: Error) -> Error {
    match error {
        Error::Share(ShareError::Unreachable { peer, cause, why }) => {
            let why = format!(
                "{why}; the server of this machine passes POSIX fds there: mount the socket's folder into this \
                 container at the same path"
            );
            Error::Share(ShareError::Unreachable { peer, cause, why })
        }
        error => error,
    }
}

/// Reads the answer to request 1, in frames of at most `limit` bytes.
async fn read_fds(connection: &mut Established, limit: u32) -> Result<(Fds, Vec<OwnedFd>)> {
    let peer = &connection.terms.peer;
    loop {
        let Some(mut frame) = connection.reader.read(limit).await? else {
            return Err(Error::peer_lost(peer.clone(), "it closed its fd socket"));
        };
        let reply = match decode(&frame.bytes).map_err(|error| text::of(peer, error))? {
            FromServer::Event(_) => continue,
            FromServer::Reply(id, answer) => (id, answer),
        };
        return match reply {
            (1, Answer::Fds(fds)) if fds.count as usize == frame.fds.len() => {
                Ok((fds, frame.uncounted_fds()))
            }
            (1, Answer::Refused(why)) => Err(text::refused(peer, "redeeming a ticket", &why)),
            _ => {
                let why = "the answer does not carry as many fds as it says";
                Err(Error::protocol(peer.clone(), why))
            }
        };
    }
}

fn fds_of(fds: Vec<OwnedFd>) -> Vec<ShareableHandle> {
    fds.into_iter().map(ShareableHandle::PosixFd).collect()
}

/// Returns the handles of so many parts that an answer with `came` names, if they are complete or come through a queue;
/// redeems a ticket.
pub(super) async fn opened(
    session: &Arc<ClientSession>,
    handles: Handles,
    came: Vec<OwnedFd>,
    parts: usize,
) -> Result<Option<PartHandles>> {
    let (fds, came) = match handles {
        Handles::Fabric(secrets) => {
            let handles = fabric(&secrets).filter(|handles| handles.len() == parts);
            return Ok(handles.map(PartHandles::from));
        }
        Handles::Fds(fds) => (fds, came),
        Handles::Ticket(ticket) => redeem(session, ticket).await?,
    };
    Ok(came_with(fds, came, parts))
}

/// Returns the handles of so many parts, of fds that came with a message.
pub(crate) fn came_with(fds: Fds, mut came: Vec<OwnedFd>, parts: usize) -> Option<PartHandles> {
    if fds.count as usize != came.len() {
        return None;
    }
    match (fds.queue, fds.source) {
        (false, false) => (came.len() == parts).then(|| fds_of(came).into()),
        _ if came.len() != 1 => None,
        (true, false) => came.pop().map(PartHandles::from_queue),
        (false, true) => came.pop().map(PartHandles::from_source),
        (true, true) => None,
    }
}

/// Returns fabric handles, unless one has another length.
pub(crate) fn fabric(secrets: &[Secret]) -> Option<Vec<ShareableHandle>> {
    let handle = |secret: &Secret| {
        let bytes = secret.expose().try_into().ok()?;
        Some(ShareableHandle::Fabric(FabricHandle::from_bytes(bytes)))
    };
    secrets.iter().map(handle).collect()
}

/// Runs blocking work on a separate thread. If this is dropped, the work continues, and its result is dropped
/// on that thread.
pub(crate) async fn elsewhere<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(error) => Err(Error::failed("work on another thread", error.to_string())),
        },
    }
}

/// Runs blocking work as [`elsewhere`] does, and returns a panic there as an error. `what` is the operation.
pub(crate) async fn attempt<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Error::failed(what, error.to_string()))
}

/// Drops memory on a separate thread. An unmap takes as long as the driver does.
pub(crate) async fn discard<T: Send + 'static>(memory: T) {
    // An error means that the runtime is ending, and the memory is dropped anyway, or that the drop has panicked: the
    // caller's other work must still be done.
    let _ = attempt("dropping memory", move || drop(memory)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Panics;

    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("in a drop");
        }
    }

    #[tokio::test]
    async fn a_panic_on_another_thread_does_not_unwind_here() {
        discard(Panics).await;
        let error = attempt("mapping", || panic!("in a call")).await;
        let error = error.map(|(): ()| ()).unwrap_err().to_string();
        assert!(
            error.contains("mapping") && error.contains("in a call"),
            "{error}"
        );
    }
}
