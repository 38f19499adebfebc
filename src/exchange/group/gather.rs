//! The gathers by which ranks agree, exchange handles, and learn that all have mapped them.

use std::sync::Mutex;
use std::thread::{Scope, scope};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::env::private_folder;
use super::{AllGather, GatheredMemory};
use crate::client::{fabric, importable};
use crate::driver::{Access, Driver, HandleType, HandleTypes, random};
use crate::ledger::{Party, Site};
use crate::per_driver::lock;
use crate::protocol::{Secret, decode, encode};
use crate::server::made_without_fabric;
use crate::share::{
    BootId, Channel, Description, ImportOptions, ImportedBuffer, Listener, PartHandles, Peers,
    Shared, queue,
};
use crate::text::bounded;
use crate::{End, Error, Result, ShareError};

/// Of the messages below.
const VERSION: u32 = 2;

/// Gathers the memory of all ranks with the default [`GatherOptions`].
///
/// # Errors
/// Those of [`GatherOptions::gather`].
#[track_caller]
pub fn gather_memory(
    all: &mut dyn AllGather,
    memory: Option<Shared>,
    driver: &Driver,
) -> Result<GatheredMemory> {
    GatherOptions::new().gather(all, memory, driver)
}

/// How a rank shares its memory and maps that of the others; [`gather`](Self::gather) does it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `gather`"]
pub struct GatherOptions {
    via: Option<HandleType>,
    deadline: Duration,
}

impl Default for GatherOptions {
    fn default() -> Self {
        Self {
            via: None,
            deadline: Duration::from_secs(60),
        }
    }
}

impl GatherOptions {
    /// Returns the default options.
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets how long passing fds to the ranks of this machine may take: 1 minute by default. How long a gather waits
        /// for a rank is its [`AllGather`]'s.
        deadline: Duration;
    }

    /// Allows only this handle type; by default either is right. One rank's choice counts for all.
    pub fn via(mut self, via: HandleType) -> Self {
        self.via = Some(via);
        self
    }

    /// Shares this rank's memory, if it gives some, and maps that of all others. All ranks call it together.
    ///
    /// # Errors
    /// In all ranks: [`Error::NoCommonHandle`] with the reasons, before any handle is made; those
    /// of the [`AllGather`]. If a rank fails, it returns its own error, and the others [`Error::RanksFailed`] with the
    /// reason.
    #[track_caller]
    pub fn gather(
        self,
        all: &mut dyn AllGather,
        memory: Option<Shared>,
        driver: &Driver,
    ) -> Result<GatheredMemory> {
        let site = Site::here();
        let (rank, size) = (all.rank(), all.size());
        let mut listener = None;
        let statement = self.prepare((rank, size), memory.as_ref(), driver, &mut listener);
        let statements = together(all, statement)?;
        check(&statements, size)?;
        let ranks = Ranks {
            options: &self,
            rank,
            statements: &statements,
            driver,
            site,
        };
        let no_common = |reasons| Error::NoCommonHandle { reasons };
        let mut via = agree(&statements, &[]).map_err(no_common)?;
        let mut channels = Vec::new();
        if via == HandleType::PosixFd {
            let (reached, failures) = ranks.reach();
            let failures = together(all, Ok(failures))?.concat();
            via = agree(&statements, &failures).map_err(no_common)?;
            channels = reached;
        }
        let others = match via {
            HandleType::PosixFd => ranks.exchange_fds(all, channels, listener, memory.as_ref()),
            HandleType::Fabric => ranks.exchange_fabric(all, memory.as_ref()),
        }?;
        Ok(GatheredMemory {
            others,
            own: memory,
            rank,
            via,
        })
    }

    /// Returns what this rank states first, after it listens for the ranks that will fetch its fds.
    fn prepare(
        &self,
        (rank, size): (u32, u32),
        memory: Option<&Shared>,
        driver: &Driver,
        listener: &mut Option<Listener>,
    ) -> Result<Statement> {
        let excluded = |via| self.via.is_some_and(|only| only != via);
        let lacks = |types| memory.filter(|memory| !memory.handle_types().contains(types));
        let excluded_by = |what| Some(format!("excluded by the options: {what} alone"));
        let no_fabric = if excluded(HandleType::Fabric) {
            excluded_by("POSIX fd")
        } else if let Some(memory) = lacks(HandleTypes::FABRIC) {
            Some(made_without_fabric(memory))
        } else {
            importable(driver).map(|why| why.to_string())
        };
        let mut no_fds = if excluded(HandleType::PosixFd) {
            excluded_by("fabric")
        } else {
            lacks(HandleTypes::POSIX_FD).map(|_| "its memory was made without POSIX fds".into())
        };
        let mut socket = None;
        if memory.is_some() && no_fds.is_none() {
            match listen() {
                Ok((listening, path)) => (*listener, socket) = (Some(listening), Some(path)),
                Err(error) => no_fds = Some(error.to_string()),
            }
        }
        let described = memory.map(|memory| memory.describe(Access::ReadWrite));
        Ok(Statement {
            version: VERSION,
            rank,
            size,
            boot: BootId::current()?,
            memory: described.transpose()?,
            no_fabric: no_fabric.map(|why| cut(&why)),
            no_fds: no_fds.map(|why| cut(&why)),
            socket,
        })
    }
}

