//! What a service is to do: read from TOML, every value checked.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::units::{bytes, duration, maybe_bytes};
use super::{Reuse, Scrubber};
use crate::driver::{Access, NodeId};
use crate::exchange::protocol::check_name;
use crate::exchange::{Address, Limits, Who};
use crate::size::Granularity;
use crate::{Error, Result};

/// What a service is to do.
///
/// In TOML, sizes are strings such as `"16GiB"`, durations such as `"500ms"`, `"2s"`, `"5min"` or
/// `"1h"`. A key that is not known is an error. docs/service.md explains every key, and
/// docs/egmem.toml is an example.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ServiceConfig {
    /// Where clients connect: `unix:/path` or `tcp://host:port`. At least one.
    pub listen: Vec<Address>,
    /// Whether TCP addresses beyond this machine may be served without TLS: handles and names then
    /// travel in plain, and everybody who reaches the port is let in.
    #[serde(default)]
    pub plain_anywhere: bool,
    /// Certificates; without them only Unix sockets and loopback addresses are served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// Clients on this machine.
    #[serde(default)]
    pub local: LocalConfig,
    /// Memory by request; without it nobody may create any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub create: Option<CreateConfig>,
    /// Memory that is there from the start.
    #[serde(default, rename = "buffer")]
    pub buffers: Vec<BufferConfig>,
    /// Memory made ahead of need, for each node.
    #[serde(default, rename = "reserve")]
    pub reserves: Vec<ReserveConfig>,
    /// What a node keeps free, and is given at most.
    #[serde(default)]
    pub node: NodeConfig,
    /// What becomes of memory that was in use.
    #[serde(default)]
    pub reuse: ReuseConfig,
    /// How soon silent clients are given up.
    #[serde(default)]
    pub lease: LeaseConfig,
    /// How much peers may ask for; durations are whole milliseconds here.
    #[serde(default)]
    pub limits: Limits,
    /// Where metrics are told; without it, nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<MetricsConfig>,
    /// How the service ends.
    #[serde(default)]
    pub drain: DrainConfig,
    /// Where the service's names are made known; needs the feature `etcd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<DirectoryConfig>,
}

/// Certificate files, in PEM. They are read again on reload.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// The authority that clients' certificates come from.
    pub ca: PathBuf,
    /// The service's own certificate, and what links it to the authority.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Revoked certificates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crl: Option<PathBuf>,
}

/// See [`ServiceConfig::local`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LocalConfig {
    /// The Unix socket at which TCP clients of this machine get their fds; by default one in a
    /// directory of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub door: Option<PathBuf>,
    /// The users who may connect to Unix sockets besides the service's own.
    #[serde(default)]
    pub users: Vec<u32>,
    /// Whether any user may; names' lists of peers hold all the same.
    #[serde(default)]
    pub any_user: bool,
}

/// See [`ServiceConfig::create`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CreateConfig {
    /// Who may: names of certificates, `*.suffix`, `uid:1000`, `local`, or `*`.
    pub who: Who,
    /// Where memory goes that is asked for on no node; without it, where most is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// The most bytes of one peer, padding counted.
    #[serde(with = "bytes", default = "defaults::peer_bytes")]
    pub peer_bytes: u64,
    /// The most names of one peer.
    #[serde(default = "defaults::peer_names")]
    pub peer_names: u64,
}

/// A name that is there from the start.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BufferConfig {
    /// The name.
    pub name: String,
    /// The size.
    #[serde(with = "bytes")]
    pub bytes: u64,
    /// The host node that it lies on; or else:
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// The GPU on whose host node it lies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<i32>,
    /// Who may fetch it, as for [`CreateConfig::who`].
    pub who: Who,
    /// What they may do with it.
    #[serde(default)]
    pub access: Access,
    /// Whether clients may probe it, in the padding behind its bytes.
    #[serde(default = "defaults::yes")]
    pub probe: bool,
}

