//! Asks an allocator service for memory.

use std::time::Duration;

use super::Client;
use crate::driver::{Location, NodeId};
use crate::protocol::{Answer, Ask, Create, Entry, List};
use crate::{Error, Mismatch, Owner, PeerList, Refusal, Result};

/// A request for new memory from an allocator service. See [`Client::create`].
#[derive(Clone, Debug, PartialEq)]
pub struct CreateOptions {
    create: Create,
    peers: Vec<String>,
    timeout: Duration,
}

impl CreateOptions {
    /// Requests `bytes` under `name`, on a node of the service's choice, for this client only.
    ///
    /// A service lets a peer create only names under its prefixes: by default those that begin with the
    /// peer's own name ([`Client::name`]) and a slash.
    pub fn new(name: impl Into<String>, bytes: u64) -> Self {
        Self {
            create: Create {
                name: name.into(),
                bytes,
                node: None,
                peers: String::new(),
            },
            peers: Vec::new(),
            timeout: Duration::from_secs(300),
        }
    }

    /// Sets which of the service's host nodes to use.
    pub fn node(mut self, node: NodeId) -> Self {
        self.create.node = Some(node);
        self
    }

    /// Lets other peers fetch it: a name or a pattern, as [`PeerList::list`] takes them.
    pub fn share_with(mut self, peer: impl Into<String>) -> Self {
        self.peers.push(peer.into());
        self
    }

    /// Sets how long it may take; 5 minutes by default. Drivers create 4 to 6 GB a second.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

impl Client {
    /// Asks an allocator service to create memory under a name; [fetch](Self::fetch) the name afterwards.
    ///
    /// # Errors
    /// [`Error::Refused`]: `unsupported` if the server is not an allocator service, `forbidden` for a peer
    /// that may not create memory or for a name outside its prefixes, `exists`, `quota`, `no_memory`;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a peer to share with that [`PeerList::list`] refuses;
    /// those of [`list`](Self::list).
    ///
    /// # Cancel safety
    /// If dropped before completion, the memory may be created or not: [`list`](Self::list) shows it.
    pub async fn create(&self, options: CreateOptions) -> Result<Entry> {
        let name = options.create.name.clone();
        let peers = PeerList::list(&options.peers)?.to_string();
        let ask = Ask::Create(Create {
            peers,
            ..options.create
        });
        match self.call(ask, options.timeout).await? {
            Answer::Names(mut names) => names.entries.pop().filter(|entry| entry.name == name),
            _ => None,
        }
        .ok_or_else(|| self.broken("unexpected answer, not the new name's entry"))
    }

    /// Creates memory under a name, or returns the entry of the memory that this client's peer created there
    /// before.
    ///
    /// A process that crashed finds its bytes again in this way, whatever its quota and its rights to create memory
    /// are by then: the name is looked up first. If another client of this peer is creating the name, `egmem serve`
    /// answers when that has ended. [Fetch](Self::fetch) the name with
    /// [`expect_owner`](super::FetchOptions::expect_owner), because it may be deleted and created again in
    /// between. The access list of existing memory stays as it was.
    ///
    /// # Errors
    /// [`Error::Mismatched`] if the name exists and has another owner, another size, or, if
    /// [`node`](CreateOptions::node) is set, another node; [`Error::Refused`] with `exists` if this peer may
    /// not see the name or it is being withdrawn; those of [`create`](Self::create).
    ///
    /// # Cancel safety
    /// As [`create`](Self::create).
    pub async fn create_or_get(&self, options: CreateOptions) -> Result<Entry> {
        let asked = options.create.clone();
        if let Some(entry) = self.entry(&asked.name).await? {
            return self.check_existing(&asked, entry);
        }
        match self.create(options).await {
            // Another client has created it meanwhile.
            Err(exists) if exists.refusal() == Some(&Refusal::Exists) => {
                let entry = self.entry(&asked.name).await?.ok_or(exists)?;
                self.check_existing(&asked, entry)
            }
            made => made,
        }
    }

    /// Returns a name's entry, if this client may see it.
    pub(super) async fn entry(&self, name: &str) -> Result<Option<Entry>> {
        let ask = Ask::List(List {
            prefix: name.into(),
            after: None,
        });
        // Of all names with this prefix, the name itself is the first.
        let first = self.names(ask).await?.entries.into_iter().next();
        Ok(first.filter(|entry| entry.name == name))
    }

    fn check_existing(&self, asked: &Create, entry: Entry) -> Result<Entry> {
        let own = Owner::Peer(self.peer_name()?);
        let places = entry.memory.locations();
        let node = asked.node;
        let elsewhere = node.filter(|node| places != [Location::HostNuma(node.0)]);
        let what = if entry.owner != own {
            Mismatch::Owner {
                expected: own.to_string(),
                found: entry.owner.to_string(),
            }
        } else if entry.memory.len != asked.bytes {
            Mismatch::Size {
                expected: asked.bytes,
                found: entry.memory.len,
            }
        } else if let Some(expected) = elsewhere {
            Mismatch::Node {
                expected,
                found: places,
            }
        } else {
            return Ok(entry);
        };
        Err(Error::Mismatched {
            name: entry.name,
            peer: self.peer(),
            what: Box::new(what),
        })
    }
}
