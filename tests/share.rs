//! Sharing between real processes, on the simulator and on this machine's GPUs: the owner works with
//! the first GPU, its peer with the last.
#![cfg(feature = "share")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use egmem::driver::{
    Access, HandleType, HandleTypes, Location, NodeId, PointerAttribute, ShareableHandle,
};
use egmem::pool::{ImportedPool, ImportedPoolBuffer};
use egmem::proof::{Prover, check_pattern, write_pattern};
use egmem::share::{
    Channel, ImportOptions, ImportedBuffer, LentPoolBuffer, Listener, Peers, Shared,
    best_handle_types,
};
use egmem::topology::Placement;
use egmem::{Buffer, Driver, Error, Machine, Memory, Pool, Stream, Topology};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

const MIB: u64 = 1 << 20;
/// Longer than anything here takes, even emulated.
const PATIENCE: Duration = Duration::from_secs(120);
/// Too short for anything.
const IMPATIENCE: Duration = Duration::from_millis(30);

/// With `EGMEM_REQUIRE_CUDA` this machine's driver, otherwise a simulated one.
fn open() -> Driver {
    match std::env::var_os("EGMEM_REQUIRE_CUDA") {
        Some(_) => Driver::open().unwrap(),
        None => Driver::simulated(Machine::gh200x4()).unwrap(),
    }
}

fn last_gpu(driver: &Driver) -> i32 {
    driver.device_count().unwrap() - 1
}

fn node(driver: &Driver) -> NodeId {
    let topology = Topology::discover(driver).unwrap();
    topology.gpu(0).unwrap().host_node().unwrap()
}

/// Memory near the first GPU, for it alone: whoever else uses it has imported it.
fn buffer(driver: &Driver) -> Shared {
    let buffer = Buffer::on(node(driver))
        .access_by([Location::Device(0)])
        .bytes(3 * MIB)
        .shareable()
        .allocate(driver)
        .unwrap();
    Shared::from(buffer)
}

/// Parts on every node, or two parts where there is one node.
fn spread(driver: &Driver) -> Shared {
    let topology = Topology::discover(driver).unwrap();
    let mut shares = Placement::Spread
        .request(15 * MIB)
        .place(&topology)
        .unwrap();
    if shares.len() == 1 {
        let last = egmem::topology::Share {
            bytes: 5 * MIB,
            ..shares[0]
        };
        shares[0].bytes = 10 * MIB;
        shares.push(last);
    }
    Shared::from(
        Buffer::spread(&shares)
            .shareable()
            .allocate(driver)
            .unwrap(),
    )
}

/// A folder of this test's own, with a socket in it.
struct Place {
    _folder: tempfile::TempDir,
    socket: PathBuf,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        Self {
            _folder: folder,
            socket,
        }
    }

    fn listen(&self) -> Listener {
        let mut listener = Listener::bind(&self.socket, Peers::same_user()).unwrap();
        listener.set_timeout(PATIENCE).unwrap();
        listener
    }
}