/// Memory made ahead of need on one node.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ReserveConfig {
    /// The host node.
    pub node: NodeId,
    /// How much to keep ready.
    #[serde(with = "bytes")]
    pub bytes: u64,
    /// In pieces of this size: a buffer is made of whole ones and an exact rest.
    #[serde(with = "bytes", default = "defaults::chunk")]
    pub chunk: u64,
    /// Where memory is short, pieces are halved down to this size.
    #[serde(with = "bytes", default = "defaults::min_chunk")]
    pub min_chunk: u64,
}

/// What holds for each node.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NodeConfig {
    /// What the service pins at most on one node, the reserve too; without it, what the headroom
    /// leaves.
    #[serde(with = "maybe_bytes", default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// What a node is to have free after each step.
    #[serde(with = "bytes", default = "defaults::headroom")]
    pub headroom: u64,
    /// How long the filling of a reserve waits after memory was given out, so that the driver is
    /// free for the client that imports it.
    #[serde(with = "duration", default = "defaults::quiet")]
    pub quiet: Duration,
    /// When to try again after a reserve could not be filled.
    #[serde(with = "duration", default = "defaults::retry")]
    pub retry: Duration,
}

/// See [`ServiceConfig::reuse`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ReuseConfig {
    /// Who may get memory that was released cleanly.
    #[serde(default)]
    pub policy: Reuse,
    /// How much of it is kept on each node at most for the peers that had it.
    #[serde(with = "bytes", default = "defaults::keep")]
    pub keep: u64,
    /// Who zeroes it.
    #[serde(default)]
    pub scrub: Scrubber,
    /// In how many threads of the CPU, for each node.
    #[serde(default = "defaults::threads")]
    pub threads: usize,
}

/// See [`ServiceConfig::lease`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseConfig {
    /// How often clients give a sign of life.
    #[serde(with = "duration", default = "defaults::heartbeat")]
    pub heartbeat: Duration,
    /// After which silence their leases end: at least twice the heartbeat.
    #[serde(with = "duration", default = "defaults::expiry")]
    pub expiry: Duration,
}

/// See [`ServiceConfig::metrics`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MetricsConfig {
    /// Host and port; port 0 is any free one.
    pub address: String,
    /// Whether the address may be reached from other machines; metrics have no secrets in them,
    /// but names of nodes and amounts.
    #[serde(default)]
    pub anywhere: bool,
}

/// See [`ServiceConfig::drain`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DrainConfig {
    /// How long holders may take to release what they hold.
    #[serde(with = "duration", default = "defaults::drain")]
    pub deadline: Duration,
}

/// See [`ServiceConfig::directory`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DirectoryConfig {
    /// etcd's addresses: `https://host:2379`.
    pub endpoints: Vec<String>,
    /// What all keys begin with; it begins and ends with a slash.
    #[serde(default = "defaults::prefix")]
    pub prefix: String,
    /// The address at which other nodes reach this service.
    pub advertise: Address,
    /// After which silence of this service etcd forgets it; in whole seconds.
    #[serde(with = "duration", default = "defaults::directory_lease")]
    pub lease: Duration,
    /// The authority that etcd's certificate comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// This service's certificate for etcd, where it asks for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cert: Option<PathBuf>,
    /// Its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// etcd's user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// A file with the user's password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_file: Option<PathBuf>,
}

mod defaults {
    use super::*;

    pub fn yes() -> bool {
        true
    }
    pub fn peer_bytes() -> u64 {
        64 << 30
    }
    pub fn peer_names() -> u64 {
        256
    }
    pub fn chunk() -> u64 {
        512 << 20
    }
    pub fn min_chunk() -> u64 {
        16 << 20
    }
    pub fn headroom() -> u64 {
        1 << 30
    }
    pub fn quiet() -> Duration {
        Duration::from_secs(1)
    }
    pub fn retry() -> Duration {
        Duration::from_secs(5)
    }
    pub fn keep() -> u64 {
        16 << 30
    }
    pub fn threads() -> usize {
        4
    }
    pub fn heartbeat() -> Duration {
        Duration::from_secs(2)
    }
    pub fn expiry() -> Duration {
        Duration::from_secs(10)
    }
    pub fn drain() -> Duration {
        Duration::from_secs(30)
    }
    pub fn prefix() -> String {
        "/egmem/v1/".into()
    }
    pub fn directory_lease() -> Duration {
        Duration::from_secs(10)
    }
}

