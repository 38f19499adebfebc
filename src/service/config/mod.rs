//! A service's configuration: its tables and keys.

mod check;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::driver::{Access, NodeId};
#[cfg(feature = "etcd")]
use crate::exchange::directory::{Directory, EtcdOptions, Exporter, Registration};
use crate::exchange::server::ServerOptions;
use crate::exchange::{Address, Limits, Namespaces, PeerList, Security, Server, TlsFiles};
use crate::share::Peers;
use crate::{Backing, Reuse, Scrubber};

pub(crate) use check::elsewhere;

/// A service's configuration.
///
/// In TOML, sizes are strings such as `"16GiB"`, durations such as `"500ms"`, `"2s"`, `"5min"` or `"1h"`. An
/// unknown key is an error. docs/service.md explains every key, and docs/egmem.toml is an example.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct ServiceConfig {
    /// Where clients connect: `unix:/path` or `tcp://host:port`. At least one.
    pub listen: Vec<Address>,
    /// Whether TCP addresses beyond this machine may be served without TLS: handles and names are then sent
    /// in plaintext, and any host that reaches the port may connect.
    pub plain_anywhere: bool,
    /// Certificates, which a reload reads again; without them only Unix sockets and loopback addresses are served.
    pub tls: Option<TlsFiles>,
    /// Clients on this machine.
    pub local: LocalConfig,
    /// Creation of memory by request; without it no peer may create any.
    pub create: Option<CreateConfig>,
    /// Memory that exists from the start.
    #[serde(rename = "buffer")]
    pub buffers: Vec<BufferConfig>,
    /// Memory allocated in advance, for each node.
    #[serde(rename = "reserve")]
    pub reserves: Vec<ReserveConfig>,
    /// Limits and the kind of memory for each node.
    pub node: NodeConfig,
    /// Reuse of memory that a peer had before.
    pub reuse: ReuseConfig,
    /// How soon silent clients expire.
    pub lease: LeaseConfig,
    /// How much peers may ask for; durations are whole milliseconds here.
    pub limits: Limits,
    /// Where metrics are served; without it, nowhere.
    pub metrics: Option<MetricsConfig>,
    /// Where audit events are written; without it, to the log.
    pub audit: Option<AuditConfig>,
    /// How the service ends.
    pub drain: DrainConfig,
    /// The directory in which the service registers its names; needs the feature `etcd`.
    pub directory: Option<DirectoryConfig>,
}

/// See [`ServiceConfig::local`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct LocalConfig {
    /// The users that may connect to Unix sockets besides the service's own.
    pub users: Vec<u32>,
    /// Whether any user may; the names' lists of peers still apply.
    pub any_user: bool,
}

/// See [`ServiceConfig::create`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CreateConfig {
    /// The peers that may: names of certificates, `*.suffix`, `uid:1000`, `local`, or `*`.
    pub who: PeerList,
    /// The node for requests that name none; without it, the node with most memory ready.
    pub node: Option<NodeId>,
    /// The most bytes pinned for one peer, including padding, room for probes, and deleted memory.
    #[serde(with = "bytes", default = "number::<{ 64 << 30 }>")]
    pub peer_bytes: u64,
    /// The most names of one peer.
    #[serde(default = "number::<256>")]
    pub peer_names: u64,
    /// How long deleted memory counts that a silent holder may still have mapped: from 1 ms to 8784 h (366
    /// days), 24 h by default.
    #[serde(with = "humantime_serde", default = "seconds::<FORGIVE_AFTER>")]
    pub forgive_after: Duration,
    /// The names that peers may create. A peer without an entry here may create names only under its own
    /// name, such as `uid:1000/`.
    #[serde(default, rename = "prefix", skip_serializing_if = "Vec::is_empty")]
    pub prefixes: Vec<PrefixConfig>,
}

/// Prefixes of the names that some peers may create. See [`CreateConfig::prefixes`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PrefixConfig {
    /// The peers, as for [`CreateConfig::who`].
    pub peers: PeerList,
    /// The prefixes of their names, instead of the peer's own name. Each ends with a slash; `{peer}` stands
    /// for the peer's name; an empty prefix allows every name. Several entries for a peer add up.
    pub names: Vec<String>,
}

