//! Ends sessions and leases at their deadlines.

use std::sync::Arc;
use std::time::Instant;

use super::ServerCore;
use crate::Tls;

/// Ends sessions at their deadlines, and starts to wait for followed processes,
/// until the server ends.
pub(super) async fn run(inner: Arc<ServerCore>) {
    let mut reloads = inner.tls.as_ref().map(Tls::reloads);
    loop {
        inner.watch_processes();
        let deadline = {
            let state = inner.state();
            let expiry = state.credentials.deadline((inner.wall_clock)());
            let recall = state.recalls.first();
            let audit = inner.audit.deadline();
            [state.leases.deadline(), expiry, recall, audit]
                .into_iter()
                .flatten()
                .min()
        };
        let sleep = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now).into());
        let reloaded = async {
            match &mut reloads {
                Some(reloads) => reloads.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = inner.ended.cancelled() => return,
            () = inner.janitor.notified() => {}
            () = sleep, if deadline.is_some() => {
                inner.expire(Instant::now());
                inner.audit.report_suppressed(Instant::now());
                inner.verify_expired().await;
                inner.thin_out().await;
            }
            () = reloaded => inner.verify_all().await,
        }
    }
}