impl Default for NodeConfig {
    fn default() -> Self {
        Self {
            max_bytes: None,
            headroom: defaults::headroom(),
            quiet: defaults::quiet(),
            retry: defaults::retry(),
        }
    }
}

impl Default for ReuseConfig {
    fn default() -> Self {
        Self {
            policy: Reuse::default(),
            keep: defaults::keep(),
            scrub: Scrubber::default(),
            threads: defaults::threads(),
        }
    }
}

impl Default for LeaseConfig {
    fn default() -> Self {
        Self {
            heartbeat: defaults::heartbeat(),
            expiry: defaults::expiry(),
        }
    }
}

impl Default for DrainConfig {
    fn default() -> Self {
        Self {
            deadline: defaults::drain(),
        }
    }
}

impl ServiceConfig {
    /// Reads and checks a configuration.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that says what is wrong and where: a key that is not known or is
    /// missing, a value that cannot be; what [`check`](Self::check) finds.
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
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn from_toml(text: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let line = error
                .span()
                .and_then(|span| text.get(..span.start))
                .map_or(1, |before| before.matches('\n').count() + 1);
            wrong(format!("line {line}: {}", error.message().trim()))
        })?;
        config.check()?;
        Ok(config)
    }

    /// Checks what types do not.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the key.
    pub fn check(&self) -> Result<()> {
        if self.listen.is_empty() {
            return Err(wrong("`listen` is empty: nobody could connect"));
        }
        if self.plain_anywhere && self.tls.is_some() {
            return Err(wrong("`plain_anywhere` and `tls` exclude each other"));
        }
        if let Some(create) = &self.create {
            some(&create.peer_bytes, "create.peer_bytes")?;
            some(&create.peer_names, "create.peer_names")?;
        }
        let mut names: Vec<&str> = Vec::new();
        for buffer in &self.buffers {
            buffer.check()?;
            if names.contains(&buffer.name.as_str()) {
                return Err(wrong(format!(
                    "two buffers have the name '{}'",
                    buffer.name
                )));
            }
            names.push(&buffer.name);
        }
        let mut nodes = Vec::new();
        for reserve in &self.reserves {
            reserve.check()?;
            if nodes.contains(&reserve.node) {
                return Err(wrong(format!("node {} has two reserves", reserve.node)));
            }
            nodes.push(reserve.node);
        }
        if let Some(max) = self.node.max_bytes {
            some(&max, "node.max_bytes")?;
            if let Some(reserve) = self.reserves.iter().find(|reserve| reserve.bytes > max) {
                return Err(wrong(format!(
                    "the reserve of node {} is larger than `node.max_bytes`",
                    reserve.node
                )));
            }
        }
        between(self.node.quiet, "node.quiet", Duration::ZERO, HOUR)?;
        between(self.node.retry, "node.retry", MS, DAY)?;
        if !(1..=256).contains(&self.reuse.threads) {
            return Err(wrong("`reuse.threads` is not from 1 to 256"));
        }
        between(self.lease.heartbeat, "lease.heartbeat", 10 * MS, HOUR)?;
        between(self.lease.expiry, "lease.expiry", 20 * MS, DAY)?;
        if self.lease.expiry < 2 * self.lease.heartbeat {
            return Err(wrong("`lease.expiry` is less than twice `lease.heartbeat`"));
        }
        between(self.drain.deadline, "drain.deadline", Duration::ZERO, DAY)?;
        if let Some(directory) = &self.directory {
            directory.check()?;
        }
        Ok(())
    }
}