/// Another process of this program, in one of the roles below.
struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    fn start(role: &str, socket: &Path) -> Self {
        let exe = std::env::current_exe().unwrap();
        let runner = std::env::var("EGMEM_TEST_RUNNER").unwrap_or_default();
        let mut words = runner.split_whitespace();
        let mut command = match words.next() {
            Some(program) => {
                let mut command = Command::new(program);
                command.args(words).arg(exe);
                command
            }
            None => Command::new(exe),
        };
        let mut child = command
            .args([
                "--exact",
                "child_process",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("EGMEM_SHARE_ROLE", role)
            .env("EGMEM_SHARE_SOCKET", socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, lines }
    }

    /// Lets it go on.
    fn go(&mut self) {
        writeln!(self.child.stdin.as_mut().unwrap(), "go").unwrap();
    }

    /// Waits until it says so.
    #[track_caller]
    fn says(&mut self, word: &str) {
        let deadline = Instant::now() + PATIENCE;
        let mut said = Vec::new();
        loop {
            match self
                .lines
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(line) if line == word => return,
                // For whoever writes down how drivers behave.
                Ok(line) if line.starts_with("seen: ") => println!("{line}"),
                Ok(line) => said.push(line),
                Err(RecvTimeoutError::Timeout) => panic!("no '{word}' in time, but: {said:#?}"),
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("no '{word}', but: {said:#?}, {:?}", self.child.wait())
                }
            }
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    #[track_caller]
    fn ends_well(mut self) {
        self.says("well");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a child process says, on a line of its own whatever the test harness writes.
fn say(word: &str) {
    println!("\n{word}");
}

/// Waits for the parent's `go`.
fn wait_for_go() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    assert_eq!(line, "go\n");
}

fn nothing_held(driver: &Driver) {
    if let Some(sim) = driver.sim() {
        assert!(sim.held().is_empty(), "{}", sim.held());
    }
}

/// In a child process, its role; nothing otherwise.
#[test]
fn child_process() {
    let Ok(role) = std::env::var("EGMEM_SHARE_ROLE") else {
        return;
    };
    let path = PathBuf::from(std::env::var_os("EGMEM_SHARE_SOCKET").unwrap());
    let driver = open();
    match role.as_str() {
        "peer" => peer(&driver, &path),
        "owner" => owner(&driver, &path),
        "cycles" => cycles(&driver, &path),
        "pool" => pool_peer(&driver, &path),
        "stranger" => stranger(&path),
        "poor" => poor(&driver, &path),
        "many" => many(&driver, &path),
        other => panic!("no role {other}"),
    }
    nothing_held(&driver);
    say("well");
}

fn receive(channel: &mut Channel, driver: &Driver) -> ImportedBuffer {
    let offer = channel.receive().unwrap();
    offer.import(driver, ImportOptions::new()).unwrap()
}

fn connect(path: &Path) -> Channel {
    Channel::connect(path, Peers::same_user()).unwrap()
}

// Memory, seen from both sides.

/// Takes turns with the peer: each checks what the other wrote, by CPU and GPU, and writes anew.
fn shows_the_same_bytes(driver: &Driver, shared: Shared) {
    let place = Place::new();
    let listener = place.listen();
    let mut peer = Process::start("peer", &place.socket);
    let mut channel = listener.accept().unwrap();
    assert_eq!(channel.peer().uid, rustix::process::getuid().as_raw());

    let prover = Prover::new(driver, 0).unwrap();
    let buffer = shared.buffer().unwrap();
    prover.write(&**buffer, 1).unwrap();
    channel.send(&shared, Access::ReadWrite).unwrap();
    peer.says("gpu wrote 2");
    check_pattern(&buffer.cpu().unwrap(), 2).unwrap();
    prover.check_rewrite(&**buffer, 2, 3).unwrap();
    peer.go();
    peer.says("cpu wrote 4");
    prover.check_rewrite(&**buffer, 4, 5).unwrap();
    write_pattern(&buffer.cpu().unwrap(), 6).unwrap();
    let last = shared.padded() - 8;
    shared.put_word(last, 77).unwrap();
    peer.go();
    peer.ends_well();
    assert_eq!(shared.word(last).unwrap(), 78);
    drop((shared, prover));
    nothing_held(driver);
}

fn peer(driver: &Driver, path: &Path) {
    let mut channel = connect(path);
    let imported = receive(&mut channel, driver);
    assert_eq!(imported.via(), HandleType::PosixFd);
    let prover = Prover::new(driver, last_gpu(driver)).unwrap();
    check_pattern(&imported.cpu().unwrap(), 1).unwrap();
    prover.check_rewrite(&imported, 1, 2).unwrap();
    say("gpu wrote 2");
    wait_for_go();
    prover.check_rewrite(&imported, 3, 0).unwrap();
    write_pattern(&imported.cpu().unwrap(), 4).unwrap();
    say("cpu wrote 4");
    wait_for_go();
    prover.check_rewrite(&imported, 6, 7).unwrap();
    let last = imported.description().padded() - 8;
    assert_eq!(imported.word(last).unwrap(), 77);
    imported.put_word(last, 78).unwrap();
}

#[test]
fn a_buffer_shows_the_same_bytes_to_both() {
    let driver = open();
    let shared = buffer(&driver);
    shows_the_same_bytes(&driver, shared);
}

#[test]
fn a_buffer_in_parts_shows_the_same_bytes_to_both() {
    let driver = open();
    let shared = spread(&driver);
    assert!(shared.describe(Access::Read).unwrap().parts.len() > 1);
    shows_the_same_bytes(&driver, shared);
}

/// More parts than a message can carry fds.
#[test]
fn many_parts_go_in_batches() {
    const PARTS: usize = 260;
    let driver = open();
    let part = || {
        let options = egmem::vmm::PhysicalMemory::options(node(&driver));
        let options = options.handle_types(HandleTypes::POSIX_FD);
        options.create(&driver, 2 * MIB).unwrap()
    };
    let parts: Vec<_> = (0..PARTS).map(|_| part()).collect();
    let shared = Shared::from_physical(parts, PARTS as u64 * 2 * MIB).unwrap();
    let place = Place::new();
    let listener = place.listen();
    let peer = Process::start("many", &place.socket);
    let mut channel = listener.accept().unwrap();
    for part in 0..PARTS as u64 {
        shared.put_word(part * 2 * MIB, part).unwrap();
    }
    channel.send(&shared, Access::ReadWrite).unwrap();
    peer.ends_well();
    for part in 0..PARTS as u64 {
        assert_eq!(shared.word(part * 2 * MIB).unwrap(), part + 1);
    }
    drop(shared);
    nothing_held(&driver);
}

fn many(driver: &Driver, path: &Path) {
    let imported = receive(&mut connect(path), driver);
    for part in 0..imported.description().parts.len() as u64 {
        assert_eq!(imported.get::<u64>(part * 2 * MIB).unwrap(), part);
        imported.put(part * 2 * MIB, part + 1).unwrap();
    }
}

/// The importer's memory lives on, with its bytes, for CPU and GPU.
#[test]
fn an_owner_that_is_killed_leaves_the_memory() {
    let driver = open();
    let place = Place::new();
    let listener = place.listen();
    let mut owner = Process::start("owner", &place.socket);
    let mut channel = listener.accept().unwrap();
    let imported = receive(&mut channel, &driver);
    owner.kill();
    let error = channel.receive().unwrap_err();
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    check_pattern(&imported.cpu().unwrap(), 11).unwrap();
    let prover = Prover::new(&driver, last_gpu(&driver)).unwrap();
    prover.check_rewrite(&imported, 11, 12).unwrap();
    check_pattern(&imported.cpu().unwrap(), 12).unwrap();
    drop((imported, prover));
    nothing_held(&driver);
}

fn owner(driver: &Driver, path: &Path) {
    let shared = buffer(driver);
    Prover::new(driver, 0)
        .unwrap()
        .write(&**shared.buffer().unwrap(), 11)
        .unwrap();
    let mut channel = connect(path);
    channel.send(&shared, Access::ReadWrite).unwrap();
    wait_for_go();
}

/// Where fabric handles are refused, the reason is typed and the fd path is taken.
#[test]
fn without_fabric_there_are_fds_and_a_reason() {
    let driver = open();
    let best = best_handle_types(&driver, node(&driver).into()).unwrap();
    assert!(
        best.handle_types.contains(HandleTypes::POSIX_FD),
        "{best:?}"
    );
    let shared = buffer(&driver);
    assert_eq!(shared.handle_types(), best.handle_types);
    match best.no_fabric {
        Some(reason) => {
            let typed = matches!(
                reason,
                Error::NoImexChannel { .. } | Error::PlatformUnsupported { .. }
            );
            assert!(typed, "{reason}");
            println!("no fabric handles: {reason}");
            let error = shared.export(HandleType::Fabric).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        }
        None => assert_eq!(shared.export(HandleType::Fabric).unwrap().len(), 1),
    }
}

/// The driver maps what is there, or nothing.
#[test]
fn a_description_with_wrong_sizes_is_refused() {
    let driver = open();
    let shared = buffer(&driver);
    let right = shared.describe(Access::ReadWrite).unwrap();
    for bytes in [2 * MIB, 6 * MIB, 8 * MIB, 1 << 30, 1 << 44] {
        let mut wrong = right.clone();
        wrong.parts[0].bytes = bytes;
        wrong.len = 2 * MIB;
        let fds = shared.export(HandleType::PosixFd).unwrap();
        let error = ImportOptions::new()
            .import(&driver, &wrong, fds)
            .unwrap_err();
        assert!(error.driver_error().is_some(), "{bytes}: {error}");
        println!("seen: 4 MiB described as {bytes} bytes: {error}");
    }
    let fds = shared.export(HandleType::PosixFd).unwrap();
    let imported = ImportOptions::new().import(&driver, &right, fds).unwrap();
    imported.put(3 * MIB - 8, 1_u64).unwrap();
    drop((imported, shared));
    nothing_held(&driver);
}

// Who may.

#[test]
fn another_user_is_refused_on_both_sides() {
    let place = Place::new();
    let stranger = rustix::process::geteuid().as_raw() + 1;
    let mut listener = Listener::bind(&place.socket, Peers::user(stranger)).unwrap();
    listener.set_timeout(PATIENCE).unwrap();
    let process = Process::start("stranger", &place.socket);
    let error = listener.accept().unwrap_err();
    assert!(matches!(error, Error::NotTrusted { .. }), "{error}");
    process.ends_well();
    // The policy of who connects counts as well.
    let error = Channel::connect(&place.socket, Peers::user(stranger)).unwrap_err();
    assert!(matches!(error, Error::NotTrusted { .. }), "{error}");
}

fn stranger(path: &Path) {
    let error = connect(path).receive().unwrap_err();
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
}

// What may come.

fn pair() -> (UnixStream, Channel) {
    let (a, b) = UnixStream::pair().unwrap();
    let mut channel = Channel::new(b, &Peers::same_user()).unwrap();
    channel.set_timeout(PATIENCE);
    (a, channel)
}

/// A frame that describes `shared`, as a channel sends it.
fn frame(shared: &Shared) -> Vec<u8> {
    let (a, b) = UnixStream::pair().unwrap();
    let mut channel = Channel::new(a, &Peers::same_user()).unwrap();
    channel.send(shared, Access::ReadWrite).unwrap();
    drop(channel);
    // Read without looking at the fds, which the kernel then closes.
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut &b, &mut bytes).unwrap();
    bytes
}

fn send(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = vec![std::mem::MaybeUninit::uninit(); 4096];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    let iov = [std::io::IoSlice::new(bytes)];
    rustix::net::sendmsg(socket, &iov, &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn fd(shared: &Shared) -> OwnedFd {
    match shared.export(HandleType::PosixFd).unwrap().remove(0) {
        ShareableHandle::PosixFd(fd) => fd,
        ShareableHandle::Fabric(_) => panic!("an fd was asked for"),
    }
}

/// After each the channel is closed, and the fds that came are too.
#[test]
fn what_breaks_the_protocol_closes_the_channel() {
    let driver = open();
    let shared = buffer(&driver);
    let good = frame(&shared);
    let fd = fd(&shared);
    let with = |len: u32, rest: &[u8]| [&len.to_be_bytes()[..], rest].concat();
    let mut long = good.clone();
    long[..4].copy_from_slice(&(good.len() as u32 - 3).to_be_bytes());
    long.push(0);
    let newer = good.clone();
    let at = newer.windows(8).position(|w| w == b"\x67version").unwrap() + 8;
    let mut newer = newer;
    newer[at] = 2;
    let cases: [(&str, Vec<u8>, usize); 11] = [
        ("garbage", with(16, b"0123456789abcdef"), 0),
        ("garbage with an fd", with(16, b"0123456789abcdef"), 1),
        (
            "garbage before a message",
            [with(1, b"x"), good.clone()].concat(),
            1,
        ),
        ("an empty frame", with(0, b""), 0),
        ("an oversize frame", with((1 << 20) + 1, b"x"), 0),
        ("the largest length there is", with(u32::MAX, b"x"), 1),
        ("bytes after the message", long, 1),
        ("another version", newer, 1),
        ("no fds", good.clone(), 0),
        ("too many fds", good.clone(), 2),
        ("far too many fds", good.clone(), 253),
    ];
    for (what, bytes, fds) in cases {
        let (socket, mut channel) = pair();
        let (mut reader, writer) = std::io::pipe().unwrap();
        // The first is memory, so that only the number is wrong.
        let fds: Vec<_> = (0..fds)
            .map(|i| if i == 0 { fd.as_fd() } else { writer.as_fd() })
            .collect();
        send(&socket, &bytes, &fds);
        drop(fds);
        drop(writer);
        let error = channel.receive().unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{what}: {error}");
        let error = channel.receive().unwrap_err();
        assert!(matches!(error, Error::PeerLost { .. }), "{what}: {error}");
        // Every copy of the pipe's other end is closed, or this would wait.
        let n = std::io::Read::read(&mut reader, &mut [0]).unwrap();
        assert_eq!(n, 0, "{what}");
    }
    // What is no memory, the driver refuses.
    let (socket, mut channel) = pair();
    let null = fs::File::open("/dev/null").unwrap();
    send(&socket, &good, &[null.as_fd()]);
    let offer = channel.receive().unwrap();
    assert!(offer.import(&driver, ImportOptions::new()).is_err());
    // And what is right is taken, in any pieces.
    for byte in &good[..1] {
        send(&socket, &[*byte], &[fd.as_fd()]);
    }
    for bytes in good[1..].chunks(7) {
        send(&socket, bytes, &[]);
    }
    let imported = receive(&mut channel, &driver);
    drop((imported, shared));
    nothing_held(&driver);
}

#[test]
fn truncated_and_silent_peers_end_in_time() {
    let driver = open();
    let shared = buffer(&driver);
    let good = frame(&shared);
    for cut in [1, 4, 5, good.len() - 1] {
        // It ends in the middle.
        let (socket, mut channel) = pair();
        send(&socket, &good[..cut], &[]);
        drop(socket);
        let error = channel.receive().unwrap_err();
        assert!(matches!(error, Error::PeerLost { .. }), "{cut}: {error}");
        // It stays, and says no more.
        let (socket, mut channel) = pair();
        channel.set_timeout(IMPATIENCE);
        send(&socket, &good[..cut], &[]);
        let error = channel.receive().unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }), "{cut}: {error}");
        let error = channel.receive().unwrap_err();
        assert!(matches!(error, Error::PeerLost { .. }), "{cut}: {error}");
    }
    // It has said nothing yet: that is no reason to close.
    let (socket, mut channel) = pair();
    channel.set_timeout(IMPATIENCE);
    let error = channel.receive().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    channel.set_timeout(PATIENCE);
    let fd = fd(&shared);
    send(&socket, &good, &[fd.as_fd()]);
    channel.receive().unwrap();
    // A byte now and then is no way to hold it up for ever.
    channel.set_timeout(IMPATIENCE);
    let slow = std::thread::spawn(move || {
        for byte in good {
            std::thread::sleep(IMPATIENCE / 3);
            if std::io::Write::write_all(&mut &socket, &[byte]).is_err() {
                return true;
            }
        }
        false
    });
    let error = channel.receive().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    drop(channel);
    assert!(slow.join().unwrap(), "it was let finish");
    // Nobody reads.
    let (socket, mut channel) = pair();
    channel.set_timeout(IMPATIENCE);
    let error = loop {
        if let Err(error) = channel.send(&shared, Access::Read) {
            break error;
        }
    };
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    drop(socket);
    // Nobody comes.
    let place = Place::new();
    let mut nobody = Listener::bind(&place.socket, Peers::same_user()).unwrap();
    nobody.set_timeout(IMPATIENCE).unwrap();
    let error = nobody.accept().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
}

