//! The certificates that sessions depend on, and when to verify them again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use super::deadlines::Deadlines;
use crate::tls::{Credential, WALL_CLOCK};

/// The credential of each session over TLS.
#[derive(Debug, Default)]
pub(super) struct Credentials {
    sessions: HashMap<u64, Arc<Credential>>,
    /// When the next certificate of each session's chain expires.
    due: Deadlines<SystemTime>,
}

impl Credentials {
    /// Sets the credential of the session's connection.
    pub fn set(&mut self, session: u64, credential: Arc<Credential>) {
        // The next check finds one that has expired already.
        let due = credential.next_expiry(SystemTime::UNIX_EPOCH);
        self.due.set(session, due);
        self.sessions.insert(session, credential);
    }

    pub fn remove(&mut self, session: u64) {
        self.due.remove(session);
        self.sessions.remove(&session);
    }

    /// Returns whether the session still depends on that credential.
    pub fn is(&self, session: u64, credential: &Arc<Credential>) -> bool {
        let now = self.sessions.get(&session);
        now.is_some_and(|now| Arc::ptr_eq(now, credential))
    }

    /// Returns when to read the wall clock again; `None` if nothing expires.
    pub fn deadline(&self, now: SystemTime) -> Option<Instant> {
        let left = self.due.first()?.duration_since(now).unwrap_or_default();
        Some(Instant::now() + left.min(WALL_CLOCK))
    }

    /// Returns the sessions with a certificate that has expired by now. Each is returned again when the next
    /// certificate of its chain expires: a peer may send certificates that its trust does not depend on.
    pub fn take_due(&mut self, now: SystemTime) -> Vec<(u64, Arc<Credential>)> {
        let mut found = Vec::new();
        while let Some(session) = self.due.pop(now) {
            if let Some(credential) = self.sessions.get(&session) {
                self.due.set(session, credential.next_expiry(now));
                found.push((session, Arc::clone(credential)));
            }
        }
        found
    }

    /// Returns all sessions.
    pub fn all(&self) -> Vec<(u64, Arc<Credential>)> {
        let all = self.sessions.iter();
        all.map(|(&session, one)| (session, Arc::clone(one)))
            .collect()
    }
}
