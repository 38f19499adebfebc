//! The task that watches names in etcd.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;

use etcd_client::{EventType, WatchOptions};
use tokio::sync::mpsc;

use super::super::exporter::Exporter;
use super::super::watch::{DirectoryEvent, DirectoryWatch};
use super::{Etcd, end_of, runtime};
use crate::share::InstanceId;
use crate::{Error, Result};

/// Events in the queue; when it is full, etcd is read only as fast as they are received.
const QUEUE: usize = 256;

impl Etcd {
    /// Watches the names that begin with `prefix`.
    pub fn watch(self: &Arc<Self>, prefix: &str) -> Result<DirectoryWatch> {
        let runtime = runtime()?;
        let (sender, events) = mpsc::channel(QUEUE);
        let mut task = Task {
            prefix: self.keys.names(prefix),
            etcd: Arc::clone(self),
            events: sender,
            told: BTreeMap::new(),
        };
        runtime.spawn(async move {
            let gone = task.events.clone();
            tokio::select! {
                () = gone.closed() => {}
                () = task.run() => {}
            }
        });
        Ok(DirectoryWatch { events })
    }
}

/// Why a task stops: the directory's error, or `None` when the receiver is gone.
type End = Option<Error>;

struct Task {
    etcd: Arc<Etcd>,
    prefix: String,
    events: mpsc::Sender<DirectoryEvent>,
    /// The entries that were reported.
    told: BTreeMap<(String, InstanceId), Exporter>,
}

impl Task {
    async fn run(&mut self) {
        let mut failures = 0;
        loop {
            let Err(end) = self.follow(&mut failures).await;
            let Some(error) = end else { return };
            if failures == 0 && self.tell(DirectoryEvent::Away(error)).await.is_err() {
                return;
            }
            tokio::time::sleep(self.etcd.pause(failures)).await;
            failures += 1;
        }
    }

    /// Lists the names, reports the changes since the last list, and follows later changes.
    async fn follow(&mut self, failures: &mut u32) -> Result<Infallible, End> {
        let revision = self.list().await?;
        *failures = 0;
        let options = WatchOptions::new()
            .with_range(end_of(&self.prefix))
            .with_start_revision(revision + 1);
        let prefix = self.prefix.clone();
        let mut stream = self
            .etcd
            .call(|mut client| async move { client.watch(prefix, Some(options)).await })
            .await?;
        loop {
            let answer = match stream.message().await {
                Ok(Some(answer)) => answer,
                Ok(None) => return Err(self.etcd.away("the connection has ended").into()),
                Err(error) => return Err(self.etcd.failed(&error).into()),
            };
            if answer.canceled() {
                return Err(self.etcd.away(answer.cancel_reason()).into());
            }
            for event in answer.events() {
                let Some(entry) = event.kv() else { continue };
                match event.event_type() {
                    EventType::Put => {
                        if let Some((name, exporter)) = self.etcd.read(entry) {
                            self.found(name, exporter).await?;
                        }
                    }
                    EventType::Delete => {
                        if let Some((name, instance)) = self.etcd.keys.read(entry.key()) {
                            self.gone(name, instance).await?;
                        }
                    }
                }
            }
        }
    }

    /// Lists the names and reports the changes since the last list. Returns etcd's revision.
    async fn list(&mut self) -> Result<i64, End> {
        let (entries, revision) = self.etcd.list(self.prefix.clone()).await?;
        let mut now: Vec<_> = entries
            .iter()
            .filter_map(|entry| Some((entry.create_revision(), self.etcd.read(entry)?)))
            .collect();
        now.sort_by_key(|(revision, _)| *revision);
        let key = |(_, (name, exporter)): &(_, (String, Exporter))| {
            Some((name.clone(), exporter.instance?))
        };
        let there: BTreeSet<_> = now.iter().filter_map(key).collect();
        let gone = self.told.keys().filter(|key| !there.contains(key));
        for (name, instance) in gone.cloned().collect::<Vec<_>>() {
            self.gone(name, instance).await?;
        }
        for (_, (name, exporter)) in now {
            self.found(name, exporter).await?;
        }
        self.tell(DirectoryEvent::Current).await?;
        Ok(revision)
    }

    async fn found(&mut self, name: String, exporter: Exporter) -> Result<(), End> {
        let Some(instance) = exporter.instance else {
            return Ok(());
        };
        let before = self.told.insert((name.clone(), instance), exporter.clone());
        // An exporter that registers again is not a change.
        if before.as_ref() == Some(&exporter) {
            return Ok(());
        }
        self.tell(DirectoryEvent::Found { name, exporter }).await
    }

    async fn gone(&mut self, name: String, instance: InstanceId) -> Result<(), End> {
        match self.told.remove(&(name.clone(), instance)) {
            Some(_) => self.tell(DirectoryEvent::Gone { name, instance }).await,
            None => Ok(()),
        }
    }

    async fn tell(&self, event: DirectoryEvent) -> Result<(), End> {
        self.events.send(event).await.map_err(|_| None)
    }
}
