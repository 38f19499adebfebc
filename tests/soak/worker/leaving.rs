//! The requests, leases and connections that a worker drops; in the end nothing is left of them.

use std::time::{Duration, Instant};

use egmem::exchange::{Client as Connection, CreateOptions};

use super::{MOST, Worker};
use crate::role::say;

impl Worker {
    /// Drops requests before they are answered.
    pub(super) async fn cancel(&mut self, connection: &Connection) {
        let soon = Duration::from_micros(self.rng.u64(..3000));
        let name = self.own(connection);
        let _ = tokio::time::timeout(soon, connection.fetch(&name).go()).await;
        let soon = Duration::from_micros(self.rng.u64(..3000));
        self.written.remove(&name);
        let options = CreateOptions::new(&name, self.rng.u64(4096..MOST));
        let _ = tokio::time::timeout(soon, connection.create(options)).await;
        self.client.tally.count("cancelled");
    }

    /// A lease whose handles are never imported.
    pub(super) async fn lease_only(&mut self, connection: &Connection) {
        let leased = connection.fetch("scratch").lease().await;
        let leased = self.note("lease", leased);
        self.client.brink(&mut self.rng, "leased");
        drop(leased);
    }

    /// Ends the connection, and keeps its leases or gives them back first.
    pub(super) async fn leave(&mut self, connection: Connection) {
        self.connection = None;
        if self.rng.bool() {
            self.held.clear();
        }
        connection.close().await;
        self.held.clear();
        self.client.tally.count("close");
    }

    /// Releases everything and deletes its names, so that the service is as before the worker came.
    pub(super) async fn clear(&mut self) {
        let end = Instant::now() + Duration::from_secs(60);
        for memory in self.held.drain(..) {
            let _ = memory.release().await;
        }
        loop {
            if let Some(connection) = self.connect().await {
                let prefix = self.prefix(&connection);
                match connection.list(&prefix).await {
                    Ok(entries) if entries.is_empty() => {
                        self.connection = None;
                        connection.close().await;
                        return;
                    }
                    Ok(entries) => {
                        for entry in entries {
                            let patience = Duration::from_secs(1);
                            let _ = connection.delete(entry.name, patience).await;
                        }
                    }
                    Err(_) => self.connection = None,
                }
            }
            if Instant::now() > end {
                say("violation", "names that cannot be deleted in a minute");
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