impl ServiceConfig {
    /// Takes over what can be changed in a running service; returns the keys that cannot.
    pub(super) fn take_over(&mut self, new: Self) -> Vec<&'static str> {
        let mut restart = Vec::new();
        let mut fixed = |key, same: bool| {
            if !same {
                restart.push(key);
            }
        };
        fixed("listen", self.listen == new.listen);
        fixed("plain_anywhere", self.plain_anywhere == new.plain_anywhere);
        fixed("tls", self.tls == new.tls);
        fixed("local", self.local == new.local);
        fixed("reserve", self.reserves == new.reserves);
        fixed("node", self.node == new.node);
        fixed("reuse", self.reuse == new.reuse);
        fixed("lease", self.lease == new.lease);
        fixed("limits", self.limits == new.limits);
        fixed("metrics", self.metrics == new.metrics);
        fixed("directory", self.directory == new.directory);
        let mut same = self.buffers.len() == new.buffers.len();
        for buffer in &mut self.buffers {
            match new.buffers.iter().find(|new| new.name == buffer.name) {
                Some(new) => {
                    buffer.who = new.who.clone();
                    same &= buffer == new;
                }
                None => same = false,
            }
        }
        fixed("buffer", same);
        self.create = new.create;
        self.drain = new.drain;
        restart
    }
}

const MS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);

fn wrong(why: impl Into<String>) -> Error {
    Error::invalid("service configuration", why)
}

fn some(value: &u64, key: &str) -> Result<()> {
    match value {
        0 => Err(wrong(format!("`{key}` is 0"))),
        _ => Ok(()),
    }
}

fn between(value: Duration, key: &str, least: Duration, most: Duration) -> Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(wrong(format!(
        "`{key}` is {value:?}, not from {least:?} to {most:?}"
    )))
}

impl BufferConfig {
    fn check(&self) -> Result<()> {
        let name = &self.name;
        check_name(name).map_err(|error| wrong(format!("a buffer's `name`: {error}")))?;
        let wrong = |why: &str| Err(wrong(format!("buffer '{name}': {why}")));
        if self.bytes == 0 || self.bytes > isize::MAX as u64 {
            return wrong("`bytes` is 0, or more than an address space holds");
        }
        if self.node.is_some() == self.gpu.is_some() {
            return wrong("either `node` or `gpu` says where it lies");
        }
        if self.node.is_some_and(|node| node.0 < 0) || self.gpu.is_some_and(|gpu| gpu < 0) {
            return wrong("`node` or `gpu` is negative");
        }
        if self.access == Access::None {
            return wrong("`access` is none");
        }
        Ok(())
    }
}

impl ReserveConfig {
    fn check(&self) -> Result<()> {
        let node = self.node;
        let wrong = |why: &str| Err(wrong(format!("reserve of node {node}: {why}")));
        if node.0 < 0 {
            return wrong("`node` is negative");
        }
        for (key, bytes) in [("chunk", self.chunk), ("min_chunk", self.min_chunk)] {
            if bytes == 0 || !Granularity::TWO_MIB.divides(bytes) || bytes > 1 << 40 {
                return wrong(&format!("`{key}` is no multiple of 2 MiB up to 1 TiB"));
            }
        }
        if self.min_chunk > self.chunk {
            return wrong("`min_chunk` is larger than `chunk`");
        }
        if self.bytes == 0 || self.bytes > isize::MAX as u64 {
            return wrong("`bytes` is 0, or more than an address space holds");
        }
        Ok(())
    }
}

