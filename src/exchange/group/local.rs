//! Switches a rank to the Unix socket of its group's server.

use std::path::Path;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};

use crate::Result;
use crate::client::{Client, ClientOptions, may_pass};
use crate::driver::Driver;

/// The number of attempts.
const TRIES: u32 = 6;
/// The first pause between attempts; each pause is twice the one before.
const PAUSE: Duration = Duration::from_millis(50);

/// Connects to the server's Unix socket at `path`, and tries again if a busy server hangs up or does not
/// answer within the time of a handshake. Without the socket this rank cannot pass fds, and so no rank can.
///
/// A server that does not admit this user also hangs up. So the attempts are few and take at most half of the
/// time until `until`: joining without the socket needs time too.
pub(super) async fn connect_local(
    path: &Path,
    dial: impl Fn() -> ClientOptions,
    handshake: Duration,
    driver: &Driver,
    until: Instant,
) -> Result<Client> {
    let begun = Instant::now();
    let half = begun + until.saturating_duration_since(begun) / 2;
    let (mut tries, mut pause) = (0, PAUSE);
    loop {
        tries += 1;
        let left = half.saturating_duration_since(Instant::now());
        let error = match dial().timeout(left.min(handshake)).connect(driver).await {
            Err(error) if may_pass(&error) => error,
            done => return done,
        };
        if tries == TRIES || Instant::now() + pause >= half || !is_listened_at(path).await {
            return Err(error);
        }
        sleep(pause).await;
        pause *= 2;
    }
}

/// Whether a process listens at a Unix socket, even if it is too busy to accept.
async fn is_listened_at(path: &Path) -> bool {
    match UnixStream::connect(path).await {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::PathBuf;

    use tokio::net::UnixListener;

    use super::*;
    use crate::{Address, Server};
    use crate::{Error, Machine, ShareError};

    /// Dials `path` within a minute, and counts the attempts.
    async fn connect(path: PathBuf) -> (Result<Client>, u32) {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let tries = Cell::new(0);
        let dial = || {
            tries.set(tries.get() + 1);
            Client::options(Address::Unix(path.clone())).fabric(true)
        };
        let until = Instant::now() + Duration::from_secs(60);
        let handshake = Duration::from_secs(10);
        let connected = connect_local(&path, dial, handshake, &driver, until).await;
        (connected, tries.get())
    }

    /// Hangs up on the first `most` connections, and forwards the others to another socket.
    async fn hang_up(at: UnixListener, most: u32, to: PathBuf) {
        for count in 0_u32.. {
            let (mut from, _) = at.accept().await.unwrap();
            if count >= most {
                let mut to = UnixStream::connect(&to).await.unwrap();
                tokio::spawn(
                    async move { tokio::io::copy_bidirectional(&mut from, &mut to).await },
                );
            }
        }
    }

    #[tokio::test]
    async fn who_hangs_up_is_dialled_again() {
        let folder = tempfile::tempdir().unwrap();
        let (path, real) = (folder.path().join("busy"), folder.path().join("real"));
        let server = Server::options().listen(Address::Unix(real.clone()));
        let server = server.start().await.unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        let busy = tokio::spawn(hang_up(listener, 3, real));
        let (client, tries) = connect(path).await;
        assert_eq!(client.unwrap().instance(), server.instance());
        assert!(tries > 1);
        busy.abort();
    }

    #[tokio::test]
    async fn not_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("never");
        let listener = UnixListener::bind(&path).unwrap();
        let never = tokio::spawn(hang_up(listener, u32::MAX, PathBuf::new()));
        let (client, tries) = connect(path).await;
        let error = client.unwrap_err();
        assert!(
            matches!(error, Error::Share(ShareError::PeerLost { .. })),
            "{error}"
        );
        assert_eq!(tries, TRIES);
        never.abort();
    }

    #[tokio::test]
    async fn where_nobody_listens_once_is_enough() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nobody");
        let (client, tries) = connect(path.clone()).await;
        assert!(client.is_err());
        assert_eq!(tries, 1);
        // A socket file left by an earlier listener.
        drop(UnixListener::bind(&path).unwrap());
        let (client, tries) = connect(path).await;
        assert!(client.is_err());
        assert_eq!(tries, 1);
    }
}