/// A process that may not have as many fds as come closes those that it got.
#[test]
fn fds_that_are_too_many_for_the_process_are_closed() {
    let driver = open();
    let place = Place::new();
    let listener = place.listen();
    let peer = Process::start("poor", &place.socket);
    let shared = spread(&driver);
    listener
        .accept()
        .unwrap()
        .send(&shared, Access::Read)
        .unwrap();
    peer.ends_well();
}

fn poor(driver: &Driver, path: &Path) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let mut channel = connect(path);
    let before = counts(driver).0;
    let limit = getrlimit(Resource::Nofile);
    // Room for one: the lowest number that is free, and no more.
    let free = fs::File::open("/dev/null").unwrap();
    let least = std::os::fd::AsRawFd::as_raw_fd(&free) as u64 + 1;
    drop(free);
    let current = Some(least);
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    let error = channel.receive().unwrap_err();
    setrlimit(Resource::Nofile, limit).unwrap();
    assert!(matches!(error, Error::Protocol { .. }), "{error}");
    assert!(error.to_string().contains("lost on their way"), "{error}");
    assert_eq!(counts(driver).0, before);
    let error = channel.receive().unwrap_err();
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
}

// Nothing is left behind.

const CYCLES: usize = 1000;

/// Open fds, mappings in the address space, and what the simulator holds.
fn counts(driver: &Driver) -> (usize, usize, Option<egmem::driver::sim::Held>) {
    let fds = fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .count();
    (fds, maps, driver.sim().map(|sim| sim.held()))
}

