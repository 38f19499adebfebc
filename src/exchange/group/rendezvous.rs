//! An all-gather over sockets: rank 0 listens, the others connect, and every gather goes through rank 0.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;

use super::seal::{GroupSecret, Sealed};
use super::{AllGather, MAX_CONTRIBUTION, MAX_RANKS};
use crate::driver::random;
use crate::limits::LONGEST;
use crate::share::socket::{self, SocketFile};
use crate::share::{Peers, fd};
use crate::text::bounded;
use crate::{Address, Error, Result};

/// A sealed contribution is at most so many bytes longer than its contents.
const SEAL: usize = 1024;

/// The first bytes in both directions: another protocol, or another version, is recognised at once.
const MAGIC: [u8; 8] = *b"egmemgr1";
/// From rank 0: `MAGIC` and a random challenge.
const CHALLENGE: usize = 8 + 32;
/// From another rank: `MAGIC`, its rank, the size, whether it has a secret, and its proof of it.
const CLAIM: usize = 8 + 4 + 4 + 1;
const HELLO: usize = CLAIM + 32;
/// How long a connection may take for its hello.
const PATIENCE: Duration = Duration::from_secs(10);
/// How much longer than its deadline a rank waits for rank 0, whose clock decides.
const SLACK: Duration = Duration::from_secs(5);
/// The pause before connecting again.
const PAUSE: Duration = Duration::from_millis(20);
/// How many connections may wait for their hellos besides those of all ranks.
const STRANGERS: usize = 64;

/// The first byte of rank 0's messages.
const ALL: u8 = 0;
const MISSING: u8 = 1;
const REFUSED: u8 = 2;

/// Meets the other ranks: rank 0 listens at `address`, and the others connect there and may start first. Returns when all
/// have come. Every gather has `deadline` for all ranks to come, as this call has.
///
/// At a Unix socket only processes of the same user meet. Over TCP the ranks need a secret, which every rank proves before
/// it takes its place, and each gather is [`Sealed`].
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a rank that does not exist, for more than [`MAX_RANKS`],
/// and for TCP without a secret; [`Error::RanksMissing`] in all ranks that have come; [`Error::AllGather`] in a rank that
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
    let deadline = deadline.min(LONGEST);
    let until = Instant::now() + deadline;
    let links = match rank {
        0 => admit(address, size, secret, until)?,
        _ => vec![connect(address, (rank, size), secret, until)?],
    };
    let mut star = Star {
        rank,
        size,
        deadline,
        links,
        broken: None,
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
    links: Vec<Link>,
    /// The error after which the connections are out of step.
    broken: Option<Error>,
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

impl Star {
    fn gather(&mut self, own: &[u8], until: Instant) -> Result<Vec<Vec<u8>>> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        if own.len() > MAX_CONTRIBUTION + SEAL {
            let bytes = own.len();
            let why = format!("{bytes} bytes exceed the limit of {MAX_CONTRIBUTION}");
            return Err(Error::all_gather(why));
        }
        let size = self.size;
        let gathered = match &self.links[..] {
            [zero] if self.rank > 0 => ask(zero, own, size, until + SLACK),
            links => collect(links, own, size, until),
        };
        if let Err(error) = &gathered {
            self.broken = Some(error.clone());
        }
        gathered
    }
}

/// Receives the contributions of all ranks, and sends all of them to each.
fn collect(links: &[Link], own: &[u8], size: u32, until: Instant) -> Result<Vec<Vec<u8>>> {
    let (mut all, mut missing) = (vec![own.to_vec()], Vec::new());
    for (rank, link) in (1..).zip(links) {
        match Timed(link, until).receive() {
            Ok(bytes) => all.push(bytes),
            Err(error) => {
                tracing::debug!(rank, %error, "rank missing");
                missing.push(rank);
            }
        }
    }
    if !missing.is_empty() {
        tell_missing(links.iter(), &missing);
        return Err(Error::RanksMissing { missing, size });
    }
    let mut message = vec![ALL];
    for bytes in &all {
        append(&mut message, bytes);
    }
    for (rank, link) in (1..).zip(links) {
        if let Err(error) = Timed(link, until + SLACK).write_all(&message) {
            tracing::debug!(rank, %error, "rank missing");
            missing.push(rank);
        }
    }
    if missing.is_empty() {
        return Ok(all);
    }
    Err(Error::RanksMissing { missing, size })
}

