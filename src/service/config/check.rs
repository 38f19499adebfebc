//! Reads a configuration from TOML; checks beyond the types, and changes that a running service accepts.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::Duration;

use super::{AuditConfig, DirectoryConfig, MetricsConfig, ServiceConfig, server_options};
use crate::driver::{Access, refuse};
use crate::exchange::protocol::check_name;
use crate::exchange::{Address, PeerName, Security};
use crate::size::Granularity;
use crate::text::bounded;
use crate::{Backing, Error, Growth, Result};

/// How many bytes of a parser's message an error contains: the message quotes the file.
const MAX_EXCERPT: usize = 400;
const MS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);
/// The most bytes of an address space.
const MOST: u64 = isize::MAX as u64;

impl ServiceConfig {
    /// Reads and checks a configuration.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) with the fault and its place: an unknown or
    /// missing key, an impossible value; the errors of [`check`](Self::check).
    ///
    /// ```
    /// use egmem::service::ServiceConfig;
    ///
    /// let config = ServiceConfig::from_toml(
    ///     r#"
    ///     listen = ["unix:/run/egmem/egmem.sock"]
    ///     [[buffer]]
    ///     name = "weights"
    ///     bytes = "16GiB"
    ///     gpu = 0
    ///     who = ["uid:1000"]
    ///     "#,
    /// )?;
    /// assert_eq!(config.buffers[0].bytes, 16 << 30);
    /// let error = ServiceConfig::from_toml("listen = []\nlisten_on = 1").unwrap_err();
    /// assert!(error.to_string().contains("listen_on"), "{error}");
    /// # Ok::<(), egmem::exchange::Error>(())
    /// ```
    pub fn from_toml(text: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let line = error
                .span()
                .and_then(|span| text.get(..span.start))
                .map_or(1, |before| before.matches('\n').count() + 1);
            wrong(format!(
                "line {line}: {}",
                bounded(error.message().trim(), MAX_EXCERPT)
            ))
        })?;
        config.check()?;
        Ok(config)
    }

    /// Checks the configuration beyond its types.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) that names the key.
    pub fn check(&self) -> Result<()> {
        let (node, lease, limits) = (&self.node, &self.lease, &self.limits);
        let is_empty = |audit: &AuditConfig| audit.file.as_os_str().is_empty();
        refuse! { wrong;
            self.listen.is_empty() => "`listen` is empty: no client could connect";
            self.plain_anywhere && self.tls.is_some() => "`plain_anywhere` and `tls` exclude each other";
            self.audit.as_ref().is_some_and(is_empty) => "`audit.file` is empty";
            node.max_bytes == 0 => "`node.max_bytes` is 0";
            node.quiet > HOUR => "`node.quiet` is {:?}, more than 1 h", node.quiet;
            !(MS..=DAY).contains(&node.retry) => "`node.retry` is {:?}, not from 1 ms to 24 h", node.retry;
            !(1..=256).contains(&self.reuse.threads) => "`reuse.threads` is not from 1 to 256";
            !(10 * MS..=HOUR).contains(&lease.heartbeat) =>
                "`lease.heartbeat` is {:?}, not from 10 ms to 1 h", lease.heartbeat;
            lease.expiry > DAY => "`lease.expiry` is {:?}, more than 24 h", lease.expiry;
            lease.expiry < 2 * lease.heartbeat => "`lease.expiry` is less than twice `lease.heartbeat`";
            self.drain.deadline > DAY => "`drain.deadline` is {:?}, more than 24 h", self.drain.deadline;
            self.buffers.len() > limits.names =>
                "{} buffers are more than `limits.names`, {}", self.buffers.len(), limits.names;
        }
        if let Some(create) = &self.create {
            let (names, after) = (create.peer_names, create.forgive_after);
            refuse! { wrong;
                create.node.is_some_and(|node| node.0 < 0) => "`create.node` is negative";
                create.peer_bytes == 0 => "`create.peer_bytes` is 0";
                names == 0 => "`create.peer_names` is 0";
                names > limits.names_per_peer as u64 =>
                    "`create.peer_names` is more than `limits.names_per_peer`";
                !(MS..=366 * DAY).contains(&after) =>
                    "`create.forgive_after` is {after:?}, not from 1 ms to 8784 h";
            }
            let namespaces = create.namespaces();
            namespaces.map_err(|error| wrong(format!("`create.prefix`: {error}")))?;
        }
        self.check_buffers()?;
        self.check_reserves()?;
        self.check_network()
    }

    fn check_buffers(&self) -> Result<()> {
        let (max, mut names) = (self.node.max_bytes, HashSet::new());
        let is_open = self.node.backing == Backing::Registered;
        for buffer in &self.buffers {
            let (name, node, gpu) = (&buffer.name, buffer.node, buffer.gpu);
            check_name(name).map_err(|error| wrong(format!("a buffer's `name`: {error}")))?;
            refuse! { |why| wrong(format!("buffer '{name}': {why}"));
                !names.insert(name) => "another one has its name";
                buffer.bytes == 0 => "`bytes` is 0";
                buffer.bytes > max.min(MOST) =>
                    "`bytes` is more than `node.max_bytes`, or than an address space holds";
                node.is_some() == gpu.is_some() => "either `node` or `gpu` says where it lies";
                node.is_some_and(|node| node.0 < 0) || gpu.is_some_and(|gpu| gpu < 0) =>
                    "`node` or `gpu` is negative";
                buffer.access == Access::None => "`access` is none";
                is_open && buffer.access == Access::Read =>
                    "`access` is \"read\", but registered memory is open to every GPU: set `node.backing` to \"auto\" or \"driver\"";
            }
        }
        Ok(())
    }

    fn check_reserves(&self) -> Result<()> {
        let (max, mut nodes) = (self.node.max_bytes, HashSet::new());
        for reserve in &self.reserves {
            let wrong = |why| wrong(format!("reserve of node {}: {why}", reserve.node));
            for (key, bytes) in [("chunk", reserve.chunk), ("min_chunk", reserve.min_chunk)] {
                refuse! { wrong;
                    bytes == 0 || !Granularity::TWO_MIB.divides(bytes) || bytes > Growth::MAX_CHUNK =>
                        "`{key}` is not a multiple of 2 MiB up to 4094 MiB, the most that one driver call creates";
                }
            }
            refuse! { wrong;
                reserve.node.0 < 0 => "`node` is negative";
                !nodes.insert(reserve.node) => "another one has its node";
                reserve.min_chunk > reserve.chunk => "`min_chunk` is larger than `chunk`";
                reserve.bytes == 0 => "`bytes` is 0";
                reserve.bytes > max.min(MOST) =>
                    "`bytes` is more than `node.max_bytes`, or than an address space holds";
            }
        }
        Ok(())
    }

    /// Checks for values that the exchange's server, the metrics endpoint and the directory would refuse.
    ///
    /// # Errors
    /// Theirs. A host name other than `localhost` is refused if only addresses of this machine are served,
    /// because its addresses are not known before the start.
    fn check_network(&self) -> Result<()> {
        let plain = self.tls.is_none() && !self.plain_anywhere;
        // This does not load certificates. With TLS every address is served, as with `PlainAnywhere`.
        let security = if plain {
            Security::Plain
        } else {
            Security::PlainAnywhere
        };
        server_options(self, security).check()?;
        let name = self.listen.iter().find(|address| is_beyond(address));
        if let Some(name) = name.filter(|_| plain) {
            let how = "without `tls` give `localhost` or an IP address of loopback";
            return Err(wrong(format!("`listen`: {name} is a host name; {how}")));
        }
        if let Some(MetricsConfig { address, anywhere }) = &self.metrics {
            let parsed = format!("tcp://{address}").parse();
            refuse! { wrong; parsed.is_err() => "`metrics.address` is '{address}', not host:port"; }
            if parsed.is_ok_and(|address| is_beyond(&address)) && !anywhere {
                return Err(elsewhere(address));
            }
        }
        let directory = self.directory.as_ref();
        directory.map_or(Ok(()), DirectoryConfig::check)
    }

    /// Returns whether a list of certificate names includes the peer.
    pub(crate) fn lists(&self, peer: &PeerName) -> bool {
        let create = self.create.iter().map(|create| &create.who);
        let buffers = self.buffers.iter().map(|buffer| &buffer.who);
        let mut all = create.chain(buffers);
        all.any(|who| who.admits(peer))
    }

    /// Copies from `new` the values that can change in a running service; returns the keys of other differences.
    pub(crate) fn take_over(&mut self, new: Self) -> Vec<&'static str> {
        let fixed = [
            ("listen", self.listen == new.listen),
            ("plain_anywhere", self.plain_anywhere == new.plain_anywhere),
            ("tls", self.tls == new.tls),
            ("reserve", self.reserves == new.reserves),
            ("node", self.node == new.node),
            ("reuse", self.reuse == new.reuse),
            ("lease", self.lease == new.lease),
            ("limits", self.limits == new.limits),
            ("metrics", self.metrics == new.metrics),
            ("audit", self.audit == new.audit),
            ("directory", self.directory == new.directory),
        ];
        let mut same = self.buffers.len() == new.buffers.len();
        for buffer in &mut self.buffers {
            let found = new.buffers.iter().find(|new| new.name == buffer.name);
            if let Some(found) = found {
                buffer.who = found.who.clone();
            }
            same &= found == Some(buffer);
        }
        self.local = new.local;
        self.create = new.create;
        self.drain = new.drain;
        let fixed = fixed.into_iter().chain([("buffer", same)]);
        fixed
            .filter_map(|(key, same)| (!same).then_some(key))
            .collect()
    }
}