impl DirectoryConfig {
    fn check(&self) -> Result<()> {
        if self.endpoints.is_empty() {
            return Err(wrong("`directory.endpoints` is empty"));
        }
        if self.cert.is_some() != self.key.is_some() {
            return Err(wrong("`directory.cert` and `directory.key` go together"));
        }
        if self.user.is_some() != self.password_file.is_some() {
            return Err(wrong(
                "`directory.user` and `directory.password_file` go together",
            ));
        }
        between(self.lease, "directory.lease", Duration::from_secs(1), HOUR)?;
        if cfg!(not(feature = "etcd")) {
            return Err(Error::PlatformUnsupported {
                what: "`directory`, because this program was built without the feature etcd",
                source: None,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: &str = "listen = [\"unix:/run/egmem/egmem.sock\"]\n";

    #[test]
    fn the_sample_is_read_and_survives_writing() {
        let config = ServiceConfig::from_toml(include_str!("../../docs/egmem.toml"));
        // Without the feature etcd it says so, and that is all that is wrong.
        if cfg!(not(feature = "etcd")) {
            return;
        }
        let config = config.unwrap();
        assert_eq!(config.buffers.len(), 2);
        assert_eq!(config.reserves[0].bytes, 64 << 30);
        let json = serde_json::to_string(&config).unwrap();
        assert_eq!(
            serde_json::from_str::<ServiceConfig>(&json).unwrap(),
            config
        );
    }

    #[test]
    fn little_is_enough() {
        let config = ServiceConfig::from_toml(LEAST).unwrap();
        assert_eq!(config.reuse.policy, Reuse::SamePeer);
        assert_eq!(config.create, None);
        assert_eq!(config.lease.expiry, Duration::from_secs(10));
        assert!(!config.plain_anywhere);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let buffer = "[[buffer]]\nname = \"a\"\nbytes = \"1MiB\"\nwho = [\"*\"]\n";
        for (text, words) in [
            ("", "listen"),
            ("listen = []", "listen"),
            ("listen = [\"unix:/a\"]\nlisen = 1", "lisen"),
            ("listen = 7", "line 1"),
            ("@[lease]\nheart_beat = \"1s\"", "heart_beat"),
            ("@[lease]\nheartbeat = \"1 fortnight\"", "fortnight"),
            ("@[lease]\nheartbeat = \"8s\"", "twice"),
            ("@[lease]\nheartbeat = \"1ms\"", "lease.heartbeat"),
            ("@[drain]\ndeadline = \"25h\"", "drain.deadline"),
            ("@[reuse]\npolicy = \"some\"", "same-peer"),
            ("@[reuse]\nthreads = 0", "reuse.threads"),
            ("@[node]\nmax_bytes = \"12 XB\"", "XB"),
            ("@[create]\nwho = [\"*\"]\npeer_names = 0", "peer_names"),
            ("@[[reserve]]\nnode = 0\nbytes = \"0\"", "`bytes`"),
            (
                "@[[reserve]]\nnode = 0\nbytes = \"1G\"\nchunk = \"3MiB\"",
                "`chunk`",
            ),
            (
                "@[[reserve]]\nnode = 0\nbytes = \"1G\"\nchunk = \"8MiB\"",
                "min_chunk",
            ),
            (
                "@[[reserve]]\nnode = 0\nbytes = \"1G\"\n[[reserve]]\nnode = 0\nbytes = \"1G\"",
                "two reserves",
            ),
            (
                "@[node]\nmax_bytes = \"1M\"\n[[reserve]]\nnode = 0\nbytes = \"1G\"",
                "max_bytes",
            ),
            ("listen = [\"nowhere\"]", "tcp://host:port"),
            ("@[create]\nwho = [\"uid:x\"]", "uid:"),
            (
                "@[[buffer]]\nname = \"a b\"\nbytes = \"1\"\nnode = 0\nwho = []",
                "`name`",
            ),
            ("@#", "`node` or `gpu`"),
            ("@#node = 0\ngpu = 0", "`node` or `gpu`"),
            ("@#gpu = -1", "negative"),
            ("@#gpu = 0\naccess = \"none\"", "access"),
            ("@#gpu = 0\n#gpu = 0", "name 'a'"),
        ] {
            let text = text.replace('@', LEAST).replace('#', buffer);
            let error = ServiceConfig::from_toml(&text).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
            assert!(error.to_string().contains(words), "{text}: {error}");
        }
    }
}
