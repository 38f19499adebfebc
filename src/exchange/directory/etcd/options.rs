//! Options to reach etcd.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use zeroize::Zeroizing;

use crate::{Error, Result};

/// The address of etcd, and how to use it.
///
/// ```
/// use egmem::exchange::directory::{Directory, EtcdOptions};
///
/// let options = EtcdOptions::new(["http://127.0.0.1:2379"]).prefix("/jobs/7/egmem/");
/// let directory = Directory::etcd(options)?;
/// # Ok::<(), egmem::exchange::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "options do nothing until `Directory::etcd`"]
pub struct EtcdOptions {
    pub(super) endpoints: Vec<String>,
    pub(super) user: Option<(String, Zeroizing<String>)>,
    pub(super) tls: Option<TlsFiles>,
    pub(super) prefix: String,
    pub(super) lease: Duration,
    pub(super) timeout: Duration,
    pub(super) retry: (Duration, Duration),
}

#[derive(Clone, Default)]
pub(super) struct TlsFiles {
    pub ca: Option<PathBuf>,
    pub identity: Option<(PathBuf, PathBuf)>,
    pub domain: Option<String>,
}

impl EtcdOptions {
    /// Returns options for the etcd at these endpoints: `http://host:port` or `https://host:port`.
    pub fn new<S: Into<String>>(endpoints: impl IntoIterator<Item = S>) -> Self {
        Self {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            user: None,
            tls: None,
            prefix: "/egmem/v1/".into(),
            lease: Duration::from_secs(10),
            timeout: Duration::from_secs(5),
            retry: (Duration::from_millis(200), Duration::from_secs(10)),
        }
    }

    /// Sets etcd's user and the password, which is wiped from this process's own copies.
    pub fn user(mut self, name: impl Into<String>, password: impl Into<String>) -> Self {
        self.user = Some((name.into(), Zeroizing::new(password.into())));
        self
    }

    /// Sets the authority that must have signed etcd's certificate, in a PEM file. Endpoints are `https`.
    pub fn ca(mut self, file: impl AsRef<Path>) -> Self {
        self.tls.get_or_insert_default().ca = Some(file.as_ref().into());
        self
    }

    /// Sets this process's certificate and key, in PEM files, if etcd requires them.
    pub fn identity(mut self, cert: impl AsRef<Path>, key: impl AsRef<Path>) -> Self {
        let files = (cert.as_ref().into(), key.as_ref().into());
        self.tls.get_or_insert_default().identity = Some(files);
        self
    }

    /// Sets the name in etcd's certificate, if it is not the endpoint's host.
    pub fn domain(mut self, name: impl Into<String>) -> Self {
        self.tls.get_or_insert_default().domain = Some(name.into());
        self
    }

    /// Sets the prefix of all keys; `/egmem/v1/` by default. It begins and ends with a slash.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets how long a dead exporter's names stay: 1 second or more, in whole seconds; 10 s by default. etcd
    /// has a minimum of its own, a few of its heartbeats.
    pub const fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets how long etcd may take for one answer: 5 s by default.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the delay before a retry: `first` after a failure, then twice as long each time, up to `most`;
    /// 200 ms and 10 s by default.
    pub const fn retry(mut self, first: Duration, most: Duration) -> Self {
        self.retry = (first, most);
        self
    }

    /// Checks the options without a connection.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a value out of its range.
    pub fn check(&self) -> Result<()> {
        let (endpoints, prefix) = (&self.endpoints, &self.prefix);
        let is_https = |endpoint: &String| endpoint.starts_with("https://");
        let is_http = |endpoint: &String| endpoint.starts_with("http://") || is_https(endpoint);
        let slashes = prefix.starts_with('/') && prefix.ends_with('/');
        let lease = Duration::from_secs(1)..=Duration::from_secs(86_400);
        let (first, most) = self.retry;
        let faults = [
            (endpoints.is_empty(), "no endpoint"),
            (
                !endpoints.iter().all(is_http),
                "an endpoint is neither http:// nor https://",
            ),
            (
                self.tls.is_some() && !endpoints.iter().all(is_https),
                "certificates, but an endpoint without https://",
            ),
            // An endpoint's errors would contain the user and the password.
            (
                endpoints.iter().any(|endpoint| endpoint.contains('@')),
                "an endpoint with a user: use `user`",
            ),
            (
                !slashes || prefix.len() > 255 || prefix.contains(char::is_control),
                "a prefix begins and ends with a slash",
            ),
            (
                !lease.contains(&self.lease),
                "a lease is of 1 second to a day",
            ),
            (
                self.timeout.is_zero() || first.is_zero() || most < first,
                "no time to answer, or to wait before trying again",
            ),
        ];
        match faults.iter().find(|(is_so, _)| *is_so) {
            Some((_, why)) => Err(Error::invalid("etcd options", *why)),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for EtcdOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdOptions")
            .field("endpoints", &self.endpoints)
            .field("user", &self.user.as_ref().map(|(name, _)| name))
            .field("tls", &self.tls.is_some())
            .field("prefix", &self.prefix)
            .field("lease", &self.lease)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            good().retry(Duration::from_secs(2), Duration::from_secs(1)),
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