/// Listens at a socket with a new name, for processes of this user.
fn listen() -> Result<(Listener, String)> {
    let name: [u8; 16] = random().map_err(|e| Error::system("random bytes", &e))?;
    let path = private_folder()?.join(format!("{:032x}", u128::from_be_bytes(name)));
    let text = path.to_str();
    let text = text.ok_or_else(|| Error::invalid("folder for sockets", "not UTF-8"))?;
    Ok((Listener::bind(&path, Peers::same_user())?, text.to_owned()))
}

/// Checks statements that other ranks have made.
fn check(statements: &[Statement], size: u32) -> Result<()> {
    for (rank, one) in (0..).zip(statements) {
        let wrong = |why: String| Err(Error::all_gather(format!("rank {rank}: {why}")));
        if one.version != VERSION {
            return wrong(format!("version {} of groups, not {VERSION}", one.version));
        }
        if (one.rank, one.size) != (rank, size) {
            let (other, of) = (one.rank, one.size);
            return wrong(format!("it is rank {other} of {of}, not of {size}"));
        }
        if let Some(Err(error)) = one.memory.as_ref().map(|memory| memory.check()) {
            return wrong(error.to_string());
        }
    }
    Ok(())
}

/// Sends this rank's value to all, and returns those of all; or its error's text, and fails in all ranks if one does.
fn together<T>(all: &mut dyn AllGather, own: Result<T>) -> Result<Vec<T>>
where
    T: Serialize + for<'a> Deserialize<'a>,
{
    let stated = own.as_ref();
    let sent = encode(&stated.map_err(|error| cut(&error.to_string())));
    let (rank, size) = (all.rank() as usize, all.size() as usize);
    let all: Vec<_> = all.all_gather(&sent)?;
    let all: Vec<_> = all.into_iter().map(Zeroizing::new).collect();
    if all.len() != size || all.get(rank) != Some(&sent) {
        let what = "it did not return a contribution of each rank, and this rank's own";
        return Err(Error::all_gather(what));
    }
    own?;
    let (mut values, mut reasons) = (Vec::with_capacity(size), Vec::new());
    for (rank, bytes) in (0..).zip(&all) {
        match decode::<Result<T, String>>(bytes) {
            Ok(Ok(value)) => values.push(value),
            Ok(Err(why)) => reasons.push(format!("rank {rank}: {why}")),
            Err(error) => return Err(Error::all_gather(format!("rank {rank}: {error}"))),
        }
    }
    if reasons.is_empty() {
        return Ok(values);
    }
    let reasons = few(reasons);
    Err(Error::RanksFailed { reasons })
}

