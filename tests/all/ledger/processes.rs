//! Ledgers of several processes: this program starts itself in the roles below.

use std::backtrace::Backtrace;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use egmem::driver::{Access, HandleTypes};
use egmem::kv::{Key, Tier};
use egmem::ledger::{Exporter, LEAKS, PS, Report};
use egmem::share::{Channel, ImportOptions, Listener, Peers, Shared};
use egmem::{Buffer, Driver};

use crate::ledger::{MIB, grace, node};

const ROLE: &str = "EGMEM_LEDGER_ROLE";
const DRIVER: &str = "EGMEM_LEDGER_DRIVER";
const SOCKET: &str = "EGMEM_LEDGER_SOCKET";

/// A process in a role, which ends when its standard input is closed.
struct Role {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// A private folder for sockets, and the variables that all roles get.
struct Scene {
    folder: tempfile::TempDir,
    driver: &'static str,
}

impl Scene {
    fn new(driver: &Driver) -> Self {
        let driver = if driver.is_simulated() {
            "simulated"
        } else {
            "cuda"
        };
        let folder = tempfile::tempdir().unwrap();
        Self { folder, driver }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("channel")
    }

    fn command(&self, role: &str) -> Command {
        let mut command = egmem_tests::child(module_path!(), "acts_in_its_role");
        command
            .env(ROLE, role)
            .env(DRIVER, self.driver)
            .env(SOCKET, self.socket())
            .env("XDG_RUNTIME_DIR", self.folder.path())
            .env_remove(PS)
            .env_remove(LEAKS);
        command
    }

    /// Starts a role and waits until it says that it is ready.
    fn start(&self, role: &str, variables: &[(&str, &str)]) -> Role {
        let mut command = self.command(role);
        command.envs(variables.iter().copied());
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut role = Role {
            child,
            input,
            output,
        };
        role.expect("ready");
        role
    }

    /// Returns the report of a process that asks all others.
    fn report(&self) -> Report {
        let output = self.command("asker").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let line = text.lines().find_map(|line| line.split_once("report "));
        let (_, json) = line.unwrap_or_else(|| panic!("{text}{:?}", output.stderr));
        serde_json::from_str(json).unwrap()
    }

    /// The sockets that are there.
    fn offers(&self) -> usize {
        match std::fs::read_dir(self.folder.path().join("egmem")) {
            Ok(files) => files.count(),
            Err(_) => 0,
        }
    }
}

impl Role {
    /// Reads on until a line contains `word`.
    fn expect(&mut self, word: &str) {
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            let bytes = self.output.read_line(&mut line).unwrap();
            assert!(bytes > 0, "it ended: {}", self.errors());
        }
    }

    fn errors(&mut self) -> String {
        let mut text = String::new();
        let errors = self.child.stderr.take();
        errors.map(|mut errors| errors.read_to_string(&mut text));
        text
    }