fn tell_missing<'a>(links: impl Iterator<Item = &'a Link>, missing: &[u32]) {
    let mut message = vec![MISSING];
    let ranks: Vec<u8> = missing.iter().flat_map(|rank| rank.to_be_bytes()).collect();
    append(&mut message, &ranks);
    for link in links {
        // Best effort: the rank may be one of those that are missing.
        let _ = Timed(link, Instant::now() + PAUSE).write_all(&message);
    }
}

/// Sends a contribution to rank 0, and receives those of all.
fn ask(link: &Link, own: &[u8], size: u32, until: Instant) -> Result<Vec<Vec<u8>>> {
    let lost = |error: io::Error| {
        tracing::debug!(%error, "rank 0 missing");
        let missing = vec![0];
        Error::RanksMissing { missing, size }
    };
    let (mut message, mut kind) = (Vec::new(), [0]);
    append(&mut message, own);
    let mut link = Timed(link, until);
    link.write_all(&message).map_err(lost)?;
    link.read_exact(&mut kind).map_err(lost)?;
    if kind == [ALL] {
        let all = (0..size).map(|_| link.receive());
        return all.collect::<io::Result<_>>().map_err(lost);
    }
    let bytes = link.receive().map_err(lost)?;
    if kind != [MISSING] {
        let why = String::from_utf8_lossy(&bytes);
        return Err(Error::all_gather(bounded(&why, 255)));
    }
    let ranks = bytes.as_chunks().0.iter();
    let missing = ranks.map(|rank| u32::from_be_bytes(*rank)).collect();
    Err(Error::RanksMissing { missing, size })
}

fn append(message: &mut Vec<u8>, bytes: &[u8]) {
    // Neither is longer than a contribution.
    message.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
    message.extend_from_slice(bytes);
}

/// A connection of two ranks: a Unix socket or a TCP connection, which behave alike.
type Link = UnixStream;