/// The other ranks' memory, each mapped or none.
type Mapped = Vec<Option<ImportedBuffer>>;

/// The ranks, after all have stated what they can.
struct Ranks<'a> {
    options: &'a GatherOptions,
    rank: u32,
    statements: &'a [Statement],
    driver: &'a Driver,
    site: Site,
}

impl Ranks<'_> {
    /// Connects to the sockets of all others that have memory. Returns the channels in the order of ranks, and why some
    /// cannot be reached.
    fn reach(&self) -> (Vec<Option<Channel>>, Vec<String>) {
        let (mut channels, mut failures) = (Vec::new(), Vec::new());
        for (rank, one) in (0..).zip(self.statements) {
            let is_needed = rank != self.rank && one.memory.is_some();
            let path = one.socket.as_ref().filter(|_| is_needed);
            let within = self.options.deadline;
            let connect = |path| Channel::connect_within(path, Peers::same_user(), within);
            let channel = path.map(connect).transpose().unwrap_or_else(|error| {
                let own = self.rank;
                failures.push(format!("rank {own} cannot reach rank {rank}: {error}"));
                None
            });
            channels.push(channel);
        }
        (channels, few(failures))
    }

    /// Passes this rank's fds to the others, and maps the memory whose fds they pass.
    fn exchange_fds(
        &self,
        all: &mut dyn AllGather,
        mut channels: Vec<Option<Channel>>,
        listener: Option<Listener>,
        memory: Option<&Shared>,
    ) -> Result<Mapped> {
        let failed = Mutex::new(None);
        scope(|scope| {
            let serving = listener.as_ref().zip(memory);
            if let Some((listener, memory)) = serving {
                scope.spawn(|| self.serve(scope, listener, memory, &failed));
            }
            let mapped = self.map(HandleType::PosixFd, |rank| {
                let channel = channels.get_mut(rank as usize).and_then(Option::take);
                let none = || Error::peer_lost(name(rank), "it has no socket");
                self.receive(rank, channel.ok_or_else(none)?)
            });
            let outcome = match lock(&failed).take() {
                Some(error) => Err(error),
                None => mapped.as_ref().map(|_| ()).map_err(Clone::clone),
            };
            let told = together(all, outcome);
            if let Some(listener) = &listener {
                listener.close();
            }
            told?;
            mapped
        })
    }

    /// Serves the other ranks until the listener is closed. The first error is kept.
    fn serve<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        listener: &'scope Listener,
        memory: &'scope Shared,
        failed: &'scope Mutex<Option<Error>>,
    ) {
        let send = move |mut channel: Channel| {
            channel.set_timeout(self.options.deadline);
            match channel.send(memory, Access::ReadWrite) {
                // It says so itself.
                Ok(()) | Err(ShareError::PeerLost { .. }) => {}
                Err(error) => {
                    lock(failed).get_or_insert(error.into());
                }
            }
        };
        loop {
            match listener.accept() {
                // It takes as long as the rank takes to import all parts.
                Ok(channel) if queue::is_needed(memory.part_count()) => {
                    scope.spawn(move || send(channel));
                }
                Ok(channel) => send(channel),
                Err(ShareError::NotTrusted { .. }) => {}
                // It was closed, or no more fds are to be had: then ranks that connect are lost.
                Err(_) => return listener.close(),
            }
        }
    }

    /// Receives a rank's handles, if its memory is what it stated.
    fn receive(&self, rank: u32, mut channel: Channel) -> Result<PartHandles> {
        channel.set_timeout(self.options.deadline);
        let (description, handles) = channel.receive()?.into_part_handles();
        if self.statements[rank as usize].memory.as_ref() == Some(&description) {
            return Ok(handles);
        }
        let why = "other memory than it stated";
        Err(Error::protocol(name(rank), why))
    }

    /// Gathers all ranks' fabric handles, and maps the memory.
    fn exchange_fabric(&self, all: &mut dyn AllGather, memory: Option<&Shared>) -> Result<Mapped> {
        let handles = together(all, memory.map_or(Ok(Vec::new()), Secret::of_fabric))?;
        let mapped = self.map(HandleType::Fabric, |rank| {
            let handles = fabric(&handles[rank as usize]);
            let wrong = || Error::protocol(name(rank), "a fabric handle of another length");
            handles.map(PartHandles::from).ok_or_else(wrong)
        });
        together(all, mapped.as_ref().map(|_| ()).map_err(Clone::clone))?;
        if let Some(memory) = memory {
            let ranks = (0..).take(self.statements.len());
            let others = ranks.filter(|rank| *rank != self.rank);
            others.for_each(|rank| memory.sent_to(&party(rank)));
        }
        mapped
    }

    /// Maps the memory of all others, beginning with the next rank, so that not all ranks begin with the same one.
    fn map(
        &self,
        via: HandleType,
        mut handles: impl FnMut(u32) -> Result<PartHandles>,
    ) -> Result<Mapped> {
        let size = self.statements.len();
        let mut mapped: Mapped = (0..size).map(|_| None).collect();
        for index in (1..size).map(|step| (self.rank as usize + step) % size) {
            let rank = index as u32;
            let Some(memory) = &self.statements[index].memory else {
                continue;
            };
            // Not shared with other imports: a rank could claim another's identity.
            let import = ImportOptions::new().unshared().sender(party(rank));
            let import = import.or_called_at(self.site.clone());
            let imported = import.import_from(self.driver, memory, handles(rank)?);
            mapped[index] = Some(imported.map_err(|error| Error::Import {
                what: format!("the memory of rank {rank}"),
                peer: name(rank),
                end: End::of(&error, via, via == HandleType::PosixFd),
                source: Box::new(error),
            })?);
        }
        Ok(mapped)
    }
}

