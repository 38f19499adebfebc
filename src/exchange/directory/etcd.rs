//! The directory in etcd: look-ups, and the task that keeps an exporter and its names there.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Certificate, Client, ConnectOptions, GetOptions, Identity, PutOptions, SortOrder, SortTarget,
    TlsOptions, Txn, TxnOp,
};
use tokio::runtime::{Handle, TryCurrentError};
use tokio::sync::{Mutex, oneshot, watch};
use tokio::time::{MissedTickBehavior, interval, sleep};
use zeroize::Zeroizing;

use super::{Exporter, Keys, MAX_ADDRESSES, Registration};
use crate::protocol::check_name;
use crate::text::bounded;
use crate::{Error, Reconnect, Result};

/// The most exporters of a name that a look-up returns: even with the longest names they stay well below gRPC's 4 MiB.
const MAX_EXPORTERS: i64 = 1000;
/// The most bytes of an error text that are passed on.
const MAX_DETAIL: usize = 200;
/// Changes in one transaction: etcd allows 128.
const BATCH: usize = 100;
/// The most bytes of values in one transaction: etcd allows 1.5 MiB, with the keys.
const BATCH_BYTES: usize = 1 << 20;

/// The exporters that have registered in etcd, and their names. Clones are the same directory.
///
/// ```no_run
/// use egmem::exchange::Client;
/// use egmem::exchange::directory::{Directory, EtcdOptions};
/// use egmem::share::BootId;
///
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let driver = egmem::Driver::open()?;
/// let directory = Directory::etcd(EtcdOptions::new(["http://127.0.0.1:2379"]))?;
/// for exporter in directory.resolve("weights").await? {
///     let Some(address) = exporter.address(BootId::current()?) else { continue };
///     let client = Client::options(address.clone()).connect(&driver).await?;
///     let weights = client.fetch("weights").instance(exporter.instance).await?;
/// }
/// # Ok::<(), egmem::exchange::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct Directory(Arc<Etcd>);

/// An etcd, connected on first use.
struct Etcd {
    options: EtcdOptions,
    keys: Keys,
    client: Mutex<Option<Client>>,
}

impl Directory {
    /// Returns a directory of the exporters that have registered in etcd. This sends no request: etcd may
    /// still be away.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for invalid options, [`Error::Tls`] for
    /// certificates that cannot be read.
    pub fn etcd(options: EtcdOptions) -> Result<Self> {
        options.check()?;
        // Faults of the files are reported now, not at the first look-up.
        options.tls()?;
        Ok(Self(Arc::new(Etcd {
            keys: Keys(options.prefix.clone()),
            options,
            client: Mutex::new(None),
        })))
    }

    /// Returns the exporters that claim to hold a name, in the order in which they registered it: the first 1000.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an invalid name, [`Error::Directory`] if
    /// etcd does not answer in time.
    pub async fn resolve(&self, name: &str) -> Result<Vec<Exporter>> {
        check_name(name)?;
        let prefix = self.0.keys.holders(name);
        let options = GetOptions::new()
            .with_prefix()
            .with_sort(SortTarget::Create, SortOrder::Ascend)
            .with_limit(MAX_EXPORTERS);
        let get = |mut client: Client| async move { client.get(prefix, Some(options)).await };
        let mut found = self.call(get).await?;
        let entries = found.take_kvs();
        let exporters = entries.iter().filter_map(|entry| {
            let (_, instance) = self.0.keys.read(entry.key())?;
            let exporter = Exporter::from_value(entry.value(), instance);
            if exporter.is_none() {
                tracing::warn!(name, %instance, "etcd has an entry that is not an exporter's");
            }
            exporter
        });
        Ok(exporters.collect())
    }

    /// Registers an exporter until the registration is dropped or closed. If etcd is away, registers it as
    /// soon as that is back, and again after each outage.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for no address, more than [`MAX_ADDRESSES`], or
    /// outside of a tokio runtime.
    pub fn register(&self, exporter: Exporter) -> Result<Registration> {
        if exporter.addresses.is_empty() || exporter.addresses.len() > MAX_ADDRESSES {
            let why = format!("it has {} addresses", exporter.addresses.len());
            return Err(Error::invalid("exporter", why));
        }
        let outside = |error: TryCurrentError| Error::invalid("runtime", error.to_string());
        let runtime = Handle::try_current().map_err(outside)?;
        let (open, closed) = oneshot::channel();
        let names = watch::Sender::new(BTreeSet::new());
        let registered = Arc::new(watch::Sender::new(false));
        let task = Task {
            directory: self.clone(),
            exporter,
            names: names.subscribe(),
            registered: Arc::clone(&registered),
            lease: None,
        };
        Ok(Registration {
            names,
            registered,
            open,
            task: runtime.spawn(task.run(closed)),
        })
    }

