//! An all-gather over sockets: rank 0 listens, the others connect, and every gather goes through rank 0.
//!
//! Its messages are frames of the exchange's transport. Rank 0 begins with a challenge, and a rank answers with its [`Hello`].
//! In each gather a rank sends its contribution, and rank 0 a [`Reply`], which the contributions of all follow if none is
//! missing.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{IpAddr, UdpSocket};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::runtime::{Builder, Runtime};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use zeroize::Zeroizing;

use super::{AllGather, GroupSecret, MAX_CONTRIBUTION, MAX_RANKS, Sealed};
use crate::blocking::outside_async;
use crate::driver::random;
use crate::limits::{LONGEST, deadline};
use crate::protocol::{Secret, decode, encode};
use crate::share::Peers;
use crate::text::bounded;
use crate::transport::{self, Connection, FrameReader, Listening, together};
use crate::{Address, Error, Limits, MemoryError, Result, Security, ShareError, Unreachable};

/// The most bytes of a frame. A sealed contribution is a little longer than its contents.
const MAX_FRAME: u32 = MAX_CONTRIBUTION as u32 + 1024;
/// The most bytes of a hello.
const MAX_HELLO: u32 = 256;
/// The first bytes of a challenge, which random ones follow: another protocol, or another version, is recognised at once.
const MAGIC: [u8; 8] = *b"egmemgr2";
const CHALLENGE: usize = 8 + 32;
/// Ends each contribution, because no frame is empty.
const END: u8 = 0;
/// How long a connection may take for its hello.
const PATIENCE: Duration = Duration::from_secs(10);
/// How much longer than its deadline a rank waits for rank 0, whose clock decides.
const SLACK: Duration = Duration::from_secs(5);
/// The pause before connecting again.
const PAUSE: Duration = Duration::from_millis(20);
/// How many connections may wait for their hellos besides those of all ranks.
const STRANGERS: usize = 64;

/// A rank's first message.
#[derive(Serialize, Deserialize)]
struct Hello {
    rank: u32,
    size: u32,
    /// Of the secret, if this rank has one.
    proof: Option<Secret>,
}

/// Rank 0's answer to a contribution, and to a hello that it refuses.
#[derive(Serialize, Deserialize)]
enum Reply {
    /// The contributions of all ranks follow, each in a frame.
    All,
    /// These ranks did not come.
    Missing(Vec<u32>),
    /// The hello is refused, for this reason.
    Refused(String),
}

/// Meets the other ranks: rank 0 listens at `address`, and the others connect there and may start first. Returns when all
/// have come. Every gather has `deadline` for all ranks to come, as this call has.
///
/// At a Unix socket only processes of the same user meet. Over TCP the ranks need a secret, which every rank proves before
/// it takes its place, and each gather is [`Sealed`]. There rank 0 listens at the IP address, or, for a host's name, at the port
/// of every address of its machine: the name need not be known there, and may stand for loopback alone. While another process
/// listens there, rank 0 tries again until the deadline.
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a rank that does not exist, for more than [`MAX_RANKS`],
/// for TCP without a secret, and within a tokio runtime, which this and each gather would block;
/// [`Error::RanksMissing`] in all ranks that have come; [`Error::AllGather`] in a rank that
/// rank 0 refuses: for another size or secret, or because its rank is taken; the system's errors.
pub fn rendezvous(
    address: &Address,
    rank: u32,
    size: u32,
    secret: Option<&GroupSecret>,
    deadline: Duration,
) -> Result<Box<dyn AllGather + Send>> {
    if rank >= size || size > MAX_RANKS {
        let why = format!("it is {rank} of {size}");
        let valid = format!("0 to size - 1, of at most {MAX_RANKS} ranks");
        return Err(Error::invalid_of("rank", why, valid));
    }
    if secret.is_none() && !address.is_unix() {
        let why = format!("the ranks meet at {address} without one");
        let valid =
            "the same random bytes in all ranks, for example EGMEM_SECRET=$(openssl rand -hex 32)";
        return Err(Error::invalid_of("group secret", why, valid));
    }
    outside_async()?;
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Error::system("starting a runtime", &error))?;
    let deadline = deadline.min(LONGEST);
    let until = Instant::now() + deadline;
    let place = Place {
        address,
        rank,
        size,
        secret,
    };
    let links = runtime.block_on(async {
        match rank {
            0 => place.admit(until).await,
            _ => Ok(vec![place.connect(until).await?]),
        }
    });
    let mut star = Star {
        rank,
        size,
        deadline,
        links: links?,
        broken: None,
        runtime: Some(runtime),
    };
    // Rank 0 answers when all have come.
    star.gather(&[], until)?;
    Ok(match secret {
        Some(secret) => Box::new(Sealed::new(star, secret)?),
        None => Box::new(star),
    })
}

