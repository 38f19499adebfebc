//! The state of a group, as the server reports it.

use std::sync::Arc;

use tokio::sync::{broadcast, watch};

use crate::Error;
use crate::client::Notified;

/// The state of a group.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct GroupState {
    /// Ranks that are gone without having left, in order. Their memory stays mapped here until it is dropped,
    /// but its contents are no longer maintained.
    pub lost: Vec<u32>,
    /// Why the group's server is lost, if it is. Mapped memory stays mapped. To the other ranks, this rank is
    /// lost then.
    pub server_lost: Option<Error>,
}

/// Waits until the server is lost.
pub(super) async fn server_lost(mut state: watch::Receiver<GroupState>) -> Error {
    let lost = state.wait_for(|state| state.server_lost.is_some()).await;
    let error = lost.ok().and_then(|state| state.server_lost.clone());
    match error {
        Some(error) => error,
        // The watcher has ended, so the state is final.
        None => std::future::pending().await,
    }
}

/// Keeps the state up to date.
pub(super) async fn follow(
    mut news: broadcast::Receiver<Notified>,
    state: watch::Sender<GroupState>,
    round: u64,
) {
    loop {
        match news.recv().await {
            Ok(Notified::Lost(lost)) if lost.round == round => state.send_modify(|state| {
                state.lost.extend(&lost.ranks);
                state.lost.sort_unstable();
                state.lost.dedup();
            }),
            Ok(Notified::SessionLost(error)) => {
                // The loss is reported often; only the first report is kept.
                state.send_if_modified(|state| {
                    let first = state.server_lost.is_none();
                    state
                        .server_lost
                        .get_or_insert_with(|| Arc::unwrap_or_clone(error));
                    first
                });
            }
            // The group closed the connection itself.
            Ok(Notified::Over) | Err(broadcast::error::RecvError::Closed) => return,
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
        }
    }
}