fn wrong(why: impl Into<String>) -> Error {
    Error::invalid("service configuration", why)
}

impl DirectoryConfig {
    fn check(&self) -> Result<()> {
        refuse! { wrong;
            self.endpoints.is_empty() => "`directory.endpoints` is empty";
            !(1000 * MS..=HOUR).contains(&self.lease) =>
                "`directory.lease` is {:?}, not from 1 s to 1 h", self.lease;
            self.cert.is_some() != self.key.is_some() => "`directory.cert` and `directory.key` go together";
            self.user.is_some() != self.password_file.is_some() =>
                "`directory.user` and `directory.password_file` go together";
        }
        #[cfg(feature = "etcd")]
        return self.options().check();
        #[cfg(not(feature = "etcd"))]
        Err(crate::MemoryError::PlatformUnsupported {
            what: "`directory`, because this program was built without the feature etcd",
            source: None,
        }
        .into())
    }
}

/// Returns the error for an address of the metrics that other machines may reach.
pub(crate) fn elsewhere(address: &str) -> Error {
    let why = format!("other machines can reach {address}, and `metrics.anywhere` is not set");
    Error::invalid("metrics address", why)
}

/// Returns whether other machines may reach an address: all but loopback's, and names that may stand for others.
fn is_beyond(address: &Address) -> bool {
    let Address::Tcp { host, .. } = address else {
        return false;
    };
    let is_local = |ip: IpAddr| ip.to_canonical().is_loopback();
    let is_localhost = host.eq_ignore_ascii_case("localhost");
    !host.parse().map_or(is_localhost, is_local)
}
