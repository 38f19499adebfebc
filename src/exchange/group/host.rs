//! The server that one rank starts for its group.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

use super::Admission;
use super::options::GroupOptions;
use crate::share::InstanceId;
use crate::{Address, Error as ExchangeError, PeerName, Result, Server, Who};

/// How often the server checks whether the other ranks have gone.
const LOOK: Duration = Duration::from_millis(5);
/// How long it waits after the last departure while other ranks stay.
const LINGER: Duration = Duration::from_secs(2);
/// How long it waits in total: many ranks on a busy machine take a while to leave.
const LONGEST: Duration = Duration::from_secs(60);

/// A group's server and the Unix socket for ranks of its machine.
///
/// If it is dropped without `close`, it closes in the background, so that the other ranks still get their
/// last answers.
pub(super) struct Hosted {
    /// `None` while it is being closed.
    running: Option<Running>,
    runtime: Handle,
}

/// A server, and the directory of its Unix socket if that has one of its own, which is removed with the server.
/// Dropped in this order: the directory outlives the server.
type Running = (Server, Option<Folder>);

/// A folder for a Unix socket, removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn create(others: bool) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("egmem-{}", InstanceId::random()?));
        let mode = if others { 0o711 } else { 0o700 };
        DirBuilder::new()
            .mode(mode)
            .create(&path)
            .map_err(|error| {
                ExchangeError::system(format!("creating {}", path.display()), &error)
            })?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
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
            .groups(options.name.clone(), who(options));
        if !options.address.is_unix() {
            let own = Folder::create(options.peers.reach_beyond_own_user())?;
            server = server.listen(Address::Unix(own.0.join("socket")));
            path = Some(own);
        }
        let server = server.start().await?;
        server.keep_room_for(&own_peer(), &options.name, &options.admission.message())?;
        Ok(Self {
            running: Some((server, path)),
            runtime: Handle::current(),
        })
    }

    /// Returns the address at which the starting rank joins: the Unix socket.
    pub fn address(&self, asked: &Address) -> Address {
        let unix = self.addresses().into_iter().find(Address::is_unix);
        unix.unwrap_or_else(|| asked.clone())
    }

    pub fn addresses(&self) -> Vec<Address> {
        let running = self.running.as_ref();
        running.map_or_else(Vec::new, |(server, _)| server.addresses())
    }

    /// Ends the server when the other ranks have gone, or soon after.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped early, closing continues in the background.
    pub async fn close(mut self) {
        if let Some(running) = self.running.take()
            && let Err(error) = self.runtime.spawn(close(running)).await
        {
            tracing::warn!(%error, "ending a group's server");
        }
    }
}

impl Drop for Hosted {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            // If the runtime has ended, the server has ended with it.
            self.runtime.spawn(close(running));
        }
    }
}

async fn close(running: Running) {
    let (server, _) = &running;
    all_gone(|| server.stats().connections).await;
    if let Err(error) = server.close(Duration::ZERO).await {
        tracing::warn!(%error, "ending a group's server");
    }
}

/// Returns the peer name of the starting rank, which connects over the Unix socket.
fn own_peer() -> PeerName {
    PeerName::User(rustix::process::geteuid().as_raw())
}

/// Returns which peers may ask to join.
fn who(options: &GroupOptions) -> Who {
    let who = match (&options.who, &options.admission) {
        (Some(who), _) | (None, Admission::Peers(who)) => who.clone(),
        (None, Admission::SamePeer) => Who::nobody(),
        (None, Admission::Secret(_)) => Who::anyone(),
    };
    who.and(own_peer())
}

/// Waits until no connection is left, or no more ranks leave.
///
/// A rank that is still leaving has an answer to read: if the server ended before, that rank would report the
/// group as lost.
async fn all_gone(connections: impl Fn() -> u64) {
    let begun = Instant::now();
    let (mut least, mut last) = (u64::MAX, begun);
    loop {
        let now = connections();
        if now < least {
            (least, last) = (now, Instant::now());
        }
        if now == 0 || last.elapsed() >= LINGER || begun.elapsed() >= LONGEST {
            return;
        }
        tokio::time::sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_goes_slowly_is_waited_for() {
        let begun = Instant::now();
        let each = LINGER / 2;
        all_gone(|| 9_u64.saturating_sub(begun.elapsed().div_duration_f32(each) as u64)).await;
        assert!(begun.elapsed() >= each * 9);
    }

    #[tokio::test(start_paused = true)]
    async fn who_stays_is_not() {
        let begun = Instant::now();
        all_gone(|| 1).await;
        assert!((LINGER..LINGER * 2).contains(&begun.elapsed()));
        // Ranks that leave one by one do not extend it forever.
        all_gone(|| u64::MAX - begun.elapsed().as_secs()).await;
        assert!(begun.elapsed() <= LINGER * 2 + LONGEST);
    }
}
