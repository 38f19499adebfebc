//! The fd socket: a Unix socket, in a directory of its own, where tickets are redeemed for fds.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::time::timeout;

use super::ServerCore;
use super::accept;
use super::admission::{Newcomer, OfPeer, Shaking, gave_way};
use super::connection::answer;
use super::folder::{self, FD_SOCKET, Folder};
use super::handshakes::GiveWay;
use super::options::FdSocketAt;
use super::outcome::{No, Outcome, done};
use super::process::Known;
use super::stats::count;
use crate::account::Account;
use crate::protocol::{Ask, Greeting, Request, decode};
use crate::share::{InstanceId, Peers};
use crate::transport::{Connection, FdShare, Incoming, Listening};
use crate::{Error, Refusal, Result};
use crate::{PeerName, limits};

/// The longest path of a Unix socket (`sockaddr_un` has 108 bytes, including a final NUL).
const MAX_PATH: usize = 107;

/// The fd socket's path; dropping it removes what was created for it.
#[derive(Debug)]
pub(crate) struct FdSocketPath {
    pub path: PathBuf,
    _folder: Option<Folder>,
}

impl FdSocketPath {
    /// Returns the fd socket's path; creates a directory for it if the options name none.
    pub(super) fn prepare(
        at: &FdSocketAt,
        instance: InstanceId,
        peers: &Peers,
    ) -> Result<Option<Self>> {
        match at {
            FdSocketAt::Nowhere => Ok(None),
            FdSocketAt::At(path) => Ok(Some(Self {
                // An absolute path, because clients have other working directories.
                path: std::path::absolute(path)
                    .map_err(|e| Error::system(format!("finding {}", path.display()), &e))?,
                _folder: None,
            })),
            FdSocketAt::Anywhere => Self::private(instance, peers).map(Some),
        }
    }

