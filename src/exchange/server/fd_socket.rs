//! The fd socket: a Unix socket, in a directory of its own, where tickets are redeemed for fds.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use tokio::time::timeout;

use super::ServerCore;
use super::admission::OfPeer;
use super::connection::answer;
use super::folder::{self, FD_SOCKET, Folder};
use super::options::FdSocketAt;
use super::outcome::done;
use super::process::Known;
use crate::protocol::{Ask, Request, decode};
use crate::share::{InstanceId, Peers};
use crate::transport::Connection;
use crate::{Error, Refusal, Result};

/// The longest path of a Unix socket (`sockaddr_un` has 108 bytes, including a final NUL).
const MAX_PATH: usize = 107;

/// The fd socket's path; dropping it removes the folder that was created for it.
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
        let mut last = Error::invalid("fd socket", "no directory can hold it: set its path");
        for place in places.into_iter().flatten() {
            let path = Folder::path_in(&place, instance).join(FD_SOCKET);
            if !path.is_absolute() || path.as_os_str().len() > MAX_PATH {
                continue;
            }
            folder::sweep(&place);
            let created = Folder::create(&place, instance).map_err(|error| last = error);
            let Ok(folder) = created else {
                continue;
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
}

/// Serves one connection at the fd socket: one request after the other. There is no session.
pub(super) async fn serve(inner: &ServerCore, connection: Connection, of_peer: OfPeer) {
    let served = tokio::select! {
        () = inner.ended.cancelled() => Ok(()),
        served = converse(inner, connection, &of_peer) => served,
    };
    if let Err(error) = served {
        tracing::info!(%error, "at the fd socket");
    }
}

async fn converse(inner: &ServerCore, mut connection: Connection, of_peer: &OfPeer) -> Result<()> {
    let fds = inner.fds_of(&connection.peer);
    let process = Known::of(&mut connection);
    let silence = inner.silence();
    let limit = inner.limits.hello_bytes;
    // After silence the client may connect again: nothing is lost.
    while let Ok(frame) = timeout(silence, connection.reader.read(limit)).await {
        let Some(frame) = frame? else {
            break;
        };
        let (id, ask): Request = decode(&frame.bytes).inspect_err(|_| {
            inner.counters.count(|counters| &counters.protocol_errors);
        })?;
        inner.counters.count(|counters| &counters.requests);
        drop(frame);
        let (peer, pid) = (&connection.peer, connection.pid);
        let outcome = match ask {
            Ask::Ping => done(),
            Ask::Redeem(redeem) => {
                let at = (&fds, &of_peer.account);
                let ticket = (&redeem.ticket, connection.queues);
                (inner.redeem(peer, process.as_ref(), at, ticket)).await
            }
            _ => Err((Refusal::Unsupported, "tickets are redeemed here".into())),
        };
        if let Err((reason, _)) = &outcome {
            inner
                .audit
                .refused_without_session("redeem", Some(peer), pid, reason.word());
        }
        answer(inner, &mut connection.writer, id, outcome).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn the_directory_is_private_and_goes_with_the_fd_socket() {
        let instance = InstanceId::random().unwrap();
        let fd_socket = FdSocketPath::prepare(&FdSocketAt::Anywhere, instance, &Peers::same_user());
        let fd_socket = fd_socket.unwrap().unwrap();
        let directory = fd_socket.path.parent().unwrap().to_owned();
        assert_eq!(mode(&directory), 0o700);
        fs::write(&fd_socket.path, "").unwrap();
        // The path is taken: another path, or none, but never the same.
        if let Ok(again) = FdSocketPath::private(instance, &Peers::same_user()) {
            assert_ne!(again.path, fd_socket.path);
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
        assert_eq!(mode(fd_socket.path.parent().unwrap()), 0o711);
    }
}