#[test]
fn a_thousand_imports_leave_nothing_behind() {
    let driver = open();
    let place = Place::new();
    let listener = place.listen();
    let peer = Process::start("cycles", &place.socket);
    let mut channel = listener.accept().unwrap();
    let shared = buffer(&driver);
    for _ in 0..CYCLES {
        channel.send(&shared, Access::ReadWrite).unwrap();
    }
    peer.ends_well();
    assert_eq!(shared.word(0).unwrap(), CYCLES as u64);
}

fn cycles(driver: &Driver, path: &Path) {
    let mut channel = connect(path);
    let mut early = None;
    for cycle in 0..CYCLES {
        if cycle == CYCLES / 10 {
            early = Some(counts(driver));
        }
        let imported = receive(&mut channel, driver);
        let count = imported.word(0).unwrap();
        imported.put_word(0, count + 1).unwrap();
    }
    let (early, late) = (early.unwrap(), counts(driver));
    assert_eq!((early.0, early.2), (late.0, late.2));
    // The allocator may have mapped some more for itself.
    assert!(
        late.1 <= early.1 + 50,
        "{} mappings, then {}",
        early.1,
        late.1
    );
}

// Pools.

fn pool(driver: &Driver) -> (Pool, Stream) {
    let pool = Pool::options(node(driver))
        .handle_types(HandleTypes::POSIX_FD)
        .create(driver)
        .unwrap();
    (pool, Stream::new(driver, 0).unwrap())
}