impl CreateConfig {
    /// Returns the names that each peer may create.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a prefix that [`Namespaces::rule`]
    /// refuses.
    pub fn namespaces(&self) -> Result<Namespaces> {
        let mut rules = self.prefixes.iter();
        rules.try_fold(Namespaces::own(), |all, rule| {
            all.rule(rule.peers.clone(), rule.names.iter().cloned())
        })
    }
}

/// A name that exists from the start.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BufferConfig {
    /// The name.
    pub name: String,
    /// The size.
    #[serde(with = "bytes")]
    pub bytes: u64,
    /// The host node that it lies on; or instead:
    pub node: Option<NodeId>,
    /// The GPU on whose host node it lies.
    pub gpu: Option<i32>,
    /// The peers that may fetch it, as for [`CreateConfig::who`].
    pub who: PeerList,
    /// Their access to it.
    #[serde(default)]
    pub access: Access,
    /// Whether clients may probe it, in the padding behind its bytes. If the bytes leave no padding, one
    /// granule (2 MiB) is added, unless the node has no room for it.
    #[serde(default = "yes")]
    pub probe: bool,
}

/// Memory allocated in advance on one node.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ReserveConfig {
    /// The host node.
    pub node: NodeId,
    /// How many bytes to keep ready.
    #[serde(with = "bytes")]
    pub bytes: u64,
    /// The size of a piece: a buffer consists of whole pieces and an exact remainder.
    #[serde(with = "bytes", default = "number::<CHUNK>")]
    pub chunk: u64,
    /// If memory is short, pieces are halved down to this size. `bytes` below it are one piece.
    #[serde(with = "bytes", default = "number::<MIN_CHUNK>")]
    pub min_chunk: u64,
}

/// Limits and the kind of memory for each node.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeConfig {
    /// The most bytes that the service pins on one node, including the reserve; by default all but the headroom.
    #[serde(with = "bytes")]
    pub max_bytes: u64,
    /// How much a node is to have free after each step.
    #[serde(with = "bytes")]
    pub headroom: u64,
    /// What all memory of the service is: [`Auto`](Backing::Auto) is decided for each node at the start.
    pub backing: Backing,
    /// How long the reserve stops filling after memory was handed out, so that the driver is free for the
    /// client that imports it.
    #[serde(with = "humantime_serde")]
    pub quiet: Duration,
    /// When to retry after a reserve could not be filled.
    #[serde(with = "humantime_serde")]
    pub retry: Duration,
}

/// See [`ServiceConfig::reuse`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReuseConfig {
    /// Which peers may get memory that was released cleanly.
    pub policy: Reuse,
    /// The most bytes kept on each node for the peers that had them.
    #[serde(with = "bytes")]
    pub keep: u64,
    /// The processor that zeroes the memory.
    pub scrub: Scrubber,
    /// The number of CPU threads for zeroing, for each node.
    pub threads: usize,
}

/// See [`ServiceConfig::lease`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct LeaseConfig {
    /// How often clients send a heartbeat.
    #[serde(with = "humantime_serde")]
    pub heartbeat: Duration,
    /// How long a client may be silent before its leases end: at least twice the heartbeat.
    #[serde(with = "humantime_serde")]
    pub expiry: Duration,
}

/// See [`ServiceConfig::metrics`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MetricsConfig {
    /// Host and port; port 0 is any free one.
    pub address: String,
    /// Whether other machines may reach the address; metrics contain no secrets, but names of nodes and
    /// amounts.
    #[serde(default)]
    pub anywhere: bool,
}

/// See [`ServiceConfig::audit`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AuditConfig {
    /// A file to append to, one JSON object per line. It is created with mode 0600, and reopened on reload.
    pub file: PathBuf,
}

/// See [`ServiceConfig::drain`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct DrainConfig {
    /// How long holders may take to release their memory.
    #[serde(with = "humantime_serde")]
    pub deadline: Duration,
}