    /// Makes one request, answered within the timeout. After a failure the next request reconnects, with
    /// files read again and a fresh token.
    async fn call<T, F>(&self, call: impl FnOnce(Client) -> F) -> Result<T>
    where
        F: Future<Output = Result<T, etcd_client::Error>>,
    {
        let answer = tokio::time::timeout(self.0.options.timeout, async {
            let client = self.client().await?;
            call(client).await.map_err(|error| self.failed(&error))
        })
        .await
        .unwrap_or_else(|_| Err(self.away(format!("no answer in {:?}", self.0.options.timeout))));
        if answer.is_err() {
            // If another task holds the lock, it is connecting: then there is nothing old to drop.
            if let Ok(mut client) = self.0.client.try_lock() {
                *client = None;
            }
        }
        answer
    }

    async fn client(&self) -> Result<Client> {
        let mut client = self.0.client.lock().await;
        if let Some(client) = &*client {
            return Ok(client.clone());
        }
        let timeout = self.0.options.timeout;
        let mut options = ConnectOptions::new()
            .with_connect_timeout(timeout)
            // Keep-alives reveal a half-dead connection even without requests.
            .with_keep_alive(timeout, timeout)
            .with_keep_alive_while_idle(true)
            .with_auto_token_refresh(true);
        if let Some((user, password)) = &self.0.options.user {
            options = options.with_user(user, password.0.as_str());
        }
        if let Some(tls) = self.0.options.tls()? {
            options = options.with_tls(tls);
        }
        let new = Client::connect(&self.0.options.endpoints, Some(options))
            .await
            .map_err(|error| self.failed(&error))?;
        *client = Some(new.clone());
        Ok(new)
    }

    /// Returns the error of a failed request.
    fn failed(&self, error: &etcd_client::Error) -> Error {
        self.away(match error {
            etcd_client::Error::GRpcStatus(status) => {
                format!("{:?}: {}", status.code(), status.message())
            }
            other => other.to_string(),
        })
    }

    /// Returns an error with this explanation.
    fn away(&self, detail: impl Into<String>) -> Error {
        let detail: String = detail.into();
        Error::Directory {
            directory: self.to_string(),
            detail: bounded(&detail, MAX_DETAIL),
        }
    }
}

/// Displays etcd's endpoints.
impl fmt::Display for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "etcd at {}", self.0.options.endpoints.join(", "))
    }
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Directory({self})")
    }
}

/// The address of etcd, and how to use it.
///
/// ```
/// use egmem::exchange::directory::{Directory, EtcdOptions};
///
/// let options = EtcdOptions::new(["http://127.0.0.1:2379"]).prefix("/jobs/7/egmem/");
/// let directory = Directory::etcd(options)?;
/// # Ok::<(), egmem::exchange::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `Directory::etcd`"]
pub struct EtcdOptions {
    endpoints: Vec<String>,
    user: Option<(String, Password)>,
    ca: Option<PathBuf>,
    identity: Option<(PathBuf, PathBuf)>,
    prefix: String,
    lease: Duration,
    timeout: Duration,
    retry: Reconnect,
}

impl EtcdOptions {
    /// Returns options for the etcd at these endpoints: `http://host:port` or `https://host:port`.
    pub fn new<S: Into<String>>(endpoints: impl IntoIterator<Item = S>) -> Self {
        Self {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            user: None,
            ca: None,
            identity: None,
            prefix: "/egmem/v1/".into(),
            lease: Duration::from_secs(10),
            timeout: Duration::from_secs(5),
            retry: Reconnect::backoff(Duration::from_millis(200), Duration::from_secs(10)),
        }
    }

    /// Sets etcd's user and the password, which is wiped from this process's own copies.
    pub fn user(mut self, name: impl Into<String>, password: impl Into<String>) -> Self {
        self.user = Some((name.into(), Password(password.into().into())));
        self
    }

    /// Sets the authority that must have signed etcd's certificate, in a PEM file. Endpoints are `https`.
    pub fn ca(mut self, file: impl AsRef<Path>) -> Self {
        self.ca = Some(file.as_ref().into());
        self
    }

    /// Sets this process's certificate and key, in PEM files, if etcd requires them.
    pub fn identity(mut self, cert: impl AsRef<Path>, key: impl AsRef<Path>) -> Self {
        self.identity = Some((cert.as_ref().into(), key.as_ref().into()));
        self
    }