#[test]
fn pool_memory_is_freed_there_first() {
    let driver = open();
    let place = Place::new();
    let listener = place.listen();
    let (pool, stream) = pool(&driver);
    let prover = Prover::new(&driver, 0).unwrap();
    let lend = || LentPoolBuffer::from(pool.allocate(3 * MIB + 4096, &stream).unwrap());
    let (mut first, mut second) = (lend(), lend());
    prover.write(&*first, 21).unwrap();
    prover.write(&*second, 31).unwrap();

    let mut peer = Process::start("pool", &place.socket);
    let mut channel = listener.accept().unwrap();
    channel.send_pool(&pool).unwrap();
    channel.send_pool_buffer(&mut first).unwrap();
    channel.send_pool_buffer(&mut second).unwrap();
    channel.send_pool_buffer(&mut first).unwrap();
    peer.says("gpu wrote 22");
    check_pattern(&first.cpu().unwrap(), 22).unwrap();
    prover.check_rewrite(&*first, 22, 23).unwrap();
    assert_eq!(first.holders().len(), 1);
    let error = first.wait(IMPATIENCE).unwrap_err();
    assert!(matches!(error, Error::StillHeld { .. }), "{error}");
    let mut first = first.into_buffer().expect_err("the peer has it");
    peer.go();
    // It frees the first and goes on with the second.
    first.wait(PATIENCE).unwrap();
    let first = first.into_buffer().expect("nobody has it any more");
    check_pattern(&first.cpu().unwrap(), 24).unwrap();
    first.free_on(&stream).unwrap();

    // Dropped while the peer has it, it is kept back, until the peer is gone: killed, not asked.
    assert_eq!(LentPoolBuffer::sweep(), 0);
    drop(second);
    assert_eq!(LentPoolBuffer::sweep(), 1);
    stream.synchronize().unwrap();
    assert_eq!(pool.stats().unwrap().used, 3 * MIB + 4096);
    peer.kill();
    assert_eq!(LentPoolBuffer::sweep(), 0);
    stream.synchronize().unwrap();
    assert_eq!(pool.stats().unwrap().used, 0);
    drop((pool, stream, prover));
    nothing_held(&driver);
}

