//! The soak from its start to its verdict.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::chaos::Cast;
use crate::children::Member;
use crate::hostile::{Arms, Hostile, Target};
use crate::journal::{Journal, say};
use crate::measure::Look;
use crate::plan::Plan;
use crate::proxy::Proxy;
use crate::role::{Kind, Setup};
use crate::service::{PATIENCE, Service};
use crate::table::{Row, Table};
use crate::trend::Trend;
use egmem_tests::pki::{Files, Pki};

/// How far resident bytes of a service's own may lie above its first quiesced point.
const TOLERANCE: u64 = 24 << 20;

/// A slope of at most so many bytes an hour is no trend, in runs of many rounds.
const GROWTH: f64 = 4.0 * 1024.0 * 1024.0;

/// Runs the soak.
///
/// # Panics
/// If anything was found.
pub fn soak() {
    let plan = Plan::from_env();
    say(&format!(
        "soak of {:?} on the simulator, EGMEM_SOAK_SEED={}",
        plan.total, plan.seed
    ));
    let journal = Arc::new(Journal::default());
    let folder = tempfile::tempdir().expect("a folder");
    let mut rng = Rng::with_seed(plan.seed);
    let mut cast = cast(folder.path(), &mut rng, &journal);
    let mut table = Table::new(plan.out.as_deref());
    let start = Instant::now();
    let baselines = [&cast.steady, &cast.restarted].map(|service| baseline(service, &mut table));
    loop {
        cast.load(&mut rng, Instant::now() + plan.load, &journal);
        let late = start.elapsed().saturating_sub(plan.total);
        let last = start.elapsed() + plan.load > plan.total
            && (missing(&journal).is_empty() || late > PATIENCE);
        quiesce(&mut cast, &journal);
        let idle_threads = last || !plan.is_short();
        for (service, baseline) in [&cast.steady, &cast.restarted].into_iter().zip(&baselines) {
            let look = settle(service, baseline, idle_threads, &journal);
            table.add(Row {
                seconds: start.elapsed().as_secs_f64(),
                service: service.name,
                life: service.lives,
                look,
            });
        }
        if last || !journal.violations().is_empty() {
            break;
        }
    }
    verdict(&table, &journal, &plan);
}

/// Returns the events that a soak must see at least once, and has not seen yet. A busy machine may need more than one
/// round.
fn missing(journal: &Journal) -> Vec<&'static str> {
    let mut all = vec!["create", "checked: Good", "release", "attack"];
    all.retain(|what| journal.counted(what) == 0);
    all
}

/// Addresses of the loopback network that no other run uses.
fn host() -> Ipv4Addr {
    let [_, a, b, c] = (std::process::id() << 2).to_be_bytes();
    Ipv4Addr::new(127, a | 0x40, b, c | 1)
}

fn free_port(host: Ipv4Addr) -> String {
    let listener = std::net::TcpListener::bind((host, 0)).expect("a port");
    listener.local_addr().expect("an address").to_string()
}

fn cast(folder: &std::path::Path, rng: &mut Rng, journal: &Arc<Journal>) -> Cast {
    let host = host();
    let pki = Pki::new(folder, "ca");
    let other = Pki::new(folder, "other");
    let name = host.to_string();
    let files = pki.issue_for("service.test", &["service.test", &name], |_| ());
    let service = |name| {
        let tcp = free_port(host);
        Service::start(name, &tcp, folder, files.clone(), Arc::clone(journal))
    };
    let (steady, restarted) = (service("steady"), service("restarted"));
    let proxy = Proxy::start(host, steady.tcp.clone());
    let (alice, bob) = (pki.issue("alice.test"), pki.issue("bob.test"));
    let members = setups(&steady, &restarted, &proxy, &alice, &bob);
    let members = members.into_iter().map(|mut setup| {
        setup.seed = rng.u64(..);
        Member::new(setup)
    });
    Cast {
        members: members.collect(),
        arms: Arms::new(&pki, &other),
        steady,
        restarted,
        proxy,
    }
}

fn setups(
    steady: &Service,
    restarted: &Service,
    proxy: &Proxy,
    alice: &Files,
    bob: &Files,
) -> Vec<Setup> {
    let client =
        |name: &str, kind: Kind, driver: &str, address: String, files: Option<&Files>| Setup {
            name: name.into(),
            kind,
            seed: 0,
            driver: driver.into(),
            address,
            files: files.cloned(),
        };
    let unix = |service: &Service| format!("unix:{}", service.unix().display());
    let tcp = |address: &str| format!("tcp://{address}");
    let worker = || Kind::Worker;
    vec![
        client("soak-unix", worker(), "gh200", unix(steady), None),
        client(
            "soak-cut",
            worker(),
            "gh200",
            tcp(&proxy.address),
            Some(alice),
        ),
        client("soak-tls", worker(), "gh200", tcp(&steady.tcp), Some(bob)),
        client("soak-unix2", worker(), "gh200", unix(restarted), None),
        client(
            "soak-tls2",
            worker(),
            "gh200",
            tcp(&restarted.tcp),
            Some(alice),
        ),
    ]
}

