//! What a service is to do: read from TOML, every value checked.

mod check;
mod defaults;
mod network;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use check::wrong;
pub(super) use defaults::forgive_after;

use super::units::{bytes, duration, maybe_bytes};
use super::{Reuse, Scrubber};
use crate::Result;
use crate::driver::{Access, NodeId};
use crate::exchange::{Address, Limits, Namespaces, Who};
use crate::text::bounded;

/// How much of a parser's message is passed on, in bytes: it quotes the file.
const MAX_EXCERPT: usize = 400;

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
    /// Which peers may join groups of which names; without an entry nobody may join any.
    #[serde(default)]
    pub groups: Vec<GroupsConfig>,
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
    /// Where audit events are written; without it, to the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit: Option<AuditConfig>,
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
    /// The most bytes that are pinned because of one peer, padding, what is added for probes and deleted
    /// memory counted.
    #[serde(with = "bytes", default = "defaults::peer_bytes")]
    pub peer_bytes: u64,
    /// The most names of one peer.
    #[serde(default = "defaults::peer_names")]
    pub peer_names: u64,
    /// After how long deleted memory counts no more that a silent holder may still have mapped, if
    /// nothing was heard of it: from 1 ms to 8784 h (366 days), 24 h by default.
    #[serde(with = "duration", default = "defaults::forgive_after")]
    pub forgive_after: Duration,
    /// Which names they may create. A peer that none of these names creates names under its own name
    /// alone, such as `uid:1000/`.
    #[serde(default, rename = "prefix", skip_serializing_if = "Vec::is_empty")]
    pub prefixes: Vec<PrefixConfig>,
}

/// Prefixes of the names that some peers may create. See [`CreateConfig::prefixes`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PrefixConfig {
    /// Which peers, as for [`CreateConfig::who`].
    pub peers: Who,
    /// What their names begin with, instead of the peer's own name. Each ends with a slash; `{peer}`
    /// stands for the peer's name; an empty prefix allows every name. Several entries for a peer add up.
    pub names: Vec<String>,
}

impl CreateConfig {
    /// Which names each peer may create.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a prefix that
    /// [`Namespaces::rule`] refuses.
    pub fn namespaces(&self) -> Result<Namespaces> {
        let mut rules = self.prefixes.iter();
        rules.try_fold(Namespaces::own(), |all, rule| {
            all.rule(rule.peers.clone(), rule.names.iter().cloned())
        })
    }
}

/// The right to join groups.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct GroupsConfig {
    /// The groups: a name, or the beginning of names followed by `*`.
    pub name: String,
    /// Which peers may join them, as for [`CreateConfig::who`].
    pub who: Who,
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
    /// Whether clients may probe it, in the padding behind its bytes. Where those fill all, one
    /// granule (2 MiB) is added, unless the node has no room for it.
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

/// See [`ServiceConfig::audit`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AuditConfig {
    /// A file to append to, one JSON object a line. It is made with mode 0600, and opened again on reload.
    pub file: PathBuf,
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

impl ServiceConfig {
    /// Reads and checks a configuration.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) that says what is wrong and where: a
    /// key that is not known or is missing, a value that cannot be; what [`check`](Self::check)
    /// finds.
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
            wrong(format!(
                "line {line}: {}",
                bounded(error.message().trim(), MAX_EXCERPT)
            ))
        })?;
        config.check()?;
        Ok(config)
    }
}
