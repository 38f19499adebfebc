//! Joining a group: connect, agree, offer, map.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::broadcast;
use tokio::time::{Instant, sleep};

use super::Admission;
use super::answers::incomplete;
use super::error::{Error, Result};
use super::group::{Group, Joined};
use super::handles::{blocking, enough_fds, export, take};
use super::host::Hosted;
use super::leave::Leaving;
use super::local::connect_local;
use super::member::{Slot, note_sent};
use super::options::{GroupOptions, Host, Map};
use crate::client::Notified;
use crate::driver::{Driver, HandleType, HandleTypes};
use crate::limits::deadline;
use crate::protocol::{Agreed, Answer, Ask, Incomplete, Join, Leave, Offer, check_name};
use crate::share::{BootId, best_handle_types};
use crate::{Address, Client, Error as ExchangeError, ShareError};

/// How long after its deadline a rank still waits for the server to name the missing ranks.
const SLACK: Duration = Duration::from_secs(5);
/// The pause before asking again after a broken connection.
const PAUSE: Duration = Duration::from_millis(50);

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
        GroupOptions::new(name.into(), rank, size, address, admission)
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
        join(self, driver).await
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

async fn join(options: GroupOptions, driver: &Driver) -> Result<Group> {
    check_name(&options.name)?;
    if options.rank >= options.size {
        let why = format!("it is {} of {}", options.rank, options.size);
        return Err(ExchangeError::invalid_of("rank", why, ranks(options.size)).into());
    }
    if let Host::Rank(host) = options.host
        && host >= options.size
    {
        let why = format!("it is rank {host} of {}", options.size);
        return Err(ExchangeError::invalid_of("host", why, ranks(options.size)).into());
    }
    let until = deadline(options.deadline);
    let hosted = match options.host {
        Host::Rank(host) if host == options.rank => Some(Hosted::start(&options).await?),
        _ => None,
    };
    match try_join(options, hosted.as_ref(), driver, until).await {
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

/// The result of a join: the rank's place, its connection, and a receiver that also has the notices sent before the round
/// began.
type Parts = (Joined, Client, broadcast::Receiver<Notified>);

async fn try_join(
    options: GroupOptions,
    hosted: Option<&Hosted>,
    driver: &Driver,
    until: Instant,
) -> Result<Parts> {
    let joining = Joining {
        client: connect(&options, hosted, driver, until).await?,
        options,
        driver,
        until,
    };
    joining.run().await
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
    };
    let address = match hosted {
        Some(hosted) => hosted.address(&options.address),
        None => options.address.clone(),
    };
    let client = dial(address).patient(true).connect(driver).await;
    let client = client.map_err(|error| match (options.host, &error) {
        // The rank that should have started the server has not come.
        (
            Host::Rank(host),
            ExchangeError::Share(
                ShareError::PeerLost { .. }
                | ShareError::Unreachable { .. }
                | ShareError::TimedOut { .. },
            ),
        ) => Error::RanksMissing {
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

struct Joining<'a> {
    options: GroupOptions,
    driver: &'a Driver,
    client: Client,
    until: Instant,
}

impl Joining<'_> {
    async fn run(&self) -> Result<Parts> {
        // Subscribed before there is a round, so that no loss is missed.
        let news = self.client.notices();
        let (can, cannot) = self.can().await?;
        let agreed = self.agree(can, cannot).await?;
        let mut leaving = Leaving {
            client: Some(self.client.clone()),
            leave: self.leave(agreed.round),
            runtime: Handle::current(),
        };
        let members = self.exchange(&agreed).await?;
        let slots: Arc<[Slot]> = members.into();
        note_sent(self.options.memory.as_ref(), &slots, self.options.rank);
        if self.options.map == Map::All {
            self.map(&slots).await?;
        }
        leaving.client = None;
        let joined = Joined {
            name: self.options.name.clone(),
            rank: self.options.rank,
            via: agreed.via,
            leave: leaving.leave.clone(),
            members: slots,
            memory: self.options.memory.clone(),
            access: self.options.access,
            map: self.options.map,
            driver: self.driver.clone(),
            import: self.options.import.clone(),
            linger: self.options.linger,
        };
        Ok((joined, self.client.clone(), news))
    }

    fn leave(&self, round: u64) -> Leave {
        Leave {
            group: self.options.name.clone(),
            round,
            ms: 0,
        }
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Returns the handle types that this rank can both export and import, and the reasons against the
    /// others.
    async fn can(&self) -> Result<(Vec<HandleType>, Vec<String>)> {
        let memory = self.options.memory.clone();
        let own = memory.as_ref().map(|memory| memory.handle_types());
        let has = |types| own.is_none_or(|own| own.contains(types));
        let (mut can, mut cannot) = (Vec::new(), Vec::new());
        match (has(HandleTypes::FABRIC), self.client.no_fabric()) {
            (true, None) => can.push(HandleType::Fabric),
            (true, Some(why)) => cannot.push(why.to_string()),
            (false, why) => {
                // Perhaps the memory could not be allocated with them.
                let why = match why {
                    Some(why) => Some(why),
                    None => {
                        blocking(move || {
                            let memory = memory?;
                            best_handle_types(memory.driver(), memory.location())
                                .ok()?
                                .no_fabric
                        })
                        .await?
                    }
                };
                cannot.push(match why {
                    Some(why) => format!("its memory was made without fabric handles: {why}"),
                    None => "its memory was made without fabric handles".into(),
                });
            }
        }
        if !has(HandleTypes::POSIX_FD) {
            cannot.push("its memory was made without POSIX fds".into());
        } else if self.client.passes_fds() {
            can.push(HandleType::PosixFd);
        } else {
            cannot.push("no Unix socket of the group's server can be reached".into());
        }
        Ok((can, cannot))
    }

    async fn agree(&self, can: Vec<HandleType>, cannot: Vec<String>) -> Result<Agreed> {
        let memory = match &self.options.memory {
            Some(memory) => Some(memory.describe(self.options.access)?),
            None => None,
        };
        loop {
            let left = self.left();
            let ask = Ask::Join(Join {
                group: self.options.name.clone(),
                rank: self.options.rank,
                size: self.options.size,
                admission: self.options.admission.message(),
                can: can.clone(),
                cannot: cannot.clone(),
                memory: memory.clone(),
                ms: left.as_millis().try_into().unwrap_or(u64::MAX),
            });
            // The server's clock decides; this limit is for a server that does not answer.
            let patience = left.saturating_add(self.options.limits.request.min(SLACK));
            match self.client.call(ask, patience).await {
                Ok(Answer::Agreed(agreed)) => return Ok(agreed),
                Ok(Answer::Incomplete(why)) => return Err(self.incomplete(&why)),
                Ok(_) => return Err(self.broken("unexpected answer, not an agreement")),
                // The client is reconnecting.
                Err(ExchangeError::Share(ShareError::PeerLost { .. })) if self.left() > PAUSE => {
                    sleep(PAUSE).await
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Offers this rank's handles, and receives all ranks' handles.
    async fn exchange(&self, agreed: &Agreed) -> Result<Vec<Slot>> {
        if agreed.via == HandleType::PosixFd {
            enough_fds(agreed.handles.into())?;
        }
        let mut slots = Vec::with_capacity(self.options.size as usize);
        loop {
            // A rank that asks for a later page has offered before.
            let (fabric, fds) = match slots.is_empty() {
                true => export(self.options.memory.clone(), agreed.via).await?,
                false => (Vec::new(), Vec::new()),
            };
            let ask = Ask::Offer(Offer {
                group: self.options.name.clone(),
                round: agreed.round,
                fabric,
                first: u32::try_from(slots.len()).unwrap_or(u32::MAX),
            });
            let patience = self.left().saturating_add(self.options.limits.request);
            let answered = match self.client.exchange(ask, fds, patience).await {
                // The client is reconnecting; handles offered before are not requested twice.
                Err(ExchangeError::Share(ShareError::PeerLost { .. })) if self.left() > PAUSE => {
                    sleep(PAUSE).await;
                    continue;
                }
                answered => answered?,
            };
            let members = match answered.answer {
                Answer::Members(members) => members,
                Answer::Incomplete(why) => return Err(self.incomplete(&why)),
                _ => return Err(self.broken("unexpected answer, not members")),
            };
            let more = members.more && !members.members.is_empty();
            let size = self.options.size;
            take(agreed.via, size, members.members, answered.fds, &mut slots)
                .map_err(|wrong| self.broken(&wrong))?;
            if !more {
                break;
            }
        }
        if slots.len() != self.options.size as usize {
            return Err(self.broken("the number of members is not the group's size"));
        }
        Ok(slots)
    }

    /// Maps the memory of all other ranks.
    async fn map(&self, slots: &Arc<[Slot]>) -> Result<()> {
        let (slots, own) = (Arc::clone(slots), self.options.rank as usize);
        let import = self.options.import.clone();
        let import = import.or_called_at(self.options.site);
        let driver = self.driver.clone();
        blocking(move || {
            let others = slots.iter().enumerate().filter(|(rank, _)| *rank != own);
            for (rank, slot) in others.filter(|(_, slot)| slot.memory().is_some()) {
                slot.map(rank, &driver, &import)?;
            }
            Ok(())
        })
        .await?
    }

    fn broken(&self, detail: &str) -> Error {
        Error::Exchange(ExchangeError::protocol(self.client.peer(), detail))
    }

    /// Turns the server's answer to all ranks into an error.
    fn incomplete(&self, why: &Incomplete) -> Error {
        let options = &self.options;
        let what = format!("group '{}'", options.name);
        let peer = self.client.peer();
        incomplete(&options.name, options.size, peer, what, why)
    }
}
