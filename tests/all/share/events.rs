//! Events between processes: order, and what is left of them when one of the two is killed, stopped or gone.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egmem::driver::{Access, Call};
use egmem::share::{Channel, Error, Peers};
use egmem::{Event, Memory, Stream, Transfer};

use super::process::{Place, Process, accept, connect, receive, say, wait_for_go};
use super::{MIB, PATIENCE, buffer, open};
use egmem_tests::alone;
use egmem_tests::drivers::nothing_held;

const ROUNDS: u8 = 5;
/// How many processes are killed in one run, on the simulator and on a GPU, unless `EGMEM_TEST_KILLS` says otherwise.
const KILLS: [u32; 2] = [24, 6];

fn text(channel: &mut Channel) -> String {
    channel.receive_text(100).unwrap()
}

/// Waits until `is_true`.
#[track_caller]
fn until(is_true: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_true() {
        assert!(Instant::now() < deadline, "it never came true");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Fills all of a memory a few times, the last time with `byte`. The tickets wait for the work when they are dropped.
fn fill<M: Memory + Clone + 'static>(stream: &Stream, memory: &M, byte: u8) -> Vec<Transfer<M>> {
    let fill = |before: u8| {
        let to = (memory.clone(), 0);
        stream.start_fill(to, memory.len(), byte.wrapping_add(before))
    };
    (0..8).rev().map(|before| fill(before).unwrap()).collect()
}

/// Two processes change the same memory in turns, each on a stream of its own, and no thread waits for the GPU.
#[test]
fn events_put_the_work_of_two_processes_in_order() {
    let driver = open();
    let place = Place::new();
    let listener = place.listen();
    let peer = Process::start("event-peer", &place.socket);
    let mut channel = accept(&listener);
    let shared = buffer(&driver);
    channel.send(&shared, Access::ReadWrite).unwrap();
    let ours = Event::interprocess(&driver, 0).unwrap();
    channel.send_event(&ours).unwrap();
    let theirs = channel.receive_event(&driver).unwrap();
    assert!(theirs.is_imported() && !ours.is_imported() && !theirs.is_orphaned());
    let stream = Stream::new(&driver, 0).unwrap();
    let memory = Arc::clone(shared.buffer().unwrap());
    let mut tickets = Vec::new();
    for round in 0..ROUNDS {
        tickets.push(fill(&stream, &memory, 2 * round));
        ours.record(&stream).unwrap();
        channel.send_text("recorded").unwrap();
        assert_eq!(text(&mut channel), "recorded");
        stream.wait(&theirs).unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(memory.get::<u8>(3 * MIB - 1).unwrap(), 2 * ROUNDS - 1);
    theirs.synchronize().unwrap();
    drop((tickets, theirs, stream, memory));
    channel.send_text("end").unwrap();
    peer.ends_well();
    drop((ours, shared));
    nothing_left(&driver);
}

/// Waits until nothing is held, events that were dropped included: a process that another test starts has the pipes of this
/// one until it runs its program.
fn nothing_left(driver: &egmem::Driver) {
    until(|| {
        // Each drop of such an event looks for others that are due.
        drop(Event::interprocess(driver, 0).unwrap());
        driver.sim().is_none_or(|sim| sim.held().is_empty())
    });
}

pub fn peer(driver: &egmem::Driver, path: &Path) {
    let mut channel = connect(path);
    let memory = receive(&mut channel, driver);
    let theirs = channel.receive_event(driver).unwrap();
    let ours = Event::interprocess(driver, 0).unwrap();
    channel.send_event(&ours).unwrap();
    let stream = Stream::new(driver, 0).unwrap();
    let seen = egmem::Buffer::on(egmem_tests::drivers::node(driver)).bytes(2 * MIB);
    let seen = Arc::new(seen.allocate(driver).unwrap());
    let (mut tickets, mut copies) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        assert_eq!(text(&mut channel), "recorded");
        stream.wait(&theirs).unwrap();
        let to = (Arc::clone(&seen), u64::from(round) * 8);
        copies.push(
            stream
                .start_copy(to, (memory.clone(), 3 * MIB - 8), 8)
                .unwrap(),
        );
        tickets.push(fill(&stream, &memory, 2 * round + 1));
        ours.record(&stream).unwrap();
        channel.send_text("recorded").unwrap();
    }
    stream.synchronize().unwrap();
    for round in 0..ROUNDS {
        let word = seen.get::<u64>(u64::from(round) * 8).unwrap();
        assert_eq!(word, u64::from_ne_bytes([2 * round; 8]), "round {round}");
    }
    assert_eq!(text(&mut channel), "end");
    drop((tickets, copies, seen, stream, memory, theirs, ours));
    nothing_left(driver);
}

/// A dropped event is destroyed only when the processes that have it have ended or dropped theirs.
#[test]
fn a_dropped_event_lives_until_its_holders_have_ended() {
    let driver = open();
    let place = Place::new();
    let listener = place.listen();
    let mut killed = Process::start("event-holder", &place.socket);
    let event = Event::interprocess(&driver, 0).unwrap();
    let mut channel = accept(&listener);
    channel.send_event(&event).unwrap();
    killed.says("holding");
    let mut dropping = Process::start("event-holder", &place.socket);
    let mut other = accept(&listener);
    other.send_event(&event).unwrap();
    dropping.says("holding");
    let destroyed = || driver.sim().map_or(0, |sim| sim.count(Call::EventDestroy));
    let before = destroyed();
    drop(event);
    killed.kill();
    // Each drop of such an event looks for others that are due.
    drop(Event::interprocess(&driver, 0).unwrap());
    assert_eq!(
        destroyed() - before,
        driver.sim().map_or(0, |_| 1),
        "one process has it still"
    );
    dropping.go();
    dropping.ends_well();
    drop(Event::interprocess(&driver, 0).unwrap());
    // Another test's thread may have found it first.
    until(|| destroyed() - before == driver.sim().map_or(0, |_| 3));
    nothing_held(&driver);
}

/// Receives an event and drops it when it is told to.
pub fn holder(driver: &egmem::Driver, path: &Path) {
    let mut channel = connect(path);
    let event = channel.receive_event(driver).unwrap();
    say("holding");
    wait_for_go();
    drop(event);
}

/// An importer learns that its exporter has ended, and its calls say so.
#[test]
fn an_importer_learns_of_the_exporters_end() {
    let driver = open();
    let place = Place::new();
    let listener = place.listen();
    let mut exporter = Process::start("event-exporter", &place.socket);
    let mut channel = accept(&listener);
    let event = channel.receive_event(&driver).unwrap();
    assert_eq!(text(&mut channel), "done");
    let stream = Stream::new(&driver, 0).unwrap();
    stream.wait(&event).unwrap();
    event.synchronize().unwrap();
    assert!(!event.is_orphaned());
    exporter.kill();
    until(|| event.is_orphaned());
    for refused in [stream.wait(&event), event.record(&stream)] {
        let refused = refused.unwrap_err().to_string();
        assert!(
            refused.contains("using an event of another process"),
            "{refused}"
        );
    }
    // The work that it marks was done.
    event.synchronize().unwrap();
    stream.synchronize().unwrap();
    drop((event, stream));
    nothing_held(&driver);
}

pub fn exporter(driver: &egmem::Driver, path: &Path) {
    let mut channel = connect(path);
    let event = Event::interprocess(driver, 0).unwrap();
    let stream = Stream::new(driver, 0).unwrap();
    event.record(&stream).unwrap();
    event.synchronize().unwrap();
    channel.send_event(&event).unwrap();
    channel.send_text("done").unwrap();
    wait_for_go();
}

/// A process of a user that is not admitted gets no event: no byte is sent.
#[test]
fn a_peer_that_is_not_admitted_gets_no_event() {
    // SAFETY: the call has no arguments and cannot fail.
    let stranger = Peers::user(unsafe { libc::geteuid() } + 1);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let refused = Channel::new(ours, &stranger).unwrap_err();
    assert!(matches!(refused, Error::NotTrusted { .. }), "{refused}");
    let mut channel = Channel::new(theirs, &Peers::same_user()).unwrap();
    let nothing = channel.receive_event(&open()).unwrap_err();
    assert!(matches!(nothing, Error::PeerLost { .. }), "{nothing}");
}

/// Importers that are killed or stopped at any moment disturb neither the exporter's work nor the next importer, and
/// leave no event and no fd.
#[test]
fn killed_and_stopped_importers_leave_nothing() {
    // The files of other tests in this process would be counted too.
    let name = "killed_and_stopped_importers_leave_nothing";
    alone(module_path!(), name, kill_importers);
}

fn kill_importers() {
    let driver = open();
    let usual = KILLS[usize::from(!driver.is_simulated())];
    let kills = std::env::var("EGMEM_TEST_KILLS").map_or(usual, |kills| kills.parse().unwrap());
    let place = Place::new();
    let listener = place.listen();
    let stream = Stream::new(&driver, 0).unwrap();
    let fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut fds_at_first = None;
    for kill in 0..kills {
        let mut importer = Process::start("event-loop", &place.socket);
        let event = Event::interprocess(&driver, 0).unwrap();
        let mut channel = accept(&listener);
        channel.send_event(&event).unwrap();
        // Some are killed before they have received the event, some in the middle of their calls.
        if kill % 4 > 0 {
            importer.says("looping");
        }
        let is_stopped = kill % 2 == 0;
        if is_stopped {
            importer.signal(libc::SIGSTOP);
        }
        for _ in 0..1 + kill % 50 {
            event.record(&stream).unwrap();
            stream.wait(&event).unwrap();
        }
        if is_stopped {
            stream.synchronize().unwrap();
        }
        importer.kill();
        event.synchronize().unwrap();
        drop((importer, channel, event));
        // The reader of its output ends a moment later.
        if kill == 4 {
            fds_at_first = Some(fds());
        }
    }
    drop(Event::interprocess(&driver, 0).unwrap());
    drop(stream);
    nothing_held(&driver);
    if let Some(at_first) = fds_at_first {
        until(|| fds() <= at_first + 8);
    }
}

/// Waits for an event until it is killed; on the simulator it records it too. On a GPU work of a killed process may never be
/// done, and the exporter would wait for it.
pub fn in_a_loop(driver: &egmem::Driver, path: &Path) {
    let mut channel = connect(path);
    let event = channel.receive_event(driver).unwrap();
    let stream = Stream::new(driver, 0).unwrap();
    say("looping");
    // Ends by itself if the test does.
    while !event.is_orphaned() {
        let recorded = match driver.is_simulated() {
            true => event.record(&stream),
            false => Ok(()),
        };
        let used = recorded.and_then(|()| stream.wait(&event));
        if used.and_then(|()| stream.synchronize()).is_err() {
            break;
        }
    }
}
