//! Ends sessions and leases at their deadlines.

use std::sync::Arc;
use std::time::Instant;

use super::ServerCore;

/// Ends sessions at their deadlines, and starts to wait for followed processes,
/// until the server ends.
pub(super) async fn run(inner: Arc<ServerCore>) {
    loop {
        inner.watch_processes();
        let deadline = {
            let state = inner.state();
            let recall = state.recalls.first();
            let audit = inner.audit.deadline();
            [state.leases.deadline(), recall, audit]
                .into_iter()
                .flatten()
                .min()
        };
        let sleep = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now).into());
        tokio::select! {
            () = inner.ended.cancelled() => return,
            () = inner.janitor.notified() => {}
            () = sleep, if deadline.is_some() => {
                inner.expire(Instant::now());
                inner.audit.report_suppressed(Instant::now());
            }
        }
    }
}
