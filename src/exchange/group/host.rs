//! The server that one rank starts for its group.

use std::time::Duration;

use super::options::GroupOptions;
use crate::Result;
use crate::exchange::server::door::DoorPath;
use crate::exchange::{Address, PeerName, Server};
use crate::share::InstanceId;

/// How often a server looks whether the others have gone.
const LOOK: Duration = Duration::from_millis(5);
/// How long it waits for them at most, after their last word.
const LINGER: Duration = Duration::from_secs(2);

/// A group's server and the Unix socket for ranks of its machine.
pub(super) struct Hosted {
    server: Server,
    /// After the server: the directory goes with it.
    _path: Option<DoorPath>,
}

impl Hosted {
    pub async fn start(options: &GroupOptions) -> Result<Self> {
        let mut path = None;
        let mut server = Server::options()
            .listen(options.address.clone())
            .security(options.security.clone())
            .peers(options.peers.clone())
            .limits(options.limits.clone())
            .lease(options.lease)
            .heartbeat(options.lease / 4)
            // The starting rank itself comes over the Unix socket.
            .groups(options.who.clone().and(PeerName::User(own_user())))
            .door(None);
        if !options.address.is_unix() {
            let own = DoorPath::private(InstanceId::random()?, &options.peers)?;
            server = server.listen(Address::Unix(own.path().to_owned()));
            path = Some(own);
        }
        Ok(Self {
            server: server.start().await?,
            _path: path,
        })
    }

    /// Where the starting rank joins: at the Unix socket.
    pub fn address(&self, asked: &Address) -> Address {
        let addresses = self.server.addresses();
        let unix = addresses.into_iter().find(Address::is_unix);
        unix.unwrap_or_else(|| asked.clone())
    }

    pub fn addresses(&self) -> Vec<Address> {
        self.server.addresses()
    }

    /// Ends the server when the others have gone, or soon.
    pub async fn close(self) {
        let begun = tokio::time::Instant::now();
        while self.server.stats().connections > 0 && begun.elapsed() < LINGER {
            tokio::time::sleep(LOOK).await;
        }
        if let Err(error) = self.server.close(Duration::ZERO).await {
            tracing::warn!(%error, "ending a group's server");
        }
    }
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}