fn pool_peer(driver: &Driver, path: &Path) {
    let mut channel = connect(path);
    let gpu = last_gpu(driver);
    let stream = Stream::new(driver, gpu).unwrap();
    let prover = Prover::new(driver, gpu).unwrap();
    let pool: ImportedPool = channel.receive_pool(driver).unwrap();
    assert_eq!(pool.location(), node(driver).into());
    let mut receive =
        || -> ImportedPoolBuffer { pool.receive_buffer(&mut channel, &stream).unwrap() };
    let (first, second) = (receive(), receive());
    assert_eq!(first.len(), 3 * MIB + 4096);
    // Twice the same must not make two owners of one address.
    let again = pool.receive_buffer(&mut channel, &stream);
    say(&format!("seen: the same pool memory again: {again:?}"));
    if let Ok(again) = again {
        assert_ne!(again.device_ptr(), first.device_ptr());
        again.free().unwrap();
    }
    let start = first.device_ptr();
    let attribute = |attribute| driver.pointer_attribute(start, attribute);
    say(&format!(
        "seen: imported pool memory at {start:?}: access of the host {:?}, of GPU {gpu} {:?}; address range \
         {:?}; memory type {:?}, host pointer {:x?}, range size {:?}, handle types {:?}",
        pool.access(node(driver)),
        pool.access(Location::Device(gpu)),
        driver.mem_address_range(start),
        attribute(PointerAttribute::MemoryType),
        attribute(PointerAttribute::HostPointer),
        attribute(PointerAttribute::RangeSize),
        attribute(PointerAttribute::AllowedHandleTypes),
    ));
    check_pattern(&first.cpu().unwrap(), 21).unwrap();
    prover.check_rewrite(&first, 21, 22).unwrap();
    say("gpu wrote 22");
    wait_for_go();
    prover.check_rewrite(&first, 23, 0).unwrap();
    write_pattern(&first.cpu().unwrap(), 24).unwrap();
    first.free().unwrap();
    // Until it is killed.
    prover.check_rewrite(&second, 31, 32).unwrap();
    wait_for_go();
}

