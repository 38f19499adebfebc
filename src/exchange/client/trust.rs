//! Tracks the server's certificate and this process's own while a connection lasts.

use std::sync::Arc;
use std::time::SystemTime;

use tokio::time::sleep;

use super::session::ClientSession;
use crate::tls::{Credential, WALL_CLOCK};
use crate::{Distrust, Error, Security};

/// Waits until the server's certificate is no longer valid, or this process has a new one and no user waits
/// for an answer. Returns why the connection is to end.
pub(super) async fn watch(session: &ClientSession, credential: Option<Arc<Credential>>) -> Error {
    let (Security::Tls(tls), Some(credential)) = (&session.dial.options.security, credential)
    else {
        return std::future::pending().await;
    };
    let mut reloads = tls.reloads();
    let mut reloaded = tls.has_reloaded(&credential);
    let mut due = credential.next_expiry(SystemTime::UNIX_EPOCH);
    loop {
        let now = SystemTime::now();
        let expired = due.is_some_and(|due| due <= now);
        if reloaded || expired {
            if let Err(why) = tls.verify(&credential, now) {
                return Error::not_trusted(session.peer(), Distrust::Certificate, why);
            }
            due = credential.next_expiry(now);
        }
        // The server ends the session when the certificate that it has seen expires.
        let renews = !session.dial.options.reconnect.is_never() && tls.is_renewed(&credential);
        if renews && !session.is_asking() {
            let why = "this process connects anew with its new certificate";
            return Error::peer_lost(session.peer(), why);
        }
        reloaded = tokio::select! {
            () = reloads.next() => true,
            // Timers do not run while the machine is suspended.
            () = sleep(WALL_CLOCK) => false,
        };
    }
}
