//! Fetches names from any exporter.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex as Lock};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::{Directory, Exporter};
use crate::ledger::Site;
use crate::limits::deadline;
use crate::per_driver::lock;
use crate::protocol::{Answer, Ask, List};
use crate::share::BootId;
use crate::{
    Address, Client, ClientOptions, Driver, Error, FetchOptions, Refusal, RemoteBuffer, Result,
};

/// The most clients that are cached.
const CLIENTS: usize = 1024;
/// Between two look-ups while waiting for a name: from, to.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// A client that is cached, or being created.
type Kept = Arc<Mutex<Option<Client>>>;
/// Creates a client's options.
type Dial = dyn Fn(Address) -> ClientOptions + Send + Sync;

/// Fetches memory by name from an exporter that the directory lists. Clones share their state.
///
/// It caches one [`Client`] for each exporter.
///
/// ```no_run
/// use egmem::Driver;
/// use egmem::exchange::directory::{Directory, Finder};
///
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let directory = Directory::fixed(["node7:7420".parse()?, "node8:7420".parse()?])?;
/// let finder = Finder::new(directory, &Driver::open()?);
/// let weights = finder.fetch("weights").await?;
/// # Ok::<(), egmem::exchange::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct Finder(Arc<FinderCore>);

struct FinderCore {
    directory: Directory,
    driver: Driver,
    dial: Box<Dial>,
    clients: Lock<HashMap<Address, Kept>>,
}

impl Finder {
    /// Returns a finder that finds names through `directory` and imports memory into `driver`, over plain
    /// connections.
    pub fn new(directory: Directory, driver: &Driver) -> Self {
        Self::with_clients(directory, driver, Client::options)
    }

