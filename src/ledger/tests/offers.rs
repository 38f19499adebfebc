//! Ledgers that are offered, and processes that are asked for theirs.

use std::path::Path;
use std::sync::MutexGuard;
use std::time::Duration;

use super::*;
use crate::Process;
use crate::ask::Found;
#[cfg(not(miri))]
use crate::fork_check::in_a_child;
use crate::offer::{encode, offer_in, offer_in_one_of};
use crate::procs::tests::alone;
use crate::{Ledger, Silent};

/// Longer than any test.
const LONG: Duration = Duration::from_secs(3600);

/// Far more entries than other tests have meanwhile: one test at a time.
struct Many {
    _entries: Vec<Entry>,
    _alone: MutexGuard<'static, ()>,
}

impl Many {
    fn of(driver: &Driver) -> Self {
        let alone = alone();
        let entries = (0..2000).map(|_| entry(driver, AllocPath::Pinned, Location::Host, 1));
        Self {
            _entries: entries.collect(),
            _alone: alone,
        }
    }
}

fn ask(folder: &Path) -> (Vec<Ledger>, Vec<Silent>) {
    let mut found = Found::new(64 << 20);
    found.look_in(folder).unwrap();
    (found.ledgers, found.silent)
}

fn folder() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;

    let mode = PermissionsExt::from_mode(0o700);
    tempfile::Builder::new()
        .permissions(mode)
        .tempdir()
        .unwrap()
}

fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn a_ledger_is_offered_until_the_offer_ends() {
    let (driver, folder) = (machine(), folder());
    let kept = buffer(&driver, "offered <1>", 3 * MIB);
    let offer = offer_in(folder.path(), LONG).unwrap();
    for _ in 0..3 {
        let (ledgers, silent) = ask(folder.path());
        assert!(silent.is_empty(), "{silent:?}");
        let [ledger] = &ledgers[..] else {
            panic!("{ledgers:?}")
        };
        assert_eq!(ledger.process, Process::current());
        let mut entries = ledger.allocations.iter();
        let entry = entries.find(|entry| entry.label.as_deref() == Some("offered <1>"));
        assert_eq!(entry.unwrap().bytes, 4 * MIB);
    }
    assert_eq!(files(folder.path()), 1);
    drop(offer);
    assert_eq!(files(folder.path()), 0);
    assert_eq!(ask(folder.path()), (Vec::new(), Vec::new()));
    drop(kept);
}

#[test]
fn all_ledgers_together_are_bounded() {
    let folder = folder();
    let driver = machine();
    let entries = Many::of(&driver);
    let own = encode(Ledger::of(&driver), usize::MAX).unwrap().len();
    let offers = [(); 3].map(|()| offer_in(folder.path(), LONG).unwrap());
    // Room for one ledger, not for two.
    let mut found = Found::new(own * 3 / 2);
    found.look_in(folder.path()).unwrap();
    assert_eq!((found.ledgers.len(), found.silent.len()), (1, 2));
    assert!(
        found.silent[0].why.starts_with("not asked: the limit of"),
        "{:?}",
        found.silent
    );
    drop(entries);
    drop(offers);
}

#[test]
fn processes_are_asked_at_once() {
    use std::sync::{Arc, Barrier};

    use egmem_share::{Listener, Peers};

    let folder = folder();
    let both_asked = Arc::new(Barrier::new(2));
    let answers = [1, 2].map(|n| {
        let path = folder.path().join(format!("ps-{n}-00.sock"));
        let listener = Listener::bind(path, Peers::same_user()).unwrap();
        let both_asked = Arc::clone(&both_asked);
        std::thread::spawn(move || {
            let mut channel = listener.accept().unwrap();
            both_asked.wait();
            let text = encode(Ledger::of(&machine()), usize::MAX).unwrap();
            channel.send_text(&text).unwrap();
        })
    });
    let (ledgers, silent) = ask(folder.path());
    assert_eq!((ledgers.len(), silent), (2, Vec::new()));
    for answer in answers {
        answer.join().unwrap();
    }
}