struct Star {
    rank: u32,
    size: u32,
    deadline: Duration,
    /// Of rank 0, to the others in order; of each of those, to rank 0.
    links: Vec<Connection>,
    /// The error after which the connections are out of step.
    broken: Option<Error>,
    /// Runs while a gather waits in it. `None` only in `drop`.
    runtime: Option<Runtime>,
}

impl AllGather for Star {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.gather(own, Instant::now() + self.deadline)
    }
}

impl Drop for Star {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Nothing runs in it. Its own drop panics within another runtime.
            runtime.shutdown_background();
        }
    }
}

impl Star {
    fn gather(&mut self, own: &[u8], until: Instant) -> Result<Vec<Vec<u8>>> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        if own.len() >= MAX_FRAME as usize {
            let bytes = own.len();
            let why = format!("{bytes} bytes exceed the limit of {MAX_CONTRIBUTION}");
            return Err(Error::all_gather(why));
        }
        outside_async()?;
        let Some(runtime) = &self.runtime else {
            return Err(Error::all_gather("it has ended"));
        };
        let (mut own, size) = (Zeroizing::new([own, &[END]].concat()), self.size);
        let gathered = runtime.block_on(async {
            match &mut self.links[..] {
                [zero] if self.rank > 0 => ask(zero, &own, size, until + SLACK).await,
                _ => collect(&mut self.links, std::mem::take(&mut *own), size, until).await,
            }
        });
        let mut all = gathered.inspect_err(|error| self.broken = Some(error.clone()))?;
        for bytes in &mut all {
            bytes.pop();
        }
        Ok(all)
    }
}

/// Receives the contributions of all ranks, and sends all of them to each.
async fn collect(
    links: &mut Vec<Connection>,
    own: Vec<u8>,
    size: u32,
    until: Instant,
) -> Result<Vec<Vec<u8>>> {
    let mut all = Zeroizing::new(vec![own]);
    let receiving = |mut link: Connection| async move {
        let received = by(until, receive(&mut link.reader, MAX_FRAME)).await;
        (link, received)
    };
    let (received, missing) = with_all(links, receiving).await;
    all.extend(received);
    if !missing.is_empty() {
        tell_missing(links, &missing).await;
        return Err(Error::RanksMissing { missing, size });
    }
    let reply = encode(&Reply::All);
    let frames: Vec<&[u8]> = std::iter::once(&reply[..])
        .chain(all.iter().map(Vec::as_slice))
        .collect();
    let message = Arc::new(together(&frames)?);
    let sending = |mut link: Connection| {
        let message = Arc::clone(&message);
        async move {
            let sent = by(until + SLACK, link.writer.send(&message, &[])).await;
            (link, sent)
        }
    };
    let (_, missing) = with_all(links, sending).await;
    if missing.is_empty() {
        return Ok(std::mem::take(&mut *all));
    }
    Err(Error::RanksMissing { missing, size })
}

/// Does work with all ranks at once, each in a task: one that is stuck until the end takes no other rank's time. Returns the
/// results, and the ranks whose work failed.
async fn with_all<T: Send + 'static, F>(
    links: &mut Vec<Connection>,
    work: impl Fn(Connection) -> F,
) -> (Vec<T>, Vec<u32>)
where
    F: Future<Output = (Connection, Result<T>)> + Send + 'static,
{
    let tasks: Vec<_> = links
        .drain(..)
        .map(|link| tokio::spawn(work(link)))
        .collect();
    let (mut results, mut missing) = (Vec::new(), Vec::new());
    for (rank, task) in (1..).zip(tasks) {
        let result = match task.await {
            Ok((link, result)) => {
                links.push(link);
                result
            }
            Err(error) => Err(Error::all_gather(error)),
        };
        match result {
            Ok(result) => results.push(result),
            Err(error) => {
                tracing::debug!(rank, %error, "rank missing");
                missing.push(rank);
            }
        }
    }
    (results, missing)
}

/// Sends a contribution to rank 0, and receives those of all.
async fn ask(link: &mut Connection, own: &[u8], size: u32, until: Instant) -> Result<Vec<Vec<u8>>> {
    let Connection { reader, writer, .. } = link;
    let asking = async {
        let reply = {
            let mut receiving = pin!(receive(reader, MAX_FRAME));
            tokio::select! {
                // Rank 0 may reply before it has read all: that ranks are missing, or why it refuses this one.
                reply = &mut receiving => reply,
                _ = writer.write(own, &[]) => receiving.await,
            }
        };
        let reply = decode(&reply?)?;
        let mut all = Zeroizing::new(Vec::new());
        if matches!(reply, Reply::All) {
            for _ in 0..size {
                all.push(receive(reader, MAX_FRAME).await?);
            }
        }
        Ok((reply, std::mem::take(&mut *all)))
    };
    let missing = match by(until, asking).await {
        Ok((Reply::All, all)) => return Ok(all),
        Ok((Reply::Refused(why), _)) => return Err(Error::all_gather(bounded(&why, 255))),
        Ok((Reply::Missing(missing), _)) => missing,
        Err(error) => {
            tracing::debug!(%error, "rank 0 missing");
            vec![0]
        }
    };
    Err(Error::RanksMissing { missing, size })
}