    /// Sets the prefix of all keys; `/egmem/v1/` by default. It begins and ends with a slash.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    setters! {
        /// Sets how long a dead exporter's names stay: 1 second or more, in whole seconds; 10 s by default. etcd
        /// has a minimum of its own, a few of its heartbeats.
        lease: Duration;
        /// Sets how long etcd may take for one answer: 5 s by default.
        timeout: Duration;
        /// Sets the pauses before a retry: from 200 ms to 10 s by default. A registration retries in any case.
        retry: Reconnect;
    }

    /// Checks the options without a connection.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a value out of its range.
    pub fn check(&self) -> Result<()> {
        let wrong = |why| Err(Error::invalid("etcd options", why));
        let is_https = |endpoint: &String| endpoint.starts_with("https://");
        let is_http = |endpoint: &String| endpoint.starts_with("http://") || is_https(endpoint);
        if self.endpoints.is_empty() {
            return wrong("no endpoint");
        }
        if !self.endpoints.iter().all(is_http) {
            return wrong("an endpoint is neither http:// nor https://");
        }
        if self.has_tls() && !self.endpoints.iter().all(is_https) {
            return wrong("certificates, but an endpoint without https://");
        }
        // An endpoint's errors would contain the user and the password.
        if self.endpoints.iter().any(|endpoint| endpoint.contains('@')) {
            return wrong("an endpoint with a user: use `user`");
        }
        let prefix = &self.prefix;
        let slashes = prefix.starts_with('/') && prefix.ends_with('/');
        if !slashes || prefix.len() > 255 || prefix.contains(char::is_control) {
            return wrong("a prefix begins and ends with a slash");
        }
        let lease = Duration::from_secs(1)..=Duration::from_secs(86_400);
        if !lease.contains(&self.lease) {
            return wrong("a lease is of 1 second to a day");
        }
        if self.timeout.is_zero() || self.retry.is_never() {
            return wrong("no time to answer, or to wait before trying again");
        }
        Ok(())
    }

    fn has_tls(&self) -> bool {
        self.ca.is_some() || self.identity.is_some()
    }

    /// Reads the certificates, if there are any.
    fn tls(&self) -> Result<Option<TlsOptions>> {
        let read = |path: &Path| {
            let failed = |error| Error::tls(path.display().to_string(), error);
            std::fs::read(path).map(Zeroizing::new).map_err(failed)
        };
        let mut tls = TlsOptions::new();
        if let Some(ca) = &self.ca {
            tls = tls.ca_certificate(Certificate::from_pem(&*read(ca)?));
        }
        if let Some((cert, key)) = &self.identity {
            tls = tls.identity(Identity::from_pem(&*read(cert)?, &*read(key)?));
        }
        Ok(self.has_tls().then_some(tls))
    }
}

/// A password, wiped when dropped and never shown.
#[derive(Clone)]
struct Password(Zeroizing<String>);

opaque!(Password);

/// The task that keeps an exporter and its names in etcd.
struct Task {
    directory: Directory,
    exporter: Exporter,
    names: watch::Receiver<BTreeSet<String>>,
    registered: Arc<watch::Sender<bool>>,
    /// The lease in etcd, even if it may be lost.
    lease: Option<i64>,
}

impl Task {
    /// Keeps the exporter registered until the sender is dropped, then removes it.
    async fn run(mut self, closed: oneshot::Receiver<()>) -> Result<()> {
        tokio::select! {
            biased;
            _ = closed => {}
            never = self.keep_registered() => match never {},
        }
        match self.lease {
            Some(lease) => self.revoke(lease).await,
            None => Ok(()),
        }
    }

    async fn keep_registered(&mut self) -> Infallible {
        let mut failures = 0;
        loop {
            let Err(end) = self.register(&mut failures).await;
            tracing::warn!(error = %end, "the directory is away");
            self.registered.send_replace(false);
            sleep(self.directory.0.options.retry.pause(failures)).await;
            failures += 1;
        }
    }