    /// As [`new`](Self::new), with clients of these options: security, limits, timeout.
    pub fn with_clients(
        directory: Directory,
        driver: &Driver,
        options: impl Fn(Address) -> ClientOptions + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(FinderCore {
            directory,
            driver: driver.clone(),
            dial: Box::new(options),
            clients: Lock::default(),
        }))
    }

    /// Fetches a name with the defaults of [`FetchOptions`].
    ///
    /// # Errors
    /// Those of [`fetch_with`](Self::fetch_with).
    #[track_caller]
    pub fn fetch(&self, name: &str) -> impl Future<Output = Result<RemoteBuffer>> {
        self.fetch_with(name, |fetch| fetch)
    }

    /// Fetches a name. If several exporters hold it, those of a directory that knows names are tried in the
    /// order in which they registered it; of fixed addresses, the first to answer that it has the name is
    /// used. An exporter that has restarted since it registered is not mistaken for the old one.
    ///
    /// # Errors
    /// [`Error::Directory`] if the directory does not answer; [`Error::Refused`] with `not_found` if no
    /// exporter has the name; otherwise the error of the last exporter that should have it.
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing stays leased or mapped.
    #[track_caller]
    pub fn fetch_with(
        &self,
        name: &str,
        options: impl Fn(FetchOptions) -> FetchOptions,
    ) -> impl Future<Output = Result<RemoteBuffer>> {
        let site = Site::here();
        let options = move |fetch: FetchOptions| options(fetch.called_at(site.clone()));
        async move {
            let exporters = self.0.directory.resolve(name).await?;
            if !self.0.directory.knows_names() {
                let client = self.ask_all(name, exporters).await?;
                return options(client.fetch(name)).go().await;
            }
            let mut last = self.not_found(name);
            for exporter in exporters {
                match self.fetch_from(name, &exporter, &options).await {
                    Ok(buffer) => return Ok(buffer),
                    Err(error) => {
                        tracing::debug!(name, %error, "an exporter that should have it");
                        last = error;
                    }
                }
            }
            Err(last)
        }
    }

    /// Fetches a name as soon as an exporter has it.
    ///
    /// # Errors
    /// [`TimedOut`](crate::ShareError::TimedOut) if none has it after `patience`; those of
    /// [`fetch_with`](Self::fetch_with) that waiting does not solve.
    ///
    /// # Cancel safety
    /// As [`fetch_with`](Self::fetch_with).
    #[track_caller]
    pub fn wait(
        &self,
        name: &str,
        patience: Duration,
        options: impl Fn(FetchOptions) -> FetchOptions,
    ) -> impl Future<Output = Result<RemoteBuffer>> {
        let site = Site::here();
        let options = move |fetch: FetchOptions| options(fetch.called_at(site.clone()));
        async move {
            let until = deadline(patience);
            let mut pause = PAUSE.0;
            loop {
                let left = until.saturating_duration_since(Instant::now());
                let what = || format!("waiting for '{name}' ({})", self.0.directory);
                let late = || Error::timed_out(what(), patience);
                match timeout(left, self.fetch_with(name, &options)).await {
                    Ok(Err(error)) if may_pass(&error) => {}
                    Ok(done) => return done,
                    Err(_) => return Err(late()),
                }
                if Instant::now() + pause >= until {
                    return Err(late());
                }
                sleep(pause).await;
                pause = (pause * 2).min(PAUSE.1);
            }
        }
    }

    /// Returns an exporter's client: a cached or a new one.
    ///
    /// # Errors
    /// [`PeerLost`](crate::ShareError::PeerLost) if the exporter has no address that this process can reach;
    /// [`Error::Stale`] if it has restarted since it registered; those of [`ClientOptions::connect`].
    pub async fn client(&self, exporter: &Exporter) -> Result<Client> {
        let Some(address) = exporter.address(BootId::current()?) else {
            let peer = exporter.instance.map(|instance| instance.to_string());
            let why = "it is on another machine, and has no TCP address";
            return Err(Error::peer_lost(peer.unwrap_or("exporter".into()), why));
        };
        let kept = self.kept(address);
        // Other callers for the same exporter wait here for one connection.
        let mut slot = kept.lock().await;
        let client = match &*slot {
            Some(client) => client.clone(),
            None => {
                let options = (self.0.dial)(address.clone());
                slot.insert(options.connect(&self.0.driver).await?).clone()
            }
        };
        match exporter.instance {
            Some(instance) if instance != client.instance() => {
                // The client may not know yet that its server has restarted; the next one will.
                *slot = None;
                Err(Error::Stale {
                    what: format!("the exporter at {address}"),
                    why: "it has been restarted since it registered".into(),
                })
            }
            _ => Ok(client),
        }
    }

    fn kept(&self, address: &Address) -> Kept {
        let mut clients = lock(&self.0.clients);
        if clients.len() >= CLIENTS && !clients.contains_key(address) {
            // Fetched memory keeps its connection.
            clients.clear();
        }
        clients.entry(address.clone()).or_default().clone()
    }

    /// Drops the client if the error says that it did not reach its exporter.
    fn forget_unreachable(&self, exporter: &Exporter, error: &Error) {
        if error.is_unreachable()
            && let Ok(here) = BootId::current()
            && let Some(address) = exporter.address(here)
        {
            lock(&self.0.clients).remove(address);
        }
    }

    async fn fetch_from(
        &self,
        name: &str,
        exporter: &Exporter,
        options: &impl Fn(FetchOptions) -> FetchOptions,
    ) -> Result<RemoteBuffer> {
        let fetched = async {
            let fetch = options(self.client(exporter).await?.fetch(name));
            match exporter.instance {
                Some(instance) => fetch.instance(instance).go().await,
                None => fetch.go().await,
            }
        };
        let fetched = fetched.await;
        fetched.inspect_err(|error| self.forget_unreachable(exporter, error))
    }

    /// Asks all exporters at once, and takes the first that has the name.
    async fn ask_all(&self, name: &str, exporters: Vec<Exporter>) -> Result<Client> {
        let mut asked = JoinSet::new();
        for exporter in exporters {
            let (finder, name) = (self.clone(), name.to_owned());
            asked.spawn(async move {
                let has = finder.has(&name, &exporter).await;
                has.inspect_err(|error| finder.forget_unreachable(&exporter, error))
            });
        }
        let mut worst = None;
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok(Ok(Some(client))) => return Ok(client),
                Ok(Ok(None)) => {}
                Ok(Err(error)) => worst = Some(error),
                Err(error) => tracing::warn!(%error, "asking an exporter"),
            }
        }
        // An exporter that cannot be reached may have it.
        Err(worst.unwrap_or_else(|| self.not_found(name)))
    }

    /// Returns the exporter's client, if it has the name.
    async fn has(&self, name: &str, exporter: &Exporter) -> Result<Option<Client>> {
        let client = self.client(exporter).await?;
        let ask = Ask::List(List {
            prefix: name.to_owned(),
            after: None,
        });
        // Of all names with this prefix, the name itself is the first.
        let has = match client.call(ask, client.patience()).await? {
            Answer::Names(names) => names
                .entries
                .first()
                .is_some_and(|entry| entry.name == name),
            _ => false,
        };
        Ok(has.then_some(client))
    }

    fn not_found(&self, name: &str) -> Error {
        Error::refused(
            self.0.directory.to_string(),
            format!("'{name}'"),
            Refusal::NotFound,
            "no exporter has it",
        )
    }
}

/// Returns whether the error may disappear when the exporter or the directory is back, or the name exists.
fn may_pass(error: &Error) -> bool {
    use Refusal::{Closing, Limit, NotFound, Stale};
    match error {
        Error::Stale { .. } | Error::Directory { .. } => true,
        Error::Refused { reason, .. } => matches!(reason, NotFound | Closing | Stale | Limit),
        error => error.is_unreachable(),
    }
}

impl fmt::Debug for Finder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Finder")
            .field("directory", &self.0.directory)
            .finish_non_exhaustive()
    }
}
