//! Ranks as processes.

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use egmem::driver::HandleType;
use egmem::exchange;
use egmem::exchange::group::{self, Group, Map};
use egmem::exchange::protocol::{
    Admission, Ask, FromServer, Greeting, Hello, Join, MAGIC, OLDEST, Secret, VERSION, decode,
    encode,
};
use egmem::share::BootId;
use egmem::{Driver, Machine};

use super::{LONG, buffer, free_address, secret};
use egmem_tests::child;
use egmem_tests::ms;
use egmem_tests::{read_frame, write_frame};

/// How long a rank may be silent: a process on a busy machine may be so for some seconds.
const LEASE: Duration = Duration::from_secs(12);

/// A rank in a process of its own; killed when dropped.
struct Rank {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Rank {
    fn start(rank: u32, size: u32, address: &str, machine: &str) -> Self {
        Self::spawn(
            child(module_path!(), "child_rank"),
            rank,
            size,
            address,
            machine,
        )
    }

    fn spawn(mut child: Command, rank: u32, size: u32, address: &str, machine: &str) -> Self {
        let mut child = child
            .env(
                "EGMEM_TEST_GROUP",
                format!("{rank} {size} {address} {machine}"),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The next word that the rank has for its test.
    fn says(&mut self) -> String {
        for line in self.lines.by_ref() {
            if let Some((_, word)) = line.unwrap().split_once("rank says ") {
                return word.to_owned();
            }
        }
        panic!("the rank has ended without a word");
    }

    fn go(&mut self) {
        self.tell("go");
    }

    fn tell(&mut self, what: &str) {
        let stdin = self.child.stdin.as_mut().unwrap();
        stdin.write_all(format!("{what}\n").as_bytes()).unwrap();
    }

    fn end(mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for the test's command, and returns it.
fn wait_for_go() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line
}

/// Run as a process of its own by the tests below.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn child_rank() {
    let Ok(words) = std::env::var("EGMEM_TEST_GROUP") else {
        return;
    };
    let words: Vec<_> = words.split(' ').collect();
    let (rank, size): (u32, u32) = (words[0].parse().unwrap(), words[1].parse().unwrap());
    let machine = Machine::preset(words[3]).unwrap();
    let driver = Driver::simulated(machine).unwrap();
    let address = words[2].parse().unwrap();
    let joined = Group::options("job", rank, size, address, secret(7))
        .memory(buffer(&driver, 1000 + u64::from(rank)))
        .map(Map::All)
        .deadline(LONG)
        .lease(LEASE)
        .join(&driver)
        .await;
    let mut group = match joined {
        Ok(group) => group,
        Err(error) => {
            println!("rank says {error}");
            return;
        }
    };
    for other in (0..size).filter(|other| *other != rank) {
        let memory = group.rank(other).unwrap();
        assert_eq!(memory.get::<u64>(0).unwrap(), 1000 + u64::from(other));
        memory
            .put(8 * (1 + u64::from(rank)), u64::from(rank))
            .unwrap();
    }
    println!("rank says joined by {}", group.via());
    tokio::task::spawn_blocking(wait_for_go).await.unwrap();
    if std::env::var_os("EGMEM_TEST_WATCH").is_some() {
        let state = tokio::time::timeout(LONG, group.changed()).await.unwrap();
        match state.server_lost {
            None => println!("rank says lost {:?}", state.lost),
            Some(error) => println!("rank says server: {error}"),
        }
    }
    match group.leave(LONG).await {
        Ok(own) => {
            let own = own.unwrap();
            let own = own.buffer().unwrap();
            for other in (0..u64::from(size)).filter(|other| *other != u64::from(rank)) {
                assert_eq!(own.get::<u64>(8 * (1 + other)).unwrap(), other);
            }
            println!("rank says left");
        }
        Err(
            error @ group::Error::Exchange(exchange::Error::Share(egmem::share::Error::PeerLost {
                ..
            })),
        ) => {
            println!("rank says {error}")
        }
        Err(error) => panic!("{error}"),
    }
}

fn exchange(machine: &str, via: HandleType) {
    let address = free_address().to_string();
    let mut ranks: Vec<_> = (0..8)
        .map(|rank| Rank::start(rank, 8, &address, machine))
        .collect();
    for rank in &mut ranks {
        assert_eq!(rank.says(), format!("joined by {via}"));
    }
    for rank in &mut ranks {
        rank.go();
    }
    for mut rank in ranks {
        assert_eq!(rank.says(), "left");
        rank.end();
    }
}

#[test]
fn eight_processes_by_fabric_handles() {
    exchange("gh200", HandleType::Fabric);
}

#[test]
fn eight_processes_by_fds() {
    exchange("gh200x4", HandleType::PosixFd);
}

#[test]
fn a_rank_that_is_killed_is_lost_to_the_others() {
    let address = free_address().to_string();
    let start = |rank| {
        let mut child = child(module_path!(), "child_rank");
        child.env("EGMEM_TEST_WATCH", "1");
        Rank::spawn(child, rank, 3, &address, "gh200")
    };
    let mut ranks: Vec<_> = (0..3).map(start).collect();
    for rank in &mut ranks {
        assert!(rank.says().starts_with("joined"));
    }
    // Its memory stays mapped by the others.
    drop(ranks.pop());
    for rank in &mut ranks {
        rank.go();
        assert_eq!(rank.says(), "lost [2]");
    }
    for mut rank in ranks {
        let word = rank.says();
        assert!(word.starts_with("rank 2 is lost"), "{word}");
        rank.end();
    }
}

#[test]
fn the_end_of_rank_0_is_the_servers() {
    let address = free_address().to_string();
    let start = |rank| {
        let mut child = child(module_path!(), "child_rank");
        child.env("EGMEM_TEST_WATCH", "1");
        Rank::spawn(child, rank, 2, &address, "gh200")
    };
    let mut first = start(0);
    let mut second = start(1);
    assert!(first.says().starts_with("joined"));
    assert!(second.says().starts_with("joined"));
    drop(first);
    second.go();
    let word = second.says();
    assert!(
        word.starts_with("server:") && word.contains("is lost"),
        "{word}"
    );
    let word = second.says();
    assert!(word.contains("is lost"), "{word}");
    second.end();
}

/// Gathers as long as the parent asks for it: run as a process of its own by the tests below.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn child_that_gathers() {
    let Ok(words) = std::env::var("EGMEM_TEST_GROUP") else {
        return;
    };
    let words: Vec<_> = words.split(' ').collect();
    let (rank, size): (u32, u32) = (words[0].parse().unwrap(), words[1].parse().unwrap());
    let driver = Driver::simulated(Machine::preset(words[3]).unwrap()).unwrap();
    let address = words[2].parse().unwrap();
    let group = Group::options("job", rank, size, address, secret(7))
        .deadline(LONG)
        .lease(LEASE)
        .join(&driver)
        .await
        .unwrap();
    println!("rank says joined");
    for round in 0.. {
        let what = tokio::task::spawn_blocking(wait_for_go).await.unwrap();
        let done = match what.trim() {
            "go" => group.barrier(LONG).await,
            "leave" => break,
            _ => gather(&group, &driver, round).await,
        };
        match done {
            Ok(()) => println!("rank says passed"),
            Err(error) => println!("rank says {error}"),
        }
    }
    let left = group.leave(LONG).await;
    println!("rank says left {}", left.is_ok());
}

/// Bytes and memory of all ranks are those that the ranks gave in this round.
async fn gather(group: &Group, driver: &Driver, round: u64) -> group::Result<()> {
    let mark = |rank: u32| 1000 * round + u64::from(rank);
    let own = group.own_rank();
    let bytes = group.gather(&mark(own).to_be_bytes(), LONG).await?;
    let memory = Some(buffer(driver, mark(own)).into());
    let memory = group.gather_memory(memory, LONG).await?;
    for (rank, bytes) in (0..group.size()).zip(bytes) {
        assert_eq!(bytes, mark(rank).to_be_bytes());
        assert_eq!(memory.rank(rank)?.get::<u64>(0)?, mark(rank));
    }
    drop(memory);
    group.barrier(LONG).await
}

/// Three ranks that gather when the parent asks for it.
fn gathering(machine: &str) -> Vec<Rank> {
    let address = free_address().to_string();
    let start = |rank| {
        let child = child(module_path!(), "child_that_gathers");
        Rank::spawn(child, rank, 3, &address, machine)
    };
    let mut ranks: Vec<_> = (0..3).map(start).collect();
    for rank in &mut ranks {
        assert_eq!(rank.says(), "joined");
    }
    ranks
}

fn gather_in_processes(machine: &str) {
    let mut ranks = gathering(machine);
    for what in ["go", "gather", "gather", "go", "gather", "leave"] {
        for rank in &mut ranks {
            rank.tell(what);
        }
        let says = if what == "leave" {
            "left true"
        } else {
            "passed"
        };
        for rank in &mut ranks {
            assert_eq!(rank.says(), says);
        }
    }
    for rank in ranks {
        rank.end();
    }
}

#[test]
fn processes_gather_by_fabric_handles() {
    gather_in_processes("gh200");
}

#[test]
fn processes_gather_by_fds() {
    gather_in_processes("gh200x4");
}

#[test]
fn a_rank_that_is_killed_ends_a_barrier_for_all_others() {
    // The rank that dies has entered, or has not: at the same time, since each waits for a lease.
    std::thread::scope(|scope| {
        for entered in [false, true] {
            scope.spawn(move || ends_a_barrier(entered));
        }
    });
}

fn ends_a_barrier(entered: bool) {
    let mut ranks = gathering("gh200");
    for rank in &mut ranks {
        rank.tell("gather");
    }
    for rank in &mut ranks {
        assert_eq!(rank.says(), "passed");
    }
    let mut last = ranks.pop().unwrap();
    ranks[0].tell("go");
    if entered {
        last.tell("go");
        // Long enough for it to enter; if not, there is less to see.
        std::thread::sleep(ms(500));
    }
    drop(last);
    assert_eq!(ranks[0].says(), "group job: rank 2 of 3 is missing");
    // The other rank gets the same error for the same call, and both get it for the next.
    for rank in [1, 0, 1] {
        ranks[rank].tell("go");
        assert_eq!(ranks[rank].says(), "group job: rank 2 of 3 is missing");
    }
    for rank in &mut ranks {
        rank.tell("leave");
    }
    for mut rank in ranks {
        assert_eq!(rank.says(), "left false");
        rank.end();
    }
}

#[test]
fn a_barrier_ends_with_the_server() {
    let mut ranks = gathering("gh200");
    ranks[1].tell("go");
    ranks[2].tell("go");
    std::thread::sleep(ms(300));
    drop(ranks.remove(0));
    for rank in &mut ranks {
        let word = rank.says();
        assert!(word.contains("is lost"), "{word}");
    }
}

/// Joins by hand and says so, then offers nothing: run as a process by the next test.
#[test]
fn child_that_only_joins() {
    let Ok(words) = std::env::var("EGMEM_TEST_GROUP") else {
        return;
    };
    let words: Vec<_> = words.split(' ').collect();
    let address = words[2].trim_start_matches("tcp://");
    let mut stream = loop {
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let hello = Hello {
        magic: MAGIC.into(),
        oldest: OLDEST,
        newest: VERSION,
        boot: BootId::current().unwrap(),
        fabric: true,
        resume: None,
        held: None,
        agent: String::new(),
        queues: false,
        moves: false,
    };
    write_frame(&mut stream, &encode(&hello));
    let greeting: Greeting = decode(&read_frame(&mut stream)).unwrap();
    assert!(matches!(greeting, Greeting::Welcome(_)), "{greeting:?}");
    let join = Join {
        group: "job".into(),
        rank: words[0].parse().unwrap(),
        size: words[1].parse().unwrap(),
        admission: Admission::Secret(Secret::new(&[7; 32]).unwrap()),
        can: vec![HandleType::Fabric],
        cannot: Vec::new(),
        memory: None,
        ms: 60_000,
    };
    let ask = Ask::Join(join);
    write_frame(&mut stream, &encode(&(1, ask)));
    let reply: FromServer = decode(&read_frame(&mut stream)).unwrap();
    println!("rank says {reply:?}");
    std::thread::sleep(LONG);
}

#[test]
fn a_rank_killed_between_joining_and_offering_fails_all_alike() {
    let address = free_address().to_string();
    let mut ranks: Vec<_> = (0..3)
        .map(|rank| Rank::start(rank, 4, &address, "gh200"))
        .collect();
    let mut bad = {
        let child = child(module_path!(), "child_that_only_joins");
        Rank::spawn(child, 3, 4, &address, "gh200")
    };
    let word = bad.says();
    assert!(word.contains("Agreed"), "{word}");
    drop(bad);
    let words: Vec<_> = ranks.iter_mut().map(Rank::says).collect();
    assert_eq!(words, vec!["group job: rank 3 of 4 is missing"; 3]);
    for rank in ranks {
        rank.end();
    }
}