    /// Registers, and keeps the registration alive until that fails.
    async fn register(&mut self, failures: &mut u32) -> Result<Infallible> {
        let ttl = i64::try_from(self.directory.0.options.lease.as_secs()).unwrap_or(i64::MAX);
        let grant = |mut client: Client| async move { client.lease_grant(ttl, None).await };
        let grant = self.directory.call(grant).await?;
        let before = self.lease.replace(grant.id());
        let lease = grant.id();
        // An existing key moves to the new lease and keeps its place in the order.
        let key = self.directory.0.keys.exporter(self.exporter.instance);
        let value = self.exporter.to_value();
        let options = PutOptions::new().with_lease(lease);
        let put = |mut client: Client| async move { client.put(key, value, Some(options)).await };
        self.directory.call(put).await?;
        let (task, mut names) = (&*self, self.names.clone());
        // Beside the changes of names, which may take longer than the lease.
        let keep_alive = async {
            let mut beat = interval(Duration::from_secs(grant.ttl().clamp(1, ttl) as u64) / 3);
            beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                beat.tick().await;
                task.beat(lease).await?;
            }
        };
        let follow_names = async {
            let mut there = BTreeSet::new();
            task.put_names(lease, &mut names, &mut there).await?;
            if let Some(before) = before {
                // Revoking it also removes names that were taken out meanwhile. It may have expired already.
                let _ = task.revoke(before).await;
            }
            tracing::debug!(instance = %task.exporter.instance, names = there.len(), "registered");
            *failures = 0;
            while names.changed().await.is_ok() {
                task.put_names(lease, &mut names, &mut there).await?;
            }
            // The registration is being dropped.
            std::future::pending().await
        };
        tokio::select! {
            failed = keep_alive => failed,
            failed = follow_names => failed,
        }
    }

    /// Changes etcd's entries from `there` to the wanted ones.
    async fn put_names(
        &self,
        lease: i64,
        names: &mut watch::Receiver<BTreeSet<String>>,
        there: &mut BTreeSet<String>,
    ) -> Result<()> {
        let value = self.exporter.to_value();
        let most = (BATCH_BYTES / value.len().max(1)).clamp(1, BATCH);
        loop {
            let changes: Vec<String> = {
                let wanted = names.borrow_and_update();
                let changes = wanted.symmetric_difference(there).take(most);
                let changes: Vec<_> = changes.cloned().collect();
                if changes.is_empty() {
                    // Under the lock of the names.
                    self.registered.send_replace(true);
                    return Ok(());
                }
                changes
            };
            let operation = |name: &String| {
                let key = self.directory.0.keys.name(name, self.exporter.instance);
                if there.contains(name) {
                    return TxnOp::delete(key, None);
                }
                let options = PutOptions::new().with_lease(lease);
                TxnOp::put(key, value.clone(), Some(options))
            };
            let change = Txn::new().and_then(changes.iter().map(operation).collect::<Vec<_>>());
            let change = |mut client: Client| async move { client.txn(change).await };
            self.directory.call(change).await?;
            for name in changes {
                if !there.remove(&name) {
                    there.insert(name);
                }
            }
        }
    }

    /// Keeps the lease alive. Returns once etcd has confirmed it.
    async fn beat(&self, lease: i64) -> Result<()> {
        let keep = |mut client: Client| async move { client.lease_keep_alive(lease).await };
        self.directory.call(keep).await.map(drop)
    }

    async fn revoke(&self, lease: i64) -> Result<()> {
        let revoke = |mut client: Client| async move { client.lease_revoke(lease).await };
        self.directory.call(revoke).await.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn etcd() -> Directory {
        let options = EtcdOptions::new(["http://127.0.0.1:9"])
            .timeout(Duration::from_millis(300))
            .retry(Reconnect::backoff(
                Duration::from_millis(100),
                Duration::from_secs(1),
            ));
        Directory::etcd(options).unwrap()
    }

    #[tokio::test]
    async fn an_etcd_that_is_not_there_is_said_in_time() {
        let etcd = etcd();
        let before = std::time::Instant::now();
        let error = etcd.resolve("a").await.unwrap_err();
        assert!(matches!(error, Error::Directory { .. }), "{error}");
        assert!(before.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn certificates_that_are_not_there_are_said_at_once() {
        let options = EtcdOptions::new(["https://a:1"]).ca("/nonexistent/ca.pem");
        assert!(matches!(Directory::etcd(options), Err(Error::Tls { .. })));
    }

    #[test]
    fn what_cannot_be_right_is_refused() {
        let good = || EtcdOptions::new(["http://a:1"]);
        good().check().unwrap();
        EtcdOptions::new(["https://a:1"]).ca("/x").check().unwrap();
        for wrong in [
            EtcdOptions::new(Vec::<String>::new()),
            EtcdOptions::new(["a:1"]),
            EtcdOptions::new(["http://user:word@a:1"]),
            good().ca("/x"),
            good().prefix("egmem/"),
            good().prefix("/egmem"),
            good().lease(Duration::from_millis(999)),
            good().timeout(Duration::ZERO),
            good().retry(Reconnect::never()),
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_password_is_not_shown() {
        let options = EtcdOptions::new(["http://a:1"]).user("me", "geheim");
        let shown = format!("{options:?}");
        assert!(shown.contains("me") && !shown.contains("geheim"), "{shown}");
    }
}
