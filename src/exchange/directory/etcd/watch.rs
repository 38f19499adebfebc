//! The task that watches names in etcd.

use std::collections::BTreeMap;
use std::sync::Arc;

use etcd_client::{EventType, WatchOptions};
use tokio::runtime::Handle;
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
        Ok(start(Arc::clone(self), prefix, &runtime()?))
    }
}

/// Starts the task that watches the names that begin with `prefix`.
fn start(etcd: Arc<Etcd>, prefix: &str, runtime: &Handle) -> DirectoryWatch {
    let (sender, events) = mpsc::channel(QUEUE);
    let mut task = Task {
        prefix: etcd.keys.names(prefix),
        etcd,
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
    DirectoryWatch { events }
}

struct Task {
    etcd: Arc<Etcd>,
    prefix: String,
    events: mpsc::Sender<DirectoryEvent>,
    /// The entries that were reported.
    told: BTreeMap<(String, InstanceId), Exporter>,
}

/// The receiver is gone.
struct Closed;

enum End {
    Closed,
    Failed(Error),
}

impl From<Closed> for End {
    fn from(_: Closed) -> Self {
        Self::Closed
    }
}

impl From<Error> for End {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Task {
    async fn run(&mut self) {
        let mut failures = 0;
        loop {
            match self.follow(&mut failures).await {
                End::Closed => return,
                End::Failed(error) => {
                    if failures == 0 && self.tell(DirectoryEvent::Away(error)).await.is_err() {
                        return;
                    }
                }
            }
            tokio::time::sleep(self.etcd.pause(failures)).await;
            failures += 1;
        }
    }

    async fn follow(&mut self, failures: &mut u32) -> End {
        match self.try_follow(failures).await {
            Ok(never) => match never {},
            Err(end) => end,
        }
    }

    /// Lists the names, reports the changes since the last list, and follows later changes.
    async fn try_follow(&mut self, failures: &mut u32) -> Result<std::convert::Infallible, End> {
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
        let key = |name: &String, exporter: &Exporter| {
            exporter.instance.map(|instance| (name.clone(), instance))
        };
        let there: std::collections::BTreeSet<_> = now
            .iter()
            .filter_map(|(_, (name, exporter))| key(name, exporter))
            .collect();
        let gone: Vec<_> = self
            .told
            .keys()
            .filter(|key| !there.contains(key))
            .cloned()
            .collect();
        for (name, instance) in gone {
            self.gone(name, instance).await?;
        }
        for (_, (name, exporter)) in now {
            self.found(name, exporter).await?;
        }
        self.tell(DirectoryEvent::Current).await?;
        Ok(revision)
    }

    async fn found(&mut self, name: String, exporter: Exporter) -> Result<(), Closed> {
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

    async fn gone(&mut self, name: String, instance: InstanceId) -> Result<(), Closed> {
        if self.told.remove(&(name.clone(), instance)).is_none() {
            return Ok(());
        }
        self.tell(DirectoryEvent::Gone { name, instance }).await
    }

    async fn tell(&self, event: DirectoryEvent) -> Result<(), Closed> {
        self.events.send(event).await.map_err(|_| Closed)
    }
}
