//! Ends what nobody goes on with.

use std::sync::Arc;
use std::time::Instant;

use super::Inner;

/// Ends sessions, tickets and groups' rounds when their time is over, until the server ends.
pub(super) async fn run(inner: Arc<Inner>) {
    loop {
        let groups = inner.groups.deadline().map(|at| at.into_std());
        let deadline = {
            let state = inner.state();
            // Tickets are looked at when they are redeemed: this only clears them away.
            let tickets = (!state.tickets.is_empty()).then(|| Instant::now() + inner.ticket);
            [state.leases.deadline(), tickets, groups]
                .into_iter()
                .flatten()
                .min()
        };
        let sleep = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = inner.ending() => return,
            () = inner.janitor.notified() => {}
            () = sleep => {
                inner.expire(Instant::now());
                inner.thin_out().await;
            }
        }
    }
}