    /// Lets the process end, and returns its standard error.
    fn end(mut self) -> String {
        drop(self.input.take());
        let errors = self.errors();
        assert!(self.child.wait().unwrap().success(), "{errors}");
        errors
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Not a test of its own: the code of a process that was started in a role.
#[test]
fn acts_in_its_role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let driver = match std::env::var(DRIVER).as_deref() {
        Ok("cuda") => Driver::open().unwrap(),
        _ => grace(),
    };
    let socket = PathBuf::from(std::env::var_os(SOCKET).unwrap());
    match role.as_str() {
        "asker" => {
            let report = Report::gather(Some(&driver));
            println!("\nreport {}", serde_json::to_string(&report).unwrap());
        }
        "holder" => {
            let buffer = Buffer::on(node(&driver)).bytes(3 * MIB).label("held");
            let buffer = buffer.allocate(&driver).unwrap();
            wait();
            // As a program that loses a value: still there at the exit.
            std::mem::forget(buffer);
        }
        "parent" => {
            let hold = |driver| {
                let buffer = Buffer::on(node(driver)).bytes(MIB).label("held");
                std::mem::forget(buffer.allocate(driver).unwrap());
            };
            hold(&driver);
            // SAFETY: the child uses a driver of its own and exits.
            let child = unsafe { libc::fork() };
            if child == 0 {
                hold(&grace());
                std::process::exit(0);
            }
            let mut status = -1;
            // SAFETY: `status` is this function's own, and nothing else waits for the child.
            unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!(status, 0);
            wait();
        }
        "careful" => {
            let buffer = Buffer::on(node(&driver)).bytes(3 * MIB).label("held");
            let buffer = buffer.allocate(&driver).unwrap();
            wait();
            drop(buffer);
        }
        "engine" => {
            let memory = Buffer::on(node(&driver)).bytes(4 * MIB).label("cache");
            let memory = Arc::new(memory.allocate(&driver).unwrap());
            let tier = Tier::attach(memory).pages(8).page_bytes(4096);
            let tier = tier.open().unwrap();
            let keys = [1, 2, 3].map(|n| Key::new([n; 32]));
            tier.prepare_store(&keys).unwrap().commit().unwrap();
            tier.lookup(&keys);
            let load = tier.prepare_load(&keys[1..]).unwrap();
            wait();
            drop((load, tier));
        }
        "exporter" => export(&driver, &socket),
        "importer" => {
            let mut channel = Channel::connect(&socket, Peers::same_user()).unwrap();
            let options = ImportOptions::new().label("imported");
            let imported = channel.receive().unwrap().import(&driver, options).unwrap();
            wait();
            drop(imported);
        }
        other => panic!("no role {other}"),
    }
}

fn export(driver: &Driver, socket: &Path) {
    let buffer = Buffer::on(node(driver)).bytes(3 * MIB).label("exported");
    let buffer = buffer.handle_types(HandleTypes::POSIX_FD);
    let shared = Shared::from(buffer.allocate(driver).unwrap());
    let listener = Listener::bind(socket, Peers::same_user()).unwrap();
    println!("\nready");
    let mut channel = listener.accept().unwrap();
    channel.send(&shared, Access::ReadWrite).unwrap();
    wait();
}

/// Says that it is ready, and waits until its standard input is closed.
fn wait() {
    println!("\nready");
    std::io::stdout().flush().unwrap();
    let mut rest = String::new();
    std::io::stdin().read_to_string(&mut rest).unwrap();
}

pub fn a_process_is_seen_if_it_asks_for_it(driver: &Driver) {
    let scene = Scene::new(driver);
    let (seen, hidden) = (
        scene.start("holder", &[(PS, "1")]),
        scene.start("holder", &[]),
    );
    let report = scene.report();
    let pids: Vec<u32> = report
        .processes
        .iter()
        .map(|ledger| ledger.process.pid)
        .collect();
    assert!(
        pids.contains(&seen.child.id()) && !pids.contains(&hidden.child.id()),
        "{pids:?}"
    );
    let of = |ledger: &&egmem::ledger::Ledger| ledger.process.pid == seen.child.id();
    let ledger = report.processes.iter().find(of).unwrap();
    assert_eq!(ledger.allocations[0].label.as_deref(), Some("held"));
    assert_eq!(ledger.totals[0].own, 4 * MIB);
    let [gpu, ..] = &report.gpus[..] else {
        panic!("{report:?}")
    };
    assert!(gpu.total >= gpu.used);
    let home = report
        .nodes
        .iter()
        .find(|known| known.node == node(driver))
        .unwrap();
    assert!(home.accounted >= 4 * MIB, "{home:?}");

    // Both end by `exit`, with the socket's file removed.
    assert_eq!(scene.offers(), 1);
    seen.end();
    hidden.end();
    assert_eq!(scene.offers(), 0);
}

pub fn the_tiers_of_a_process_are_shown(driver: &Driver) {
    let scene = Scene::new(driver);
    let engine = scene.start("engine", &[(PS, "1")]);
    let holder = scene.start("holder", &[(PS, "1")]);
    let report = scene.report();
    let ledger = |pid| {
        let mut all = report.processes.iter();
        all.find(|ledger| ledger.process.pid == pid).unwrap()
    };
    assert!(ledger(holder.child.id()).tiers.is_empty());
    let ledger = ledger(engine.child.id());
    let [tier] = &ledger.tiers[..] else {
        panic!("{:?}", ledger.tiers)
    };
    assert_eq!(tier.label.as_deref(), Some("cache"));
    assert_eq!(tier.location, node(driver).into());
    assert_eq!(tier.address, ledger.allocations[0].mapped[0].start);
    assert_eq!(
        (tier.stats.pages, tier.stats.page_bytes, tier.stats.free),
        (8, 4096, 5)
    );
    assert_eq!(
        (tier.stats.ready, tier.stats.pinned, tier.stats.hits),
        (3, 2, 3)
    );
    let text = report.to_text();
    let lines = text.lines().skip_while(|line| *line != "KV-cache tiers:");
    let shown = lines.skip(2).take(1).any(|line| line.starts_with("cache"));
    assert!(shown, "{text}");
    engine.end();
    holder.end();
}

pub fn memory_of_a_dead_exporter_is_kept_by_its_importer(driver: &Driver) {
    let scene = Scene::new(driver);
    let exporter = scene.start("exporter", &[(PS, "1")]);
    let importer = scene.start("importer", &[(PS, "1")]);
    let (from, to) = (exporter.child.id(), importer.child.id());
    let kept = |report: &Report| {
        let mut kept = report.kept.clone();
        kept.retain(|kept| {
            kept.importers
                .iter()
                .any(|importer| importer.process.pid == to)
        });
        kept
    };
    assert_eq!(kept(&scene.report()), [], "its exporter has it");
    exporter.kill();
    let report = scene.report();
    let [memory] = &kept(&report)[..] else {
        panic!("{report:?}")
    };
    assert_eq!(
        (memory.bytes, memory.location),
        (4 * MIB, node(driver).into())
    );
    let Exporter::Ended(party) = &memory.exporter else {
        panic!("{memory:?}")
    };
    assert_eq!(party.pid, Some(from));
    assert_eq!(memory.importers[0].label.as_deref(), Some("imported"));
    // The killed process's socket is gone after it was looked at.
    assert_eq!(scene.offers(), 1);
    importer.end();
    assert_eq!(kept(&scene.report()), []);
}

pub fn what_is_left_at_the_exit_is_reported(driver: &Driver) {
    let scene = Scene::new(driver);
    let told = scene
        .start("holder", &[(LEAKS, "1"), ("EGMEM_BACKTRACES", "1")])
        .end();
    for word in [
        "still allocated at exit: 1 allocation, 4 MiB",
        "held",
        "processes.rs",
    ] {
        assert!(told.contains(word), "{word} in\n{told}");
    }
    // A stripped program has no names of functions.
    let here = Backtrace::force_capture().to_string();
    if here.contains("what_is_left_at_the_exit_is_reported") {
        assert!(told.contains("acts_in_its_role"), "{told}");
    }
    for (role, variables) in [("holder", &[(LEAKS, "0")]), ("careful", &[(LEAKS, "1")])] {
        let told = scene.start(role, variables).end();
        assert!(!told.contains("still allocated"), "{role}: {told}");
    }
    if driver.is_simulated() {
        // A forked child reports its own, once. The memory of its parent's other threads looks leaked there.
        let asan = std::env::var("ASAN_OPTIONS").unwrap_or_default() + ":detect_leaks=0";
        let variables = [(LEAKS, "1"), ("ASAN_OPTIONS", &asan)];
        let told = scene.start("parent", &variables).end();
        assert_eq!(told.matches("still allocated").count(), 2, "{told}");
    }
}
