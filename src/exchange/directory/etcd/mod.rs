//! The connection to etcd, and the requests to it.

mod options;
mod register;

use std::fmt;
use std::future::Future;
use std::path::Path;
use std::time::Duration;

use etcd_client::{
    Certificate, Client, ConnectOptions, GetOptions, Identity, KeyValue, TlsOptions,
};
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use zeroize::Zeroizing;

pub use options::EtcdOptions;
use options::TlsFiles;

use super::exporter::Exporter;
use super::keys::{Keys, read_value};
use crate::text::bounded;
use crate::{Error, Result};

/// Keys in one answer: even the longest names stay well below gRPC's 4 MiB.
const PAGE: i64 = 1000;
/// The most keys that one query reads.
const MAX_KEYS: usize = 1 << 20;
/// The most bytes of an error text that are passed on.
const MAX_DETAIL: usize = 200;

fn runtime() -> Result<Handle> {
    Handle::try_current().map_err(|error| Error::invalid("runtime", error.to_string()))
}

/// An etcd, connected on first use.
pub(super) struct Etcd {
    pub options: EtcdOptions,
    pub keys: Keys,
    client: Mutex<Option<Client>>,
}

impl Etcd {
    pub fn new(options: EtcdOptions) -> Result<Self> {
        options.check()?;
        if let Some(tls) = &options.tls {
            // Faults of the files are reported now, not at the first look-up.
            read_tls(tls)?;
        }
        Ok(Self {
            keys: Keys::new(&options.prefix),
            options,
            client: Mutex::new(None),
        })
    }

    /// Makes one request, answered within the timeout. After a failure the next request reconnects, with
    /// files read again and a fresh token.
    pub async fn call<T, F>(&self, call: impl FnOnce(Client) -> F) -> Result<T>
    where
        F: Future<Output = Result<T, etcd_client::Error>>,
    {
        let answer = tokio::time::timeout(self.options.timeout, async {
            let client = self.client().await?;
            call(client).await.map_err(|error| self.failed(&error))
        })
        .await
        .unwrap_or_else(|_| Err(self.away(format!("no answer in {:?}", self.options.timeout))));
        if answer.is_err() {
            // If another task holds the lock, it is connecting: then there is nothing old to drop.
            if let Ok(mut client) = self.client.try_lock() {
                *client = None;
            }
        }
        answer
    }

    async fn client(&self) -> Result<Client> {
        let mut client = self.client.lock().await;
        if let Some(client) = &*client {
            return Ok(client.clone());
        }
        let timeout = self.options.timeout;
        let mut options = ConnectOptions::new()
            .with_connect_timeout(timeout)
            // Keep-alives reveal a half-dead connection even without requests.
            .with_keep_alive(timeout, timeout)
            .with_keep_alive_while_idle(true)
            .with_auto_token_refresh(true);
        if let Some((user, password)) = &self.options.user {
            options = options.with_user(user, password.as_str());
        }
        if let Some(tls) = &self.options.tls {
            options = options.with_tls(read_tls(tls)?);
        }
        let new = Client::connect(&self.options.endpoints, Some(options))
            .await
            .map_err(|error| self.failed(&error))?;
        *client = Some(new.clone());
        Ok(new)
    }

    /// Returns the exporters of a name, in the order in which they registered it.
    pub async fn resolve(&self, name: &str) -> Result<Vec<Exporter>> {
        let mut found = self.list(self.keys.holders(name)).await?;
        found.sort_by_key(KeyValue::create_revision);
        Ok(found.iter().filter_map(|entry| self.read(entry)).collect())
    }

    /// Parses an entry into its exporter; `None` for an entry that this crate did not write.
    fn read(&self, entry: &KeyValue) -> Option<Exporter> {
        let (name, instance) = self.keys.read(entry.key())?;
        let exporter = read_value(entry.value(), instance);
        if exporter.is_none() {
            tracing::warn!(name, %instance, "etcd has an entry that is not an exporter's");
        }
        exporter
    }