/// See [`ServiceConfig::directory`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DirectoryConfig {
    /// etcd's addresses: `https://host:2379`.
    pub endpoints: Vec<String>,
    /// The prefix of all keys; it begins and ends with a slash.
    #[serde(default = "prefix")]
    pub prefix: String,
    /// The address at which other nodes reach this service.
    pub advertise: Address,
    /// How long this service may be silent before etcd forgets it, in whole seconds.
    #[serde(with = "humantime_serde", default = "seconds::<10>")]
    pub lease: Duration,
    /// The authority that signs etcd's certificate.
    pub ca: Option<PathBuf>,
    /// This service's certificate for etcd, if etcd requires one.
    pub cert: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
    /// etcd's user.
    pub user: Option<String>,
    /// A file with the user's password.
    pub password_file: Option<PathBuf>,
}

impl Default for NodeConfig {
    fn default() -> Self {
        Self {
            max_bytes: u64::MAX,
            headroom: 1 << 30,
            backing: Backing::Auto,
            quiet: Duration::from_secs(1),
            retry: Duration::from_secs(5),
        }
    }
}

impl Default for ReuseConfig {
    fn default() -> Self {
        Self {
            policy: Reuse::default(),
            keep: 16 << 30,
            scrub: Scrubber::default(),
            threads: 4,
        }
    }
}

impl Default for LeaseConfig {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(2),
            expiry: Duration::from_secs(10),
        }
    }
}

impl Default for DrainConfig {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(30),
        }
    }
}

/// The sizes of a reserve's pieces, unless it is configured.
pub(crate) const CHUNK: u64 = 512 << 20;
pub(crate) const MIN_CHUNK: u64 = 16 << 20;
/// Longer than a debugger stops a program, and longer than most jobs run; short enough that a node whose
/// clients crash regains its quota without an operator.
pub(super) const FORGIVE_AFTER: u64 = 86_400;

/// Default values of tables that also have keys without one.
fn number<const N: u64>() -> u64 {
    N
}
fn seconds<const N: u64>() -> Duration {
    Duration::from_secs(N)
}
fn yes() -> bool {
    true
}
fn prefix() -> String {
    "/egmem/v1/".into()
}

/// For `#[serde(with)]`: a size in bytes.
mod bytes {
    use serde::{Deserialize, Deserializer, Serializer, de};

    use crate::size::Bytes;

    pub fn serialize<S: Serializer>(bytes: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(bytes)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        let Bytes(bytes) = text.parse().map_err(de::Error::custom)?;
        Ok(bytes)
    }
}

#[cfg(feature = "etcd")]
impl DirectoryConfig {
    /// Returns the options to reach etcd, without the user.
    pub(crate) fn options(&self) -> EtcdOptions {
        let mut options = EtcdOptions::new(self.endpoints.clone())
            .prefix(self.prefix.as_str())
            .lease(self.lease);
        if let Some(ca) = &self.ca {
            options = options.ca(ca);
        }
        match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => options.identity(cert, key),
            _ => options,
        }
    }

    /// Registers the service in etcd; its names follow as they are published.
    pub(crate) fn register(&self, server: &Server) -> Result<Registration> {
        let mut options = self.options();
        if let (Some(user), Some(file)) = (&self.user, &self.password_file) {
            let text = std::fs::read_to_string(file).map_err(|error| {
                crate::Error::system(format!("cannot read {}", file.display()), &error)
            })?;
            let text = zeroize::Zeroizing::new(text);
            options = options.user(user.as_str(), text.trim_end_matches('\n'));
        }
        let unix = server.addresses().into_iter().filter(Address::is_unix);
        Directory::etcd(options)?.register(Exporter {
            addresses: [self.advertise.clone()].into_iter().chain(unix).collect(),
            instance: server.instance(),
            boot: crate::share::BootId::current()?,
        })
    }
}

/// Returns the options of the exchange's server. [`ServiceConfig::check`] checks the same options.
pub(crate) fn server_options(config: &ServiceConfig, security: Security) -> ServerOptions {
    let options = Server::options()
        .security(security)
        .limits(config.limits.clone())
        .heartbeat(config.lease.heartbeat)
        .lease(config.lease.expiry)
        .peers(peers(config));
    let addresses = config.listen.iter().cloned();
    addresses.fold(options, ServerOptions::listen)
}

/// Returns the local users that may connect.
pub(crate) fn peers(config: &ServiceConfig) -> Peers {
    let peers = Peers::same_user();
    if config.local.any_user {
        return peers.any_user();
    }
    let users = config.local.users.iter();
    users.fold(peers, |peers, &uid| peers.and_user(uid))
}
