//! The certificates that sessions depend on, and when to verify them again.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use crate::tls::{Credential, WALL_CLOCK};

#[derive(Debug)]
struct DueCredential {
    credential: Arc<Credential>,
    /// When the next certificate of its chain expires.
    due: Option<SystemTime>,
}

/// The credential of each session over TLS.
#[derive(Debug, Default)]
pub(super) struct Credentials {
    sessions: HashMap<u64, DueCredential>,
    due: BTreeSet<(SystemTime, u64)>,
}

impl Credentials {
    /// Sets the credential of the session's connection.
    pub fn set(&mut self, session: u64, credential: Arc<Credential>) {
        self.remove(session);
        // The next check finds one that has expired already.
        let due = credential.next_expiry(SystemTime::UNIX_EPOCH);
        self.due.extend(due.map(|due| (due, session)));
        self.sessions
            .insert(session, DueCredential { credential, due });
    }

    pub fn remove(&mut self, session: u64) {
        if let Some(DueCredential { due: Some(due), .. }) = self.sessions.remove(&session) {
            self.due.remove(&(due, session));
        }
    }

    /// Returns whether the session still depends on that credential.
    pub fn is(&self, session: u64, credential: &Arc<Credential>) -> bool {
        let entry = self.sessions.get(&session);
        entry.is_some_and(|entry| Arc::ptr_eq(&entry.credential, credential))
    }

    /// Returns when to read the wall clock again; `None` if nothing expires.
    pub fn deadline(&self, now: SystemTime) -> Option<Instant> {
        let &(due, _) = self.due.first()?;
        let left = due.duration_since(now).unwrap_or_default();
        Some(Instant::now() + left.min(WALL_CLOCK))
    }

    /// Returns the sessions with a certificate that has expired by now. Each is returned again when the next
    /// certificate of its chain expires: a peer may send certificates that its trust does not depend on.
    pub fn take_due(&mut self, now: SystemTime) -> Vec<(u64, Arc<Credential>)> {
        let mut found = Vec::new();
        while let Some(&(due, session)) = self.due.first()
            && due <= now
        {
            self.due.pop_first();
            let Some(entry) = self.sessions.get_mut(&session) else {
                continue;
            };
            entry.due = entry.credential.next_expiry(now);
            self.due.extend(entry.due.map(|due| (due, session)));
            found.push((session, Arc::clone(&entry.credential)));
        }
        found
    }

    /// Returns all sessions.
    pub fn all(&self) -> Vec<(u64, Arc<Credential>)> {
        let all = self.sessions.iter();
        all.map(|(&session, entry)| (session, Arc::clone(&entry.credential)))
            .collect()
    }
}
