//! Leaving a group.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::limits::deadline;
use crate::protocol::{Answer, Ask, Leave};
use crate::{Client, Refusal, Result};

/// Leaves and waits for the others. Asks once more if the connection breaks, because the client resumes its
/// session.
pub(super) async fn say_leave(client: &Client, leave: &Leave, within: Duration) -> Result<Answer> {
    let until = deadline(within);
    let ask = || {
        let left = until.saturating_duration_since(Instant::now());
        let ask = Ask::Leave(Leave {
            ms: left.as_millis().try_into().unwrap_or(u64::MAX),
            ..leave.clone()
        });
        client.call(ask, left.saturating_add(Duration::from_secs(5)))
    };
    let broke = match ask().await {
        Err(error) if error.is_peer_lost() => error,
        answer => return answer,
    };
    match ask().await {
        // The server no longer knows whether all have left or some were lost.
        Err(error) if error.refusal() == Some(&Refusal::NotFound) => Err(broke),
        answer => answer,
    }
}

/// Tells the server in the background that a rank leaves, after it has unmapped everything. If the runtime
/// has ended, the session times out instead.
pub(super) fn leave_behind(
    runtime: &Handle,
    client: Client,
    leave: Leave,
    unmapping: Option<JoinHandle<()>>,
) {
    runtime.spawn(async move {
        unmapped(unmapping).await;
        let _ = client.call(Ask::Leave(leave), Duration::from_secs(5)).await;
    });
}

/// Waits until a dropped call of [`Group::leave`](super::Group::leave) has finished unmapping.
pub(super) async fn unmapped(unmapping: Option<JoinHandle<()>>) {
    if let Some(unmapping) = unmapping {
        // A panic is reported where it happens.
        let _ = unmapping.await;
    }
}

/// Tells the server when a rank gives up after the agreement, so that the others do not wait.
pub(super) struct Leaving {
    pub(super) client: Option<Client>,
    pub(super) leave: Leave,
    pub(super) runtime: Handle,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if let Some(client) = self.client.take() {
            leave_behind(&self.runtime, client, self.leave.clone(), None);
        }
    }
}