/// A connection, and the end of all its waits.
struct Timed<'a>(&'a Link, Instant);

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.1.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(Some(left.max(Duration::from_micros(1)))),
        }
    }

    /// Receives a length and so many bytes. Room is made for what comes, not for what is announced.
    fn receive(&mut self) -> io::Result<Vec<u8>> {
        let mut len = [0; 4];
        self.read_exact(&mut len)?;
        let len = u32::from_be_bytes(len) as usize;
        if len > MAX_CONTRIBUTION + SEAL {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut bytes = Vec::new();
        match self.take(len as u64).read_to_end(&mut bytes)? {
            read if read == len => Ok(bytes),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.set_read_timeout(self.left()?)?;
        self.0.read(bytes)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.set_write_timeout(self.left()?)?;
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Connects to rank 0, again and again until it listens, and proves the secret.
fn connect(
    address: &Address,
    (rank, size): (u32, u32),
    secret: Option<&GroupSecret>,
    until: Instant,
) -> Result<Link> {
    loop {
        match greet(address, (rank, size), secret, until) {
            Ok(link) => return Ok(link),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let what = format!("{address} is not a rank 0 of this version");
                return Err(Error::all_gather(what));
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(Error::system(format!("connecting to {address}"), &error));
            }
            Err(error) if Instant::now() + PAUSE >= until => {
                tracing::debug!(%address, %error, "rank 0 missing");
                let missing = vec![0];
                return Err(Error::RanksMissing { missing, size });
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

fn greet(
    address: &Address,
    (rank, size): (u32, u32),
    secret: Option<&GroupSecret>,
    until: Instant,
) -> io::Result<Link> {
    let link = dial(address, until)?;
    let mut timed = Timed(&link, until.min(Instant::now() + PATIENCE));
    let mut challenge = [0; CHALLENGE];
    timed.read_exact(&mut challenge)?;
    if challenge[..8] != MAGIC {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let (rank, size) = (rank.to_be_bytes(), size.to_be_bytes());
    let claim = [&MAGIC[..], &rank, &size, &[secret.is_some().into()]].concat();
    let proof = secret.map_or([0; 32], |secret| secret.proof(&challenge, &claim));
    timed.write_all(&[&claim[..], &proof].concat())?;
    Ok(link)
}

fn dial(address: &Address, until: Instant) -> io::Result<Link> {
    let left = until.saturating_duration_since(Instant::now());
    let left = left.clamp(PAUSE, PATIENCE);
    match address {
        Address::Unix(path) => {
            let socket = socket::connect(path, left).map_err(io::Error::other)?;
            is_own_user(&socket)?;
            Ok(socket.into())
        }
        Address::Tcp { host, port } => {
            let mut last = io::ErrorKind::AddrNotAvailable.into();
            for one in (host.as_str(), *port).to_socket_addrs()? {
                match TcpStream::connect_timeout(&one, left) {
                    Ok(stream) => {
                        stream.set_nodelay(true)?;
                        return Ok(OwnedFd::from(stream).into());
                    }
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
    }
}

/// Checks that the process at the other end of a Unix socket runs as this process's user.
fn is_own_user(socket: &OwnedFd) -> io::Result<()> {
    let peer = fd::credentials(socket.as_fd())?;
    let admitted = Peers::same_user().admit(&peer);
    admitted.map_err(|error| io::Error::new(io::ErrorKind::PermissionDenied, error))
}

/// A connection whose hello has not come completely.
struct Pending {
    link: Link,
    challenge: [u8; CHALLENGE],
    hello: [u8; HELLO],
    have: usize,
    until: Instant,
}

/// Listens as rank 0 until all other ranks have come. A connection that says nothing, or has no proof of the secret, takes
/// no rank's place and no rank's time.
fn admit(
    address: &Address,
    size: u32,
    secret: Option<&GroupSecret>,
    until: Instant,
) -> Result<Vec<Link>> {
    let (socket, _file) = listen(address)?;
    let mut seats: Vec<Option<Link>> = (1..size).map(|_| None).collect();
    let mut pending: Vec<Pending> = Vec::new();
    while seats.iter().any(Option::is_none) {
        let now = Instant::now();
        if now >= until {
            let missing = (1..).zip(&seats).filter(|(_, seat)| seat.is_none());
            let missing: Vec<u32> = missing.map(|(rank, _)| rank).collect();
            tell_missing(seats.iter().flatten(), &missing);
            return Err(Error::RanksMissing { missing, size });
        }
        pending.retain(|one| one.until > now);
        let next = pending.iter().map(|one| one.until).min();
        let ready = wait(
            &socket,
            &pending,
            next.map_or(until, |next| next.min(until)),
        )?;
        for index in (0..pending.len()).rev().filter(|&index| ready[index + 1]) {
            match pending[index].read() {
                Ok(false) => {}
                Ok(true) => seat(pending.swap_remove(index), &mut seats, secret),
                Err(_) => drop(pending.swap_remove(index)),
            }
        }
        if ready[0] {
            pending.extend(accept(&socket, address.is_unix(), until));
            let oldest = pending.iter().enumerate().min_by_key(|(_, one)| one.until);
            // The oldest has had the most time.
            if let Some((index, _)) = oldest.filter(|_| pending.len() > size as usize + STRANGERS) {
                pending.swap_remove(index);
            }
        }
    }
    Ok(seats.into_iter().flatten().collect())
}

/// Listens at `address`, without blocking in an accept.
fn listen(address: &Address) -> Result<(OwnedFd, Option<SocketFile>)> {
    let (socket, file) = match address {
        Address::Unix(path) => {
            let (socket, file) = socket::listen(path, &Peers::same_user())?;
            (socket, Some(file))
        }
        Address::Tcp { host, port } => {
            let listener = TcpListener::bind((host.as_str(), *port))
                .map_err(|error| Error::system(format!("listening at {address}"), &error))?;
            (listener.into(), None)
        }
    };
    rustix::io::ioctl_fionbio(&socket, true)
        .map_err(|error| Error::system("a socket's mode", &error.into()))?;
    Ok((socket, file))
}

/// Returns which of the listener and the connections can be read.
fn wait(socket: &OwnedFd, pending: &[Pending], until: Instant) -> Result<Vec<bool>> {
    let mut polled = vec![PollFd::new(socket, PollFlags::IN)];
    let links = pending.iter().map(|one| &one.link);
    polled.extend(links.map(|link| PollFd::new(link, PollFlags::IN)));
    let left = until.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left.max(Duration::from_millis(1))).ok();
    match rustix::event::poll(&mut polled, left.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(Error::system("waiting for ranks", &error.into())),
    }
    Ok(polled.iter().map(|one| !one.revents().is_empty()).collect())
}

/// Accepts a connection and sends it a challenge; `None` if it is gone again, or not of this user.
fn accept(socket: &OwnedFd, is_unix: bool, until: Instant) -> Option<Pending> {
    let Ok(socket) = rustix::net::accept_with(socket, SocketFlags::CLOEXEC) else {
        // Perhaps this process may open no more fds for a moment.
        std::thread::sleep(Duration::from_millis(1));
        return None;
    };
    if is_unix {
        is_own_user(&socket).ok()?;
    }
    let mut challenge = [0; CHALLENGE];
    challenge[..8].copy_from_slice(&MAGIC);
    challenge[8..].copy_from_slice(&random::<32>().ok()?);
    // Fails for a Unix socket, which has no delay.
    let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
    let link = Link::from(socket);
    let sent = Timed(&link, Instant::now() + PAUSE).write_all(&challenge);
    sent.and_then(|()| link.set_nonblocking(true)).ok()?;
    Some(Pending {
        link,
        challenge,
        hello: [0; HELLO],
        have: 0,
        until: until.min(Instant::now() + PATIENCE),
    })
}

impl Pending {
    /// Reads what has come; returns whether the hello is complete.
    fn read(&mut self) -> io::Result<bool> {
        match (&self.link).read(&mut self.hello[self.have..]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(came) => {
                self.have += came;
                Ok(self.have == HELLO)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Gives a connection its rank's place, or refuses it.
fn seat(one: Pending, seats: &mut [Option<Link>], secret: Option<&GroupSecret>) {
    let Pending {
        link,
        challenge,
        hello,
        ..
    } = one;
    let (claim, proof) = hello.split_at(CLAIM);
    let [rank, size] = [8, 12].map(|at| {
        let number = claim[at..].first_chunk().copied();
        u32::from_be_bytes(number.unwrap_or_default())
    });
    let with_secret = claim[16] != 0;
    let proved = secret.is_none_or(|secret| secret.proves(&challenge, claim, proof));
    let own_size = seats.len() + 1;
    let index = (rank as usize).checked_sub(1);
    let place = index.and_then(|index| seats.get_mut(index));
    let why = match place {
        _ if claim[..8] != MAGIC => "another protocol".into(),
        _ if secret.is_some() != with_secret || !proved => {
            "this rank has not the secret of rank 0".into()
        }
        _ if size as usize != own_size => format!("size {size} here, {own_size} in rank 0"),
        None => format!("rank {rank} of {size}"),
        Some(Some(_)) => format!("rank {rank} is taken by another process"),
        Some(place) => {
            if link.set_nonblocking(false).is_ok() {
                *place = Some(link);
            }
            return;
        }
    };
    let mut message = vec![REFUSED];
    append(&mut message, why.as_bytes());
    // Best effort: the connection is being closed.
    let _ = Timed(&link, Instant::now() + PAUSE).write_all(&message);
}

/// For tests/fuzz: receives the bytes after the first, the number of ranks, as rank 0's answer to a contribution, and as a
/// rank's hello.
#[cfg(fuzzing)]
pub(crate) fn receive(bytes: &[u8]) {
    let Some((&size, bytes)) = bytes.split_first() else {
        return;
    };
    let pair = || UnixStream::pair().expect("two sockets");
    let (here, there) = pair();
    (&there).write_all(bytes).expect("room for a few bytes");
    there.shutdown(std::net::Shutdown::Write).expect("an end");
    let until = Instant::now() + PATIENCE;
    if let Ok(all) = ask(&here, b"own", size.into(), until) {
        let received: usize = all.iter().map(|one| 4 + one.len()).sum();
        assert!(all.len() == usize::from(size) && received < bytes.len());
    }
    let Some(&hello) = bytes.first_chunk() else {
        return;
    };
    let secret = GroupSecret::new(b"0123456789abcdef").expect("long enough");
    for secret in [None, Some(&secret)] {
        let mut seats: Vec<_> = (1..size.max(1)).map(|_| None).collect();
        let (link, _there) = pair();
        let pending = Pending {
            link,
            challenge: [0; CHALLENGE],
            hello,
            have: HELLO,
            until,
        };
        seat(pending, &mut seats, secret);
        let taken = seats.iter().flatten().count();
        assert!(
            taken <= usize::from(secret.is_none()),
            "no proof of the secret"
        );
    }
}
