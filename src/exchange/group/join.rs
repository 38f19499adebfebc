//! Joining a group: connect, agree, offer, map.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::broadcast;
use tokio::time::Instant;

use super::Admission;
use super::asking::{Asking, SLACK};
use super::error::{Error, Result};
use super::gathered::GatheredMemory;
use super::group::{Group, Joined};
use super::handles::{Passing, export};
use super::host::Hosted;
use super::leave::Leaving;
use super::local::connect_local;
use super::member::{Slot, note_sent};
use super::options::{GroupOptions, Host, Map};
use crate::client::{Notified, attempt};
use crate::driver::{Access, Driver, HandleType, HandleTypes};
use crate::ledger::Site;
use crate::limits::deadline;
use crate::protocol::{Agreed, Answer, Ask, Join, Leave, Offer, check_name};
use crate::share::{BootId, ImportOptions, Peers, best_handle_types};
use crate::{Address, Client, Error as ExchangeError, Limits, Security};

impl Group {
    /// Returns options to join the group `name` as `rank` of `size` ranks. Rank 0 listens at `address`; the
    /// others connect there, and may start first. `admission` says which peers may be the other ranks.
    ///
    /// Between machines, `address` is a TCP address and needs [`security`](GroupOptions::security). On one
    /// machine it may be a Unix socket.
    #[track_caller]
    pub fn options(
        name: impl Into<String>,
        rank: u32,
        size: u32,
        address: Address,
        admission: Admission,
    ) -> GroupOptions {
        GroupOptions {
            name: name.into(),
            rank,
            size,
            address,
            host: Host::default(),
            security: Security::Plain,
            peers: Peers::same_user(),
            admission,
            who: None,
            limits: Limits::default(),
            deadline: Duration::from_secs(60),
            lease: Duration::from_secs(10),
            linger: Duration::from_secs(60),
            memory: None,
            access: Access::ReadWrite,
            import: ImportOptions::new(),
            map: Map::default(),
            site: Site::here(),
        }
    }
}

impl GroupOptions {
    /// Joins the group: returns when all ranks have come and exchanged their handles. All ranks get the same
    /// decision.
    ///
    /// Everything goes through the group's server, with two requests per rank. The answer to the second
    /// contains all members, so the number of bytes grows with the square of the size, as in every all-gather
    /// (about 250 bytes per member); nothing else does.
    ///
    /// # Errors
    /// For all ranks that have come: [`Error::RanksMissing`] with the ranks that have not come in time or were
    /// lost meanwhile, [`NoCommonHandle`](crate::Error::NoCommonHandle) with the reasons.
    ///
    /// For this rank only: [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a rank that does not
    /// exist; [`Refused`](crate::Error::Refused) with `forbidden` if the server gives this peer no
    /// right to groups of this name, or the admission does not admit this rank itself; also if the rank is
    /// taken, the size differs from the others', or a limit is reached;
    /// [`LimitReached`](crate::Error::LimitReached) if this process may not open as many file
    /// descriptors as all ranks' memory has parts (`RLIMIT_NOFILE`); those of connecting and, with
    /// [`Map::All`], of importing.
    ///
    /// # Cancel safety
    /// If the future is dropped early, this rank leaves: the others' join fails, unless they already have
    /// everything they need.
    pub async fn join(self, driver: &Driver) -> Result<Group> {
        check_name(&self.name)?;
        let (rank, size) = (self.rank, self.size);
        if rank >= size {
            let why = format!("it is {rank} of {size}");
            return Err(ExchangeError::invalid_of("rank", why, ranks(size)).into());
        }
        if let Host::Rank(host) = self.host
            && host >= size
        {
            let why = format!("it is rank {host} of {size}");
            return Err(ExchangeError::invalid_of("host", why, ranks(size)).into());
        }
        let until = deadline(self.deadline);
        let hosted = match self.host == Host::Rank(rank) {
            true => Some(Hosted::start(&self).await?),
            false => None,
        };
        match join(self, hosted.as_ref(), driver, until).await {
            Ok((joined, client, news)) => Ok(Group::new(joined, client, news, hosted)),
            Err(error) => {
                // The answers to the other ranks are still being sent.
                if let Some(hosted) = hosted {
                    hosted.close().await;
                }
                Err(error)
            }
        }
    }
}

/// Returns the valid ranks as text.
fn ranks(size: u32) -> String {
    match size.checked_sub(1) {
        None => "none of a group of size 0".into(),
        Some(0) => "rank 0".into(),
        Some(last) => format!("ranks 0 to {last}"),
    }
}

/// The result of a join: the rank's place, its connection, and a receiver that also has the notices sent before the
/// round began.
type Parts = (Joined, Client, broadcast::Receiver<Notified>);

async fn join(
    options: GroupOptions,
    hosted: Option<&Hosted>,
    driver: &Driver,
    until: Instant,
) -> Result<Parts> {
    let client = connect(&options, hosted, driver, until).await?;
    // Subscribed before there is a round, so that no loss is missed.
    let news = client.notices();
    let joining = Joining {
        server: Asking {
            client: client.clone(),
            group: options.name.clone(),
            size: options.size,
            until,
            again_late: false,
            what: format!("group '{}'", options.name),
        },
        options: &options,
    };
    let agreed = joining.agree().await?;
    let mut leaving = Leaving {
        client: Some(client.clone()),
        leave: Leave {
            group: options.name.clone(),
            round: agreed.round,
            ms: 0,
        },
        runtime: Handle::current(),
    };
    let slots = joining.exchange(&agreed).await?;
    note_sent(options.memory.as_ref(), &slots, options.rank);
    let mut members = GatheredMemory {
        slots,
        own: options.memory,
        driver: driver.clone(),
        import: options.import,
    };
    if options.map == Map::All {
        members = members.mapped(options.rank, options.site).await?;
    }
    leaving.client = None;
    let joined = Joined {
        name: options.name,
        rank: options.rank,
        passing: Passing::agreed(&agreed),
        leave: leaving.leave.clone(),
        members,
        access: options.access,
        map: options.map,
        linger: options.linger,
    };
    Ok((joined, client, news))
}