#[test]
fn pool_memory_that_cannot_be_is_refused() {
    let driver = open();
    let (pool, stream) = pool(&driver);
    let channels = || {
        let (a, b) = UnixStream::pair().unwrap();
        [a, b].map(|end| Channel::new(end, &Peers::same_user()).unwrap())
    };
    let [mut a, mut b] = channels();
    let mut lent = LentPoolBuffer::from(pool.allocate(MIB, &stream).unwrap());
    assert!(
        a.send_pool_buffer(&mut lent).is_err(),
        "the pool was not sent"
    );
    assert!(lent.holders().is_empty());
    // Memory is not a pool.
    let shared = buffer(&driver);
    a.send(&shared, Access::Read).unwrap();
    let error = b.receive_pool(&driver).unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error}");
    // Nor is a pool memory.
    let [mut a, mut b] = channels();
    a.send_pool(&pool).unwrap();
    let error = b.receive().unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error}");
    // An unshareable pool stays.
    let own = Pool::options(node(&driver)).create(&driver).unwrap();
    let [mut a, mut b] = channels();
    let error = a.send_pool(&own).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    // An allocation that never arrives is not held for ever.
    a.send_pool(&pool).unwrap();
    b.receive_pool(&driver).unwrap();
    a.send_pool_buffer(&mut lent).unwrap();
    assert_eq!(lent.holders().len(), 1);
    drop(b);
    lent.wait(PATIENCE).unwrap();
    drop((lent, shared, own, pool, stream));
    nothing_held(&driver);
}