/// A service that has just started and was never used.
fn baseline(service: &Service, table: &mut Table) -> Look {
    let end = Instant::now() + PATIENCE;
    let mut before = Look::default();
    let look = loop {
        let look = Look::at(service).expect("the service runs");
        // The configured buffers were taken from the reserve, which is filled again. A thread that has just
        // started does not have its name yet, and would be counted as another kind of thread.
        if look.gauge("reserve_bytes") >= look.gauge("reserve_target_bytes")
            && (look.threads, look.fds) == (before.threads, before.fds)
        {
            break look;
        }
        before = look;
        assert!(Instant::now() < end, "{} fills no reserve", service.name);
        std::thread::sleep(Duration::from_millis(50));
    };
    table.add(Row {
        seconds: 0.0,
        service: service.name,
        life: service.lives,
        look: look.clone(),
    });
    look
}

/// Has all clients give everything back, and ends their processes: a service remembers the memory of a
/// silent process as long as that lives.
fn quiesce(cast: &mut Cast, journal: &Journal) {
    for member in &mut cast.members {
        member.pause();
    }
    let end = Instant::now() + PATIENCE;
    while !cast.members.iter().all(Member::is_idle) {
        for member in &mut cast.members {
            member.look(journal);
        }
        if Instant::now() > end {
            let busy = cast.members.iter().filter(|member| !member.is_idle());
            let busy: Vec<_> = busy.map(|member| &member.setup.name).collect();
            journal.violation(format!("no pause of {busy:?}"));
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    for member in &mut cast.members {
        member.end(journal);
    }
    let hostile = Hostile {
        rng: Rng::new(),
        arms: &cast.arms,
        journal,
    };
    for service in [&cast.steady, &cast.restarted] {
        let target = Target::of(service);
        while hostile.clean(&target).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

/// Waits until a service is as in its baseline.
fn settle(service: &Service, baseline: &Look, idle_threads: bool, journal: &Journal) -> Look {
    let end = Instant::now() + PATIENCE;
    loop {
        let (look, why) = match Look::at(service) {
            Ok(look) => {
                let why = look.differs(baseline, idle_threads);
                (look, why)
            }
            Err(error) => (Look::default(), Some(error.to_string())),
        };
        let Some(why) = why else {
            return look;
        };
        if Instant::now() > end {
            journal.violation(format!(
                "{name}'s log and open files:\n{}\n{}{name} does not return to its baseline: {why}",
                service.log(),
                Look::open_files(service.pid()),
                name = service.name,
            ));
            return look;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn verdict(table: &Table, journal: &Journal, plan: &Plan) {
    say("\nwhat happened, summed over all rounds:");
    say(&journal.summary());
    for service in ["steady", "restarted"] {
        // The first row is of a service that was never used.
        let used: Vec<_> = table.of(service).skip(1).collect();
        let Some(first) = used.first() else { continue };
        for row in &used {
            let most = first.look.anonymous + TOLERANCE;
            if row.look.anonymous > most {
                journal.violation(format!(
                    "{service}: {} resident bytes of its own after {:.0} s, {} at first",
                    row.look.anonymous, row.seconds, first.look.anonymous
                ));
            }
        }
        // The first quarter warms up: threads' arenas, tables that keep their room.
        let points: Vec<_> = used[used.len() / 4..]
            .iter()
            .map(|row| (row.seconds, row.look.anonymous as f64))
            .collect();
        let Some(trend) = Trend::of(&points) else {
            continue;
        };
        say(&format!(
            "{service}: resident bytes of its own: {:+.0} ± {:.0} KiB an hour over {} points",
            trend.per_hour / 1024.0,
            trend.error / 1024.0,
            points.len()
        ));
        if points.len() >= 20 && trend.per_hour - 2.0 * trend.error > GROWTH {
            journal.violation(format!("{service}: its own resident bytes grow"));
        }
    }
    for what in missing(journal) {
        journal.violation(format!("in all the time not once: {what}"));
    }
    let violations = journal.violations();
    assert!(
        violations.is_empty(),
        "EGMEM_SOAK_SEED={}:\n{}",
        plan.seed,
        violations.join("\n")
    );
    say("no violation");
}