/// Connects, and switches to the server's Unix socket if it can be reached, because only that can carry fds.
async fn connect(
    options: &GroupOptions,
    hosted: Option<&Hosted>,
    driver: &Driver,
    until: Instant,
) -> Result<Client> {
    let dial = |address: Address| {
        Client::options(address)
            .security(options.security.clone())
            .peers(options.peers.clone())
            .limits(options.limits.clone())
            .agent(format!("rank {} of group {}", options.rank, options.name))
            .timeout(until.saturating_duration_since(Instant::now()))
            .stay()
    };
    let address = match hosted {
        Some(hosted) => hosted.address(&options.address),
        None => options.address.clone(),
    };
    let client = dial(address).patient(true).connect(driver).await;
    let client = client.map_err(|error| match (options.host, &error) {
        // The rank that should have started the server has not come.
        (Host::Rank(host), error) if error.is_unreachable() => Error::RanksMissing {
            group: options.name.clone(),
            missing: vec![host],
            size: options.size,
        },
        _ => error.into(),
    })?;
    if client.passes_fds() || client.boot() != BootId::current()? {
        return Ok(client);
    }
    match client.local() {
        Some(path) if path.is_absolute() => {
            let dial = || dial(Address::Unix(path.clone()));
            let handshake = options.limits.handshake;
            match connect_local(&path, dial, handshake, driver, until).await {
                // Another server may be at that path here, for example in a container.
                Ok(local) if local.instance() == client.instance() => {
                    client.close().await;
                    Ok(local)
                }
                Ok(_) => Ok(client),
                Err(error) => {
                    tracing::debug!(%error, "no Unix socket of the group's server here");
                    Ok(client)
                }
            }
        }
        _ => Ok(client),
    }
}

/// A rank that has a connection to its group's server.
struct Joining<'a> {
    server: Asking,
    options: &'a GroupOptions,
}

impl Joining<'_> {
    /// Returns the handle types that this rank can both export and import, and the reasons against the
    /// others.
    async fn can(&self) -> Result<(Vec<HandleType>, Vec<String>)> {
        let memory = self.options.memory.clone();
        let own = memory.as_ref().map(|memory| memory.handle_types());
        let has = |types| own.is_none_or(|own| own.contains(types));
        let (mut can, mut cannot) = (Vec::new(), Vec::new());
        match (has(HandleTypes::FABRIC), self.server.client.no_fabric()) {
            (true, None) => can.push(HandleType::Fabric),
            (true, Some(why)) => cannot.push(why.to_string()),
            (false, mut why) => {
                if why.is_none() {
                    // Perhaps the memory could not be allocated with them.
                    let best = move || {
                        let memory = memory?;
                        best_handle_types(memory.driver(), memory.location()).ok()
                    };
                    let best = attempt("trying fabric handles", best).await?;
                    why = best.and_then(|best| best.no_fabric);
                }
                let why = why.map_or_else(String::new, |why| format!(": {why}"));
                cannot.push(format!("its memory was made without fabric handles{why}"));
            }
        }
        if !has(HandleTypes::POSIX_FD) {
            cannot.push("its memory was made without POSIX fds".into());
        } else if self.server.client.passes_fds() {
            can.push(HandleType::PosixFd);
        } else {
            cannot.push("no Unix socket of the group's server can be reached".into());
        }
        Ok((can, cannot))
    }

    /// Waits until all ranks have joined and the server has chosen a handle type.
    async fn agree(&self) -> Result<Agreed> {
        let options = self.options;
        let (can, cannot) = self.can().await?;
        let memory = options.memory.as_ref();
        let memory = memory
            .map(|memory| memory.describe(options.access))
            .transpose()?;
        let join = Join {
            group: options.name.clone(),
            rank: options.rank,
            size: options.size,
            admission: options.admission.message(),
            can,
            cannot,
            memory,
            ms: 0,
        };
        let request = || {
            let ms = self.server.ms();
            let ask = Ask::Join(Join { ms, ..join.clone() });
            std::future::ready(Ok((ask, Vec::new())))
        };
        let slack = options.limits.request.min(SLACK);
        match self.server.ask(slack, request).await?.answer {
            Answer::Agreed(agreed) => Ok(agreed),
            _ => Err(self.server.broken("unexpected answer, not an agreement")),
        }
    }

    /// Offers this rank's handles, and receives all ranks' handles.
    async fn exchange(&self, agreed: &Agreed) -> Result<Vec<Slot>> {
        let request = async |first| {
            // A rank that asks for a later page has offered before.
            let memory = self.options.memory.clone().filter(|_| first == 0);
            let (fabric, fds) = export(memory, Passing::agreed(agreed)).await?;
            let ask = Ask::Offer(Offer {
                group: self.options.name.clone(),
                round: agreed.round,
                fabric,
                first,
            });
            Ok((ask, fds))
        };
        let handles = (agreed.via, agreed.handles);
        self.server
            .members(handles, self.options.limits.request, request)
            .await
    }
}