    /// Returns all entries whose keys have this prefix, as of one revision.
    async fn list(&self, prefix: String) -> Result<Vec<KeyValue>> {
        let end = end_of(&prefix);
        let mut start = prefix.into_bytes();
        let mut all: Vec<KeyValue> = Vec::new();
        let mut revision = 0;
        loop {
            let options = GetOptions::new()
                .with_range(end.clone())
                .with_limit(PAGE)
                .with_revision(revision);
            let from = start.clone();
            let mut page = self
                .call(|mut client| async move { client.get(from, Some(options)).await })
                .await?;
            if revision == 0 {
                revision = page.header().map_or(0, |header| header.revision());
            }
            let more = page.more();
            all.extend(page.take_kvs());
            match all.last() {
                Some(last) if more && all.len() < MAX_KEYS => {
                    start = last.key().to_vec();
                    start.push(0);
                }
                _ if more => return Err(self.away(format!("more than {MAX_KEYS} names"))),
                _ => return Ok(all),
            }
        }
    }

    /// Returns the error of a failed request.
    pub fn failed(&self, error: &etcd_client::Error) -> Error {
        self.away(match error {
            etcd_client::Error::GRpcStatus(status) => {
                format!("{:?}: {}", status.code(), status.message())
            }
            other => other.to_string(),
        })
    }

    /// Returns an error with this explanation.
    pub fn away(&self, detail: impl Into<String>) -> Error {
        let detail: String = detail.into();
        Error::Directory {
            directory: format!("etcd at {self}"),
            detail: bounded(&detail, MAX_DETAIL),
        }
    }

    /// Returns how long to wait after the nth failure in a row, with jitter, so that a thousand exporters do
    /// not return at once.
    pub fn pause(&self, failures: u32) -> Duration {
        let (first, most) = self.options.retry;
        let pause = first.saturating_mul(1 << failures.min(16)).min(most);
        let scatter = crate::driver::random::<1>().map_or(0, |bytes| bytes[0]);
        // Three to four quarters of it.
        pause.mul_f64(0.75 + f64::from(scatter) / 1024.0)
    }
}

/// Displays its endpoints.
impl fmt::Display for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.options.endpoints.join(", "))
    }
}

/// Returns the first key after all keys that begin with `prefix`, which is ASCII.
fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last = last.saturating_add(1);
    }
    end
}

fn read_tls(files: &TlsFiles) -> Result<TlsOptions> {
    let read = |path: &Path| {
        let failed = |error| Error::tls(path.display().to_string(), error);
        std::fs::read(path).map(Zeroizing::new).map_err(failed)
    };
    let mut tls = TlsOptions::new();
    if let Some(ca) = &files.ca {
        tls = tls.ca_certificate(Certificate::from_pem(&*read(ca)?));
    }
    if let Some((cert, key)) = &files.identity {
        tls = tls.identity(Identity::from_pem(&*read(cert)?, &*read(key)?));
    }
    if let Some(domain) = &files.domain {
        tls = tls.domain_name(domain);
    }
    Ok(tls)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn etcd() -> Etcd {
        let options = EtcdOptions::new(["http://127.0.0.1:9"])
            .timeout(Duration::from_millis(300))
            .retry(Duration::from_millis(100), Duration::from_secs(1));
        Etcd::new(options).unwrap()
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
    fn pauses_grow_to_the_longest() {
        let etcd = etcd();
        for (failures, least, most) in [(0, 75, 100), (1, 150, 200), (9, 750, 1000)] {
            let pause = etcd.pause(failures).as_millis();
            assert!((least..=most).contains(&pause), "{failures}: {pause} ms");
        }
        assert!(etcd.pause(u32::MAX) <= Duration::from_secs(1));
    }

    #[test]
    fn the_end_of_a_prefix_is_after_all_that_begin_so() {
        let end = end_of("/names/a@");
        assert!(end[..] > b"/names/a@\xff"[..]);
        assert_eq!(end, b"/names/aA");
    }

    #[test]
    fn certificates_that_are_not_there_are_said_at_once() {
        let options = EtcdOptions::new(["https://a:1"]).ca("/nonexistent/ca.pem");
        assert!(matches!(Etcd::new(options), Err(Error::Tls { .. })));
    }
}
