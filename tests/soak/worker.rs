//! A client that does everything a client can do with names, at random, and checks all bytes.

mod leaving;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use egmem::driver::HandleType;
use egmem::exchange::{
    Client as Connection, CreateOptions, Error, LeaseState, Refusal, RemoteBuffer,
};
use fastrand::Rng;

use crate::bytes::{self, Found};
use crate::role::{Client, limits, say};

/// How many names each of a process's two workers has at most, and holds at most.
const NAMES: u32 = 3;
const HOLDS: usize = 4;
/// The most bytes of a name: a chunk and a rest.
const MOST: u64 = 6 << 20;

/// Runs two workers until the parent wants a pause; then all is released and deleted.
pub async fn work(client: &Arc<Client>) {
    let workers: Vec<_> = (0..2)
        .map(|index| {
            let client = Arc::clone(client);
            tokio::spawn(async move { Worker::new(client, index).run().await })
        })
        .collect();
    for worker in workers {
        if let Err(error) = worker.await {
            say("violation", format!("a worker panicked: {error}"));
        }
    }
}

struct Worker {
    client: Arc<Client>,
    index: u64,
    rng: Rng,
    connection: Option<Connection>,
    held: Vec<RemoteBuffer>,
    /// Its names that it has written to in this life of the service.
    written: HashSet<String>,
}

impl Worker {
    fn new(client: Arc<Client>, index: u64) -> Self {
        Self {
            rng: Rng::with_seed(client.setup.seed ^ index),
            client,
            index,
            connection: None,
            held: Vec::new(),
            written: HashSet::new(),
        }
    }

    async fn run(mut self) {
        while self.client.goes_on() {
            self.step().await;
            let pause = Duration::from_millis(self.rng.u64(..20));
            tokio::time::sleep(pause).await;
        }
        self.clear().await;
    }

    fn note<T>(&self, what: &str, result: Result<T, impl Into<Error>>) -> Option<T> {
        self.client.tally.note(what, result)
    }

    async fn step(&mut self) {
        let Some(connection) = self.connect().await else {
            return tokio::time::sleep(Duration::from_millis(50)).await;
        };
        self.answer_withdrawals().await;
        match self.rng.u32(..23) {
            0..4 => self.create(&connection).await,
            4..8 => self.fetch_own(&connection).await,
            8..12 => self.fetch_any(&connection).await,
            12..16 => self.let_go().await,
            16..18 => self.delete(&connection).await,
            18 => self.fetch_configured(&connection).await,
            19 => self.wait(&connection).await,
            20 => self.cancel(&connection).await,
            21 => self.lease_only(&connection).await,
            _ if self.rng.u32(..4) == 0 => self.leave(connection).await,
            _ => self.look_at_held(),
        }
    }

    async fn connect(&mut self) -> Option<Connection> {
        if let Some(connection) = &self.connection {
            return Some(connection.clone());
        }
        let options = Connection::options(self.client.address())
            .security(self.client.security.clone())
            .limits(limits())
            .timeout(Duration::from_secs(5))
            .agent(&self.client.setup.name);
        let connect = options.connect(&self.client.driver);
        let connected = self.client.risk(&mut self.rng, "connecting", connect).await;
        self.connection = self.note("connect", connected);
        self.connection.clone()
    }

    /// One of this worker's names.
    fn own(&mut self, connection: &Connection) -> String {
        let number = self.rng.u32(..NAMES);
        format!("{}{number}", self.prefix(connection))
    }

    fn prefix(&self, connection: &Connection) -> String {
        let name = &self.client.setup.name;
        format!("{}/{name}.{}.", connection.name(), self.index)
    }

    async fn create(&mut self, connection: &Connection) {
        let name = self.own(connection);
        let bytes = 8 * self.rng.u64(512..MOST / 8);
        let mut options = CreateOptions::new(&name, bytes).timeout(Duration::from_secs(10));
        if self.rng.bool() {
            options = options.share_with("*");
        }
        let work = connection.create(options);
        let created = self.client.risk(&mut self.rng, "creating", work).await;
        let exists = matches!(
            &created,
            Err(Error::Refused {
                reason: Refusal::Exists,
                ..
            })
        );
        if !exists {
            self.written.remove(&name);
        }
        if self.note("create", created).is_none() {
            return;
        }
        self.client.brink(&mut self.rng, "created");
        let Some(memory) = self.fetch(connection, &name).await else {
            return;
        };
        // New memory must not contain another client's bytes.
        if let Ok(Some((index, word))) = bytes::not_zero(&memory) {
            say(
                "violation",
                format!("{name}: new, and word {index} is {word:#x}"),
            );
        }
        self.write(&memory, &name);
        self.keep(memory).await;
    }

    async fn fetch(&mut self, connection: &Connection, name: &str) -> Option<RemoteBuffer> {
        let mut options = connection.fetch(name);
        options = match self.rng.u32(..4) {
            0 => options.via(HandleType::Fabric),
            1 => options.via(HandleType::PosixFd),
            _ => options,
        };
        let fetched = self
            .client
            .risk(&mut self.rng, "fetching", options.go())
            .await;
        let memory = self.note("fetch", fetched)?;
        self.client
            .tally
            .count(format!("fetch via {}", memory.via()));
        self.client.brink(&mut self.rng, "holding");
        Some(memory)
    }

