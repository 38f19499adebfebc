//! The end of a program that does not wait for its server.

use std::sync::{Arc, Weak};

use super::ClientSession;

/// Closes a client's connection for a program that ends its use. It does not keep the client.
#[derive(Debug)]
pub(crate) struct Departing(Weak<ClientSession>);

impl Departing {
    /// Closes the connection without waiting for the server: releases are sent if there is a connection, and their
    /// answers are not awaited.
    pub(crate) fn depart(&self) {
        if let Some(session) = self.0.upgrade() {
            session.lock().departing = true;
            session.close();
        }
    }
}

impl From<&Arc<ClientSession>> for Departing {
    fn from(session: &Arc<ClientSession>) -> Self {
        Self(Arc::downgrade(session))
    }
}