    /// Creates a directory that only `peers` can reach. Removes directories that killed servers have left
    /// beside it.
    pub fn private(instance: InstanceId, peers: &Peers) -> Result<Self> {
        let others = peers.reach_beyond_own_user();
        // Other users cannot enter this user's runtime directory.
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|_| !others);
        let places = [
            runtime.map(PathBuf::from),
            Some(std::env::temp_dir()),
            Some("/tmp".into()),
        ];
        let mut last = Error::invalid("door", "no directory can hold its socket: set its path");
        for place in places.into_iter().flatten() {
            let path = Folder::path_in(&place, instance).join(FD_SOCKET);
            if !path.is_absolute() || path.as_os_str().len() > MAX_PATH {
                continue;
            }
            folder::sweep(&place);
            let folder = match Folder::create(&place, instance) {
                Ok(folder) => folder,
                Err(error) => {
                    last = error;
                    continue;
                }
            };
            if others {
                // Just enough to reach the socket by its name.
                let path = folder.path();
                fs::set_permissions(path, Permissions::from_mode(0o711)).map_err(|e| {
                    Error::system(format!("letting others into {}", path.display()), &e)
                })?;
            }
            return Ok(Self {
                path,
                _folder: Some(folder),
            });
        }
        Err(last)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Serves the fd socket until the server ends.
pub(super) async fn run(
    inner: Arc<ServerCore>,
    listening: Listening,
    number: usize,
    path: FdSocketPath,
) {
    while let Some((newcomer, give_way)) = accept::next(&inner, &listening, number).await {
        let serve = serve(Arc::clone(&inner), newcomer, give_way);
        inner.tasks.spawn(serve);
    }
    // First the socket, then its directory.
    drop(listening);
    drop(path);
}

/// Serves one connection at the fd socket.
async fn serve(inner: Arc<ServerCore>, newcomer: Newcomer, give_way: GiveWay) {
    let Newcomer {
        incoming,
        open,
        shaking,
    } = newcomer;
    let served = tokio::select! {
        () = inner.ending() => Ok(()),
        Ok(()) = give_way => {
            count(&inner.counters.failed_handshakes);
            Err(gave_way(&inner))
        }
        served = converse(&inner, incoming, shaking) => served,
    };
    if let Err(error) = served {
        tracing::info!(%error, "at the fd socket");
    }
    drop(open);
}

/// Hello and welcome, then one request after the other; there is no session.
async fn converse(inner: &Arc<ServerCore>, incoming: Incoming, shaking: Shaking) -> Result<()> {
    let deadline = limits::deadline(inner.limits.handshake);
    let greeted = async {
        let (mut connection, hello) = accept::hello(inner, incoming, deadline).await?;
        let begun = OfPeer::enter(inner, &connection.peer)
            .and_then(|of_peer| Ok((inner.welcome(&hello, &connection.peer)?, of_peer)));
        match begun {
            Ok((welcome, of_peer)) => {
                drop(hello);
                of_peer.charge_frames(&mut connection);
                shaking.finish()?;
                let welcome = Greeting::Welcome(welcome);
                accept::send(inner, &mut connection, welcome, deadline).await?;
                Ok((connection, of_peer))
            }
            Err((reason, detail)) => {
                Err(accept::refuse(inner, connection, reason, detail, deadline).await)
            }
        }
    };
    let greeted: Result<(Connection, OfPeer)> = greeted.await;
    let (mut connection, of_peer) = match greeted {
        Ok(greeted) => greeted,
        Err(error) => {
            count(&inner.counters.failed_handshakes);
            return Err(error);
        }
    };
    let share = inner.fds.share(&connection.peer);
    let process = Known::of(&mut connection);
    let silence = inner.silence();
    let limit = inner.limits.hello_bytes;
    loop {
        let frame = match timeout(silence, connection.reader.read(limit)).await {
            Ok(frame) => frame?,
            // The client may connect again: nothing is lost.
            Err(_) => return Ok(()),
        };
        let Some(frame) = frame else {
            return Ok(());
        };
        let request: Request = decode(&frame.bytes).inspect_err(|_| {
            count(&inner.counters.protocol_errors);
        })?;
        count(&inner.counters.requests);
        drop(frame);
        let account = of_peer.account();
        let at = (&share, account);
        let outcome = outcome_of(inner, &connection.peer, process.as_ref(), at, request.ask).await;
        if let Err((reason, _)) = &outcome {
            let (peer, pid) = (&connection.peer, connection.pid);
            inner
                .audit
                .refused_without_session("redeem", Some(peer), pid, reason.word());
        }
        answer(inner, &mut connection.writer, request.id, outcome).await?;
    }
}

async fn outcome_of(
    inner: &ServerCore,
    peer: &PeerName,
    process: Option<&Known>,
    at: (&Arc<FdShare>, &Arc<Account>),
    ask: Option<Ask>,
) -> Outcome {
    let no = |reason| -> No { (reason, "tickets are redeemed here".into()) };
    match ask {
        Some(Ask::Ping(_)) => done(),
        Some(Ask::Redeem(redeem)) => inner.redeem(peer, process, at, &redeem.ticket).await,
        _ => Err(no(Refusal::Unsupported)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn the_directory_is_private_and_goes_with_the_fd_socket() {
        let instance = InstanceId::random().unwrap();
        let fd_socket = FdSocketPath::prepare(&FdSocketAt::Anywhere, instance, &Peers::same_user());
        let fd_socket = fd_socket.unwrap().unwrap();
        let directory = fd_socket.path().parent().unwrap().to_owned();
        assert_eq!(mode(&directory), 0o700);
        fs::write(fd_socket.path(), "").unwrap();
        // The path is taken: another path, or none, but never the same.
        if let Ok(again) = FdSocketPath::private(instance, &Peers::same_user()) {
            assert_ne!(again.path(), fd_socket.path());
        }
        drop(fd_socket);
        assert!(!directory.exists());
    }

    #[test]
    fn others_can_reach_it_where_they_are_let_in() {
        let instance = InstanceId::random().unwrap();
        let peers = Peers::same_user().any_user();
        let fd_socket = FdSocketPath::prepare(&FdSocketAt::Anywhere, instance, &peers);
        let fd_socket = fd_socket.unwrap().unwrap();
        assert_eq!(mode(fd_socket.path().parent().unwrap()), 0o711);
    }
}