    fn write(&mut self, memory: &RemoteBuffer, name: &str) {
        let seed = self.rng.u64(..);
        let written = bytes::write(memory, name, seed);
        if self.note("write", written).is_some() {
            self.written.insert(name.to_owned());
        }
    }

    /// Checks the bytes under a name; `Empty` is wrong where this worker has written.
    fn check(&self, memory: &RemoteBuffer, own: bool) -> Option<Found> {
        let name = memory.name();
        match self.note("check", bytes::check(memory, name))? {
            Ok(Found::Empty) if own && self.written.contains(name) && !memory.state().is_lost() => {
                say("violation", format!("{name}: what was written is gone"));
                None
            }
            Ok(found) => {
                self.client.tally.count(format!("checked: {found:?}"));
                Some(found)
            }
            Err(wrong) => {
                say("violation", wrong);
                None
            }
        }
    }

    async fn fetch_own(&mut self, connection: &Connection) {
        let name = self.own(connection);
        let Some(memory) = self.fetch(connection, &name).await else {
            return;
        };
        let found = self.check(&memory, true);
        if found != Some(Found::Good) || self.rng.bool() {
            self.write(&memory, &name);
        }
        self.client.brink(&mut self.rng, "written");
        self.keep(memory).await;
    }

    async fn fetch_any(&mut self, connection: &Connection) {
        let list = connection.list("");
        let listed = self.client.risk(&mut self.rng, "listing", list).await;
        let Some(entries) = self.note("list", listed) else {
            return;
        };
        let prefix = self.prefix(connection);
        let others = entries
            .iter()
            .filter(|entry| entry.name.contains("/soak-") && !entry.name.starts_with(&prefix))
            .collect::<Vec<_>>();
        let Some(name) = self.rng.choice(others).map(|entry| entry.name.clone()) else {
            return;
        };
        if let Some(memory) = self.fetch(connection, &name).await {
            self.check(&memory, false);
            self.keep(memory).await;
        }
    }

    async fn fetch_configured(&mut self, connection: &Connection) {
        let name = self.rng.choice(["weights", "scratch"]).expect("two");
        let Some(memory) = self.fetch(connection, name).await else {
            return;
        };
        match name {
            "weights" => {
                let zero = self.note("read", bytes::not_zero(&memory)).flatten();
                if let Some((index, word)) = zero {
                    say("violation", format!("weights: word {index} is {word:#x}"));
                }
                let _ = self.note("release", memory.release().await);
            }
            _ => {
                let at = 8 * self.rng.u64(..memory.len() / 8);
                let word = self.rng.u64(..);
                let _ = self.note("write scratch", memory.put(at, word));
                self.keep(memory).await;
            }
        }
    }

    /// Holds memory on, or gives it back in one way or another.
    async fn keep(&mut self, memory: RemoteBuffer) {
        self.held.push(memory);
        if self.held.len() > HOLDS || self.rng.bool() {
            self.let_go().await;
        }
    }

    async fn let_go(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let at = self.rng.usize(..self.held.len());
        let memory = self.held.swap_remove(at);
        if self.rng.u32(..3) == 0 {
            drop(memory);
            self.client.tally.count("drop");
            return;
        }
        let released = self
            .client
            .risk(&mut self.rng, "releasing", memory.release());
        let released = released.await;
        let _ = self.note("release", released);
    }

    /// Gives back the memory that the service asks for, and drops memory whose lease is lost.
    async fn answer_withdrawals(&mut self) {
        for at in (0..self.held.len()).rev() {
            match self.held[at].state() {
                LeaseState::Held => {}
                state if state.is_lost() => {
                    self.client.tally.count("lease lost");
                    // Lost or not, the bytes are not given to others while they are mapped here.
                    let memory = self.held.swap_remove(at);
                    if memory.name().contains("/soak-") {
                        self.check(&memory, false);
                    }
                }
                _ => {
                    self.client.tally.count("withdrawal answered");
                    let memory = self.held.swap_remove(at);
                    let _ = self.note("release", memory.release().await);
                }
            }
        }
    }

    fn look_at_held(&mut self) {
        for memory in &self.held {
            if memory.name().contains("/soak-") {
                self.check(memory, false);
            }
        }
    }

    async fn delete(&mut self, connection: &Connection) {
        let name = self.own(connection);
        let patience = Duration::from_millis(self.rng.u64(..300));
        self.held.retain(|memory| memory.name() != name);
        self.written.remove(&name);
        let delete = connection.delete(&name, patience);
        let deleted = self.client.risk(&mut self.rng, "deleting", delete).await;
        let _ = self.note("delete", deleted);
    }

    async fn wait(&mut self, connection: &Connection) {
        let name = self.own(connection);
        let patience = Duration::from_millis(self.rng.u64(..100));
        let wait = connection.wait(&name, patience);
        let waited = self.client.risk(&mut self.rng, "waiting", wait).await;
        let _ = self.note("wait", waited);
    }
}