fn name(rank: u32) -> String {
    format!("rank {rank}")
}

fn party(rank: u32) -> Party {
    Party {
        pid: None,
        name: name(rank),
    }
}

/// The most reasons that are passed on, and the most bytes of each. People read them.
const REASONS: usize = 64;
const REASON_BYTES: usize = 256;

/// What a rank states before any handle is made.
#[derive(Serialize, Deserialize)]
struct Statement {
    /// Of this protocol.
    pub version: u32,
    pub rank: u32,
    pub size: u32,
    /// Its machine.
    pub boot: BootId,
    /// Its memory; `None` if it only maps the others'.
    pub memory: Option<Description>,
    /// Why it cannot use fabric handles; `None` if it can.
    pub no_fabric: Option<String>,
    /// Why it cannot use fds; `None` if it can.
    pub no_fds: Option<String>,
    /// Where processes of its machine get its fds, if it has memory and can use them.
    pub socket: Option<String>,
}

/// Returns the handle type that all ranks use: fds if all are on one machine, can use them and can reach each other, else
/// fabric if every rank can. `unreachable` has the ranks that cannot reach another one's socket, with the reasons.
///
/// # Errors
/// Otherwise the reasons, as stated by each rank that prevents the choice.
fn agree(ranks: &[Statement], unreachable: &[String]) -> Result<HandleType, Vec<String>> {
    let one_machine = ranks.windows(2).all(|pair| pair[0].boot == pair[1].boot);
    let fds = ranks.iter().all(|rank| rank.no_fds.is_none());
    if one_machine && fds && unreachable.is_empty() {
        return Ok(HandleType::PosixFd);
    }
    if ranks.iter().all(|rank| rank.no_fabric.is_none()) {
        return Ok(HandleType::Fabric);
    }
    let mut reasons = Vec::new();
    if !one_machine {
        reasons
            .push("the ranks are on more than one machine, so POSIX fds cannot be passed".into());
    }
    for (index, rank) in ranks.iter().enumerate() {
        let mut lacks = Vec::new();
        if let Some(why) = &rank.no_fabric {
            lacks.push(format!("no fabric ({})", cut(why)));
        }
        if let Some(why) = rank.no_fds.as_ref().filter(|_| one_machine) {
            lacks.push(format!("no POSIX fd ({})", cut(why)));
        }
        if !lacks.is_empty() {
            reasons.push(format!("rank {index}: {}", lacks.join(", ")));
        }
    }
    reasons.extend(unreachable.iter().cloned());
    Err(few(reasons))
}