/// Awaits `work` until a time.
async fn by<T>(until: Instant, work: impl Future<Output = Result<T>>) -> Result<T> {
    let worked = timeout_at(until, work).await;
    worked.unwrap_or_else(|_| Err(Error::all_gather("a rank is late")))
}

/// Receives a frame of at most so many bytes. The caller has a time limit.
async fn receive(reader: &mut FrameReader, most: u32) -> Result<Vec<u8>> {
    let frame = reader.read(most).await?;
    let ended = || reader.lost("it closed the connection");
    Ok(std::mem::take(&mut *frame.ok_or_else(ended)?.bytes))
}

async fn tell_missing<'a>(links: impl IntoIterator<Item = &'a mut Connection>, missing: &[u32]) {
    for link in links {
        tell(link, Reply::Missing(missing.to_vec())).await;
    }
}

/// Sends a last reply. Best effort: the rank may be one of those that are missing.
async fn tell(link: &mut Connection, reply: Reply) {
    let _ = timeout(PAUSE, link.writer.write(&encode(&reply), &[])).await;
}

/// Receives no fds, and keeps none of the other process: rank 0 has a connection of each rank.
fn without_fds(mut link: Connection) -> Connection {
    link.reader.forbid_fds();
    link.process = None;
    link
}

/// Begins to listen as rank 0, where [`rendezvous`] says.
async fn listen(address: &Address, until: Instant) -> Result<Listening> {
    let (security, limits) = (Security::PlainAnywhere, limits());
    let peers = Arc::new(Mutex::new(Peers::same_user()));
    let mut address = address.clone();
    if let Address::Tcp { host, .. } = &mut address
        && host.parse::<IpAddr>().is_err()
    {
        // Both IPv6 and IPv4, if this machine has IPv6.
        let has_ipv6 = UdpSocket::bind("[::]:0").is_ok();
        *host = if has_ipv6 { "::" } else { "0.0.0.0" }.into();
    }
    let is_taken = |error: &Error| match error.memory() {
        Some(MemoryError::System { kind, .. }) => *kind == ErrorKind::AddrInUse,
        _ => false,
    };
    loop {
        match Listening::bind(&address, &security, &peers, &limits).await {
            Err(error) if is_taken(&error) && Instant::now() + PAUSE < until => sleep(PAUSE).await,
            bound => return bound,
        }
    }
}

/// A frame and a write have as long as the call that waits for them.
fn limits() -> Limits {
    Limits {
        handshake: PATIENCE,
        frame: LONGEST,
        write: LONGEST,
        ..Limits::default()
    }
}

/// A rank, and where it meets the others.
struct Place<'a> {
    address: &'a Address,
    rank: u32,
    size: u32,
    secret: Option<&'a GroupSecret>,
}

