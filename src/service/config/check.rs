//! Checks beyond the types, and changes that a running service accepts.

use std::time::Duration;

use super::tables::{BufferConfig, DirectoryConfig, ReserveConfig, ServiceConfig};
use crate::driver::Access;
use crate::exchange::group::Rights;
use crate::exchange::protocol::check_name;
use crate::exchange::{PeerName, Who};
use crate::size::Granularity;
use crate::{Error, Result};

impl ServiceConfig {
    /// Checks the configuration beyond its types.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) that names the key.
    pub fn check(&self) -> Result<()> {
        if self.listen.is_empty() {
            return Err(wrong("`listen` is empty: no client could connect"));
        }
        if self.plain_anywhere && self.tls.is_some() {
            return Err(wrong("`plain_anywhere` and `tls` exclude each other"));
        }
        if self
            .audit
            .as_ref()
            .is_some_and(|audit| audit.file.as_os_str().is_empty())
        {
            return Err(wrong("`audit.file` is empty"));
        }
        if let Some(create) = &self.create {
            if create.node.is_some_and(|node| node.0 < 0) {
                return Err(wrong("`create.node` is negative"));
            }
            some(&create.peer_bytes, "create.peer_bytes")?;
            some(&create.peer_names, "create.peer_names")?;
            create
                .namespaces()
                .map_err(|error| wrong(format!("`create.prefix`: {error}")))?;
            between(create.forgive_after, "create.forgive_after", MS, 366 * DAY)?;
        }
        Rights::new(self.group_rights()).map_err(|error| wrong(format!("`groups`: {error}")))?;
        self.check_memory()?;
        self.check_times()?;
        self.check_network()?;
        if let Some(directory) = &self.directory {
            directory.check()?;
        }
        Ok(())
    }

    /// Checks buffers, reserves, and the limits of each node.
    fn check_memory(&self) -> Result<()> {
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
            if let Some(buffer) = self.buffers.iter().find(|buffer| buffer.bytes > max) {
                return Err(wrong(format!(
                    "buffer '{}' is larger than `node.max_bytes`",
                    buffer.name
                )));
            }
        }
        if !(1..=256).contains(&self.reuse.threads) {
            return Err(wrong("`reuse.threads` is not from 1 to 256"));
        }
        Ok(())
    }

    fn check_times(&self) -> Result<()> {
        between(self.node.quiet, "node.quiet", Duration::ZERO, HOUR)?;
        between(self.node.retry, "node.retry", MS, DAY)?;
        between(self.lease.heartbeat, "lease.heartbeat", 10 * MS, HOUR)?;
        between(self.lease.expiry, "lease.expiry", 20 * MS, DAY)?;
        if self.lease.expiry < 2 * self.lease.heartbeat {
            return Err(wrong("`lease.expiry` is less than twice `lease.heartbeat`"));
        }
        between(self.drain.deadline, "drain.deadline", Duration::ZERO, DAY)
    }
}

impl ServiceConfig {
    /// Returns whether a list of certificate names includes the peer.
    pub(crate) fn lists(&self, peer: &PeerName) -> bool {
        let create = self.create.iter().map(|create| &create.who);
        let buffers = self.buffers.iter().map(|buffer| &buffer.who);
        let groups = self.groups.iter().map(|groups| &groups.who);
        let mut all = create.chain(buffers).chain(groups);
        all.any(|who| who.admits(peer))
    }

    /// Returns the rights to join groups, by pattern of names.
    pub(crate) fn group_rights(&self) -> Vec<(String, Who)> {
        let groups = self.groups.iter();
        groups
            .map(|groups| (groups.name.clone(), groups.who.clone()))
            .collect()
    }

    /// Copies from `new` what can change in a running service; returns the keys of other differences.
    pub(crate) fn take_over(&mut self, new: Self) -> Vec<&'static str> {
        let mut restart = Vec::new();
        let mut fixed = |key, same: bool| {
            if !same {
                restart.push(key);
            }
        };
        fixed("listen", self.listen == new.listen);
        fixed("plain_anywhere", self.plain_anywhere == new.plain_anywhere);
        fixed("tls", self.tls == new.tls);
        fixed("local", self.local.door == new.local.door);
        self.local.users = new.local.users;
        self.local.any_user = new.local.any_user;
        fixed("reserve", self.reserves == new.reserves);
        fixed("node", self.node == new.node);
        fixed("reuse", self.reuse == new.reuse);
        fixed("lease", self.lease == new.lease);
        fixed("limits", self.limits == new.limits);
        fixed("metrics", self.metrics == new.metrics);
        fixed("audit", self.audit == new.audit);
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
        self.groups = new.groups;
        self.drain = new.drain;
        restart
    }
}

const MS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);

pub(super) fn wrong(why: impl Into<String>) -> Error {
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
                return wrong(&format!("`{key}` is not a multiple of 2 MiB up to 1 TiB"));
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
        crate::etcd::check(self)
    }
}