/// Returns the first reasons, cut.
fn few(mut reasons: Vec<String>) -> Vec<String> {
    let more = reasons.len() > REASONS;
    reasons.truncate(REASONS);
    let mut reasons: Vec<String> = reasons.iter().map(|reason| cut(reason)).collect();
    if more {
        reasons.push("and further reasons".into());
    }
    reasons
}

/// Returns the beginning of a reason.
fn cut(text: &str) -> String {
    bounded(text, REASON_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank of a machine that can use fabric handles, fds, or both.
    fn rank(boot: u8, fabric: bool, fds: bool) -> Statement {
        Statement {
            version: 1,
            rank: 0,
            size: 2,
            boot: BootId::from_bytes([boot; 16]),
            memory: None,
            no_fabric: (!fabric).then(|| "no IMEX channel".into()),
            no_fds: (!fds).then(|| "no socket".into()),
            socket: None,
        }
    }

    fn decide(ranks: &[(u8, bool, bool)]) -> Result<HandleType, Vec<String>> {
        let ranks: Vec<_> = ranks.iter().map(|&(b, f, p)| rank(b, f, p)).collect();
        agree(&ranks, &[])
    }

    #[test]
    fn fds_on_one_machine_and_fabric_elsewhere() {
        let (fds, fabric) = (Ok(HandleType::PosixFd), Ok(HandleType::Fabric));
        assert_eq!(decide(&[(1, true, true), (1, true, true)]), fds);
        assert_eq!(decide(&[(1, false, true), (1, true, true)]), fds);
        assert_eq!(decide(&[(1, true, true), (1, true, false)]), fabric);
        assert_eq!(decide(&[(1, true, true), (2, true, true)]), fabric);
    }

    #[test]
    fn ranks_that_cannot_reach_each_other_use_fabric_handles_or_say_why() {
        let why = ["rank 0 cannot reach rank 1: no such file".to_owned()];
        let both = [rank(1, true, true), rank(1, true, true)];
        assert_eq!(agree(&both, &why), Ok(HandleType::Fabric));
        let fds = [rank(1, true, true), rank(1, false, true)];
        let reasons = agree(&fds, &why).unwrap_err();
        assert_eq!(
            reasons,
            [
                "rank 1: no fabric (no IMEX channel)",
                "rank 0 cannot reach rank 1: no such file"
            ]
        );
    }

    #[test]
    fn ranks_that_exclude_each_other_say_why() {
        let reasons = decide(&[(1, false, true), (1, true, false)]).unwrap_err();
        assert_eq!(
            reasons,
            [
                "rank 0: no fabric (no IMEX channel)",
                "rank 1: no POSIX fd (no socket)"
            ]
        );
        let reasons = decide(&[(1, true, true), (2, false, true)]).unwrap_err();
        assert!(reasons[0].contains("more than one machine"), "{reasons:?}");
        assert_eq!(reasons[1..], ["rank 1: no fabric (no IMEX channel)"]);
    }

    #[test]
    fn reasons_are_few_and_short() {
        let ranks: Vec<_> = (0..1000)
            .map(|_| Statement {
                no_fabric: Some("ä".repeat(4000)),
                ..rank(0, false, false)
            })
            .collect();
        let reasons = agree(&ranks, &[]).unwrap_err();
        assert_eq!(reasons.len(), REASONS + 1);
        assert!(reasons.iter().all(|reason| reason.len() <= REASON_BYTES));
    }
}