impl Place<'_> {
    /// Connects to rank 0, again and again until it listens, and proves the secret.
    async fn connect(&self, until: Instant) -> Result<Connection> {
        let address = self.address;
        loop {
            let error = match by(until.min(deadline(PATIENCE)), self.greet()).await {
                Ok(link) => return Ok(link),
                Err(error) => error,
            };
            match error {
                Error::Share(ShareError::Protocol { .. }) | Error::TlsAtOneEnd { .. } => {
                    let what = format!("{address} is not a rank 0 of this version");
                    return Err(Error::all_gather(what));
                }
                Error::Share(
                    ShareError::NotTrusted { .. }
                    | ShareError::Unreachable {
                        cause: Unreachable::Denied,
                        ..
                    },
                ) => return Err(error),
                _ if Instant::now() + PAUSE >= until => {
                    tracing::debug!(%address, %error, "rank 0 missing");
                    let (missing, size) = (vec![0], self.size);
                    return Err(Error::RanksMissing { missing, size });
                }
                _ => sleep(PAUSE).await,
            }
        }
    }

    async fn greet(&self) -> Result<Connection> {
        let (security, peers) = (Security::PlainAnywhere, Peers::same_user());
        let link = transport::connect(self.address, &security, &peers, &limits()).await?;
        let mut link = without_fds(link);
        let challenge = receive(&mut link.reader, MAX_HELLO).await?;
        if challenge.len() != CHALLENGE || !challenge.starts_with(&MAGIC) {
            return Err(Error::protocol(&*link.label, "no challenge"));
        }
        let (rank, size) = (self.rank, self.size);
        let proof = (self.secret).and_then(|secret| secret.proof(&challenge, rank, size));
        let hello = encode(&Hello { rank, size, proof });
        link.writer.write(&hello, &[]).await?;
        Ok(link)
    }

    /// Listens as rank 0 until all other ranks have come. A connection that says nothing, or has no proof of the secret,
    /// takes no rank's place and no rank's time.
    async fn admit(&self, until: Instant) -> Result<Vec<Connection>> {
        let (listening, size) = (listen(self.address, until).await?, self.size);
        let mut seats: Vec<Option<Connection>> = (1..size).map(|_| None).collect();
        // Those whose hellos have not come, and those that are refused, the oldest first.
        let (mut pending, mut order) = (
            JoinSet::<Result<Heard>>::new(),
            VecDeque::<AbortHandle>::new(),
        );
        while seats.iter().any(Option::is_none) {
            tokio::select! {
                biased;
                () = sleep_until(until) => {
                    let missing = (1..).zip(&seats).filter(|(_, seat)| seat.is_none());
                    let missing: Vec<u32> = missing.map(|(rank, _)| rank).collect();
                    tell_missing(seats.iter_mut().flatten(), &missing).await;
                    return Err(Error::RanksMissing { missing, size });
                }
                Some(heard) = pending.join_next(), if !pending.is_empty() => {
                    let Ok(Ok((link, challenge, hello))) = heard else {
                        continue;
                    };
                    match seat(&hello, &challenge, &seats, self.secret) {
                        Ok(index) => seats[index] = Some(link),
                        Err(why) => order.push_back(pending.spawn(refuse(link, why))),
                    }
                }
                incoming = listening.accept() => {
                    let Some((_, handshake)) = incoming? else {
                        // This process may open no more fds for a moment.
                        sleep(Duration::from_millis(1)).await;
                        continue;
                    };
                    order.retain(|task| !task.is_finished());
                    // The oldest has had the most time.
                    if order.len() >= size as usize + STRANGERS
                        && let Some(oldest) = order.pop_front()
                    {
                        oldest.abort();
                    }
                    order.push_back(pending.spawn(by(deadline(PATIENCE), hear(handshake))));
                }
            }
        }
        Ok(seats.into_iter().flatten().collect())
    }
}

/// A connection with its challenge and its hello.
type Heard = (Connection, Vec<u8>, Hello);

/// Sends a challenge to a connection, and receives its hello.
async fn hear(handshake: impl Future<Output = Result<Connection>>) -> Result<Heard> {
    let mut link = without_fds(handshake.await?);
    let drawn = random::<32>().map_err(|error| Error::system("reading random bytes", &error))?;
    let challenge = [&MAGIC[..], &drawn].concat();
    link.writer.write(&challenge, &[]).await?;
    let hello = decode(&receive(&mut link.reader, MAX_HELLO).await?)?;
    Ok((link, challenge, hello))
}

/// Refuses a connection, and closes it once its rank has read why. Closed with unread bytes, it would be reset, which
/// overtakes the reply.
async fn refuse(mut link: Connection, why: String) -> Result<Heard> {
    tell(&mut link, Reply::Refused(why)).await;
    let _ = timeout(PATIENCE, link.reader.discard(MAX_FRAME as usize)).await;
    Err(Error::peer_lost(&*link.label, "it was refused"))
}

/// Returns the place of a rank among those of all but rank 0, or why it is refused.
fn seat<T>(
    hello: &Hello,
    challenge: &[u8],
    seats: &[Option<T>],
    secret: Option<&GroupSecret>,
) -> Result<usize, String> {
    let (rank, size, own_size) = (hello.rank, hello.size, seats.len() + 1);
    let proof = secret.and_then(|secret| secret.proof(challenge, rank, size));
    if hello.proof != proof || proof.is_some() != secret.is_some() {
        return Err("this rank has not the secret of rank 0".into());
    }
    if size as usize != own_size {
        return Err(format!("size {size} here, {own_size} in rank 0"));
    }
    let index = (rank as usize).wrapping_sub(1);
    match seats.get(index) {
        Some(None) => Ok(index),
        Some(Some(_)) => Err(format!("rank {rank} is taken by another process")),
        None => Err(format!("rank {rank} of {size}")),
    }
}

#[cfg(test)]
mod tests;

#[cfg(fuzzing)]
#[path = "rendezvous/tests/fuzzing.rs"]
pub(super) mod fuzzing;