#[test]
fn a_dead_processs_socket_is_removed_and_a_mute_one_is_named() {
    use std::os::unix::net::UnixListener;

    let (folder, _alone) = (folder(), alone());
    let pid = std::process::id();
    // As after a crash: the file exists, and no process listens.
    let dead = folder.path().join(format!("ps-{}-00.sock", u32::MAX));
    drop(UnixListener::bind(&dead).unwrap());
    let starting = folder.path().join(format!("ps-{pid}-00.sock"));
    drop(UnixListener::bind(&starting).unwrap());
    std::fs::write(folder.path().join("other"), "").unwrap();
    let (ledgers, silent) = ask(folder.path());
    assert!(ledgers.is_empty() && !dead.exists() && starting.exists());
    let [one] = &silent[..] else {
        panic!("{silent:?}")
    };
    assert_eq!((one.pid, &one.path), (Some(pid), &starting));

    std::fs::remove_file(&starting).unwrap();
    let mute = UnixListener::bind(&starting).unwrap();
    let answers = std::thread::spawn(move || {
        use std::io::Write;
        // No frame: a length beyond the largest.
        mute.accept().unwrap().0.write_all(&[0xff; 64]).unwrap();
    });
    let (_, silent) = ask(folder.path());
    answers.join().unwrap();
    assert!(silent[0].why.contains("a frame of"), "{silent:?}");
}

#[test]
fn only_an_own_folder_is_read() {
    use std::os::unix::fs::PermissionsExt;

    let folder = folder();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o770)).unwrap();
    assert!(Found::new(1).look_in(folder.path()).is_err());
    let none = folder.path().join("none");
    assert!(Found::new(1).look_in(&none).is_ok());
}

#[test]
fn a_place_where_no_socket_can_be_made_is_skipped() {
    let (long, good) = (folder(), folder());
    // Usable, but too long for a socket's address.
    let long = long.path().join("x".repeat(100));
    let offer = offer_in_one_of([long.clone(), good.path().into()]).unwrap();
    assert!(offer.path().starts_with(good.path()), "{offer:?}");
    assert!(long.is_dir());
    let error = offer_in_one_of([long]).unwrap_err().to_string();
    assert!(error.contains("xxx"), "{error}");
}

/// The kernel keeps no more connections for it.
#[test]
fn a_stopped_process_is_named() {
    use std::os::unix::net::{UnixListener, UnixStream};

    let folder = folder();
    let path = folder
        .path()
        .join(format!("ps-{}-00.sock", std::process::id()));
    let stopped = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&stopped, 0).unwrap();
    let _waits = UnixStream::connect(&path).unwrap();
    let (ledgers, silent) = ask(folder.path());
    assert!(ledgers.is_empty());
    let why = &silent[0].why;
    assert!(why.contains("connecting to") && why.contains("1s"), "{why}");
}

#[test]
fn an_offer_ends_while_a_process_reads_nothing() {
    use std::os::unix::net::UnixStream;

    let folder = folder();
    let driver = machine();
    // More than a socket's buffer keeps.
    let entries = Many::of(&driver);
    // Longer than any test may take.
    let offer = offer_in(folder.path(), LONG).unwrap();
    let reader = UnixStream::connect(offer.path()).unwrap();
    // The first bytes show that it answers.
    let bytes = || rustix::io::ioctl_fionread(&reader).unwrap();
    while bytes() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(offer);
    assert_eq!(files(folder.path()), 0);
    drop((reader, entries));
}

/// The socket and its thread are the parent's.
#[cfg(not(miri))]
#[test]
fn a_forked_child_leaves_its_parents_offer_alone() {
    let (folder, _alone) = (folder(), alone());
    let offer = offer_in(folder.path(), LONG).unwrap();
    let offer = std::cell::Cell::new(Some(offer));
    assert!(in_a_child(|| offer.take().is_some()));
    let offer = offer.into_inner().unwrap();
    assert!(offer.path().exists());
    let (ledgers, silent) = ask(folder.path());
    assert_eq!((ledgers.len(), silent), (1, Vec::new()));
    assert_eq!(ledgers[0].process, Process::current());
}
