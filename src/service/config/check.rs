//! Checks beyond the types, and changes that a running service accepts.

use std::time::Duration;

use super::tables::{AuditConfig, BufferConfig, DirectoryConfig, ReserveConfig, ServiceConfig};
use crate::driver::{Access, refuse};
use crate::exchange::PeerName;
use crate::exchange::protocol::check_name;
use crate::size::Granularity;
use crate::{Backing, Error, Growth, Result};

impl ServiceConfig {
    /// Checks the configuration beyond its types.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) that names the key.
    pub fn check(&self) -> Result<()> {
        let is_empty = |audit: &AuditConfig| audit.file.as_os_str().is_empty();
        refuse! { wrong;
            self.listen.is_empty() => "`listen` is empty: no client could connect";
            self.plain_anywhere && self.tls.is_some() => "`plain_anywhere` and `tls` exclude each other";
            self.audit.as_ref().is_some_and(is_empty) => "`audit.file` is empty";
        }
        if let Some(create) = &self.create {
            refuse! { wrong;
                create.node.is_some_and(|node| node.0 < 0) => "`create.node` is negative";
                create.peer_bytes == 0 => "`create.peer_bytes` is 0";
                create.peer_names == 0 => "`create.peer_names` is 0";
            }
            create
                .namespaces()
                .map_err(|error| wrong(format!("`create.prefix`: {error}")))?;
            between(create.forgive_after, "create.forgive_after", MS, 366 * DAY)?;
        }
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
        let is_open = self.node.backing == Backing::Registered;
        for buffer in &self.buffers {
            buffer.check()?;
            refuse! { wrong;
                is_open && buffer.access == Access::Read =>
                    "buffer '{}' has `access` \"read\", but registered memory is open to every GPU: set `node.backing` to \"auto\" or \"driver\"", buffer.name;
                names.contains(&buffer.name.as_str()) => "two buffers have the name '{}'", buffer.name;
            }
            names.push(&buffer.name);
        }
        let mut nodes = Vec::new();
        for reserve in &self.reserves {
            reserve.check()?;
            refuse! { wrong; nodes.contains(&reserve.node) => "node {} has two reserves", reserve.node; }
            nodes.push(reserve.node);
        }
        if let Some(max) = self.node.max_bytes {
            refuse! { wrong; max == 0 => "`node.max_bytes` is 0"; }
            for ReserveConfig { node, bytes, .. } in &self.reserves {
                refuse! { wrong; *bytes > max => "the reserve of node {node} is larger than `node.max_bytes`"; }
            }
            for BufferConfig { name, bytes, .. } in &self.buffers {
                refuse! { wrong; *bytes > max => "buffer '{name}' is larger than `node.max_bytes`"; }
            }
        }
        refuse! { wrong;
            !(1..=256).contains(&self.reuse.threads) => "`reuse.threads` is not from 1 to 256";
        }
        Ok(())
    }

    fn check_times(&self) -> Result<()> {
        between(self.node.quiet, "node.quiet", Duration::ZERO, HOUR)?;
        between(self.node.retry, "node.retry", MS, DAY)?;
        between(self.lease.heartbeat, "lease.heartbeat", 10 * MS, HOUR)?;
        between(self.lease.expiry, "lease.expiry", 20 * MS, DAY)?;
        refuse! { wrong;
            self.lease.expiry < 2 * self.lease.heartbeat =>
                "`lease.expiry` is less than twice `lease.heartbeat`";
        }
        between(self.drain.deadline, "drain.deadline", Duration::ZERO, DAY)
    }
}

impl ServiceConfig {
    /// Returns whether a list of certificate names includes the peer.
    pub(crate) fn lists(&self, peer: &PeerName) -> bool {
        let create = self.create.iter().map(|create| &create.who);
        let buffers = self.buffers.iter().map(|buffer| &buffer.who);
        let mut all = create.chain(buffers);
        all.any(|who| who.admits(peer))
    }

    /// Copies from `new` the values that can change in a running service; returns the keys of other differences.
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
        self.local = new.local;
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
        refuse! { |why| wrong(format!("buffer '{name}': {why}"));
            self.bytes == 0 || self.bytes > isize::MAX as u64 =>
                "`bytes` is 0, or more than an address space holds";
            self.node.is_some() == self.gpu.is_some() => "either `node` or `gpu` says where it lies";
            self.node.is_some_and(|node| node.0 < 0) || self.gpu.is_some_and(|gpu| gpu < 0) =>
                "`node` or `gpu` is negative";
            self.access == Access::None => "`access` is none";
        }
        Ok(())
    }
}

impl ReserveConfig {
    fn check(&self) -> Result<()> {
        let wrong = |why| wrong(format!("reserve of node {}: {why}", self.node));
        refuse! { wrong; self.node.0 < 0 => "`node` is negative"; }
        for (key, bytes) in [("chunk", self.chunk), ("min_chunk", self.min_chunk)] {
            refuse! { wrong;
                bytes == 0 || !Granularity::TWO_MIB.divides(bytes) || bytes > Growth::MAX_CHUNK =>
                    "`{key}` is not a multiple of 2 MiB up to 4094 MiB, the most that one driver call creates";
            }
        }
        refuse! { wrong;
            self.min_chunk > self.chunk => "`min_chunk` is larger than `chunk`";
            self.bytes == 0 || self.bytes > isize::MAX as u64 =>
                "`bytes` is 0, or more than an address space holds";
        }
        Ok(())
    }
}

impl DirectoryConfig {
    fn check(&self) -> Result<()> {
        refuse! { wrong;
            self.endpoints.is_empty() => "`directory.endpoints` is empty";
            self.cert.is_some() != self.key.is_some() => "`directory.cert` and `directory.key` go together";
            self.user.is_some() != self.password_file.is_some() =>
                "`directory.user` and `directory.password_file` go together";
        }
        between(self.lease, "directory.lease", Duration::from_secs(1), HOUR)?;
        crate::etcd::check(self)
    }
}
