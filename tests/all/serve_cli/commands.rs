//! `ls`, `fetch` and `delete` of a service on a Unix socket.

use rustix::process::Signal;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use crate::serve_cli::harness::{Service, USUAL, driver, names, stderr, stdout};
use egmem_tests::egmem;

#[test]
fn names_are_listed_fetched_written_and_read() {
    let service = Service::start(USUAL);
    assert_eq!(names(&service.ls()), ["scratch", "weights"]);
    let text = stdout(&service.run("ls", &["--prefix", "w"]));
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].starts_with("NAME"), "{text}");
    let row: Vec<_> = lines[1].split_whitespace().collect();
    assert_eq!(
        row,
        ["weights", "3", "MiB", "node", "0", "1", "r", "0", "@server"]
    );

    let (from, to) = (service.path("from"), service.path("to"));
    let bytes: Vec<u8> = (0..100_000_u32).map(|n| (n / 7) as u8).collect();
    std::fs::write(&from, &bytes).unwrap();
    let output = service.fetch(&["scratch", "--write", from.to_str().unwrap(), "--verify"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    for words in [
        "4.77 MiB",
        "by POSIX fd",
        "not proved: a POSIX fd names memory of this machine",
        "verified",
        "released",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(
        text.contains("simulated: no times"),
        !driver().is_empty(),
        "{text}"
    );
    // Another process finds them.
    let output = service.fetch(&["scratch", "--read", to.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let found = std::fs::read(&to).unwrap();
    assert_eq!(found.len(), 5_000_000);
    assert_eq!(&found[..bytes.len()], bytes);
    assert!(found[bytes.len()..].iter().all(|&byte| byte == 0));
    // Its user's alone, and never through a link.
    let mode = |file: &std::path::Path| file.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&to), 0o600);
    let link = to.with_file_name("link");
    std::os::unix::fs::symlink(&to, &link).unwrap();
    let output = service.fetch(&["scratch", "--read", link.to_str().unwrap()]);
    assert!(!output.status.success());
    let output = service.fetch(&["scratch", "--read", "-"]);
    assert!(output.stdout == found, "bytes alone on standard output");

    // Some may only be read.
    let output = service.fetch(&["weights"]);
    assert!(stdout(&output).contains("read-only"), "{}", stderr(&output));
    let output = service.fetch(&["weights", "--write", from.to_str().unwrap()]);
    let text = stderr(&output);
    assert!(
        !output.status.success() && text.contains("what to do"),
        "{text}"
    );
    let output = service.fetch(&["weights", "--read-only", "--via", "fd", "--verify"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let output = service.fetch(&["nothing"]);
    let text = stderr(&output);
    assert!(
        text.starts_with("error: ") && text.contains("; what to do: "),
        "{text}"
    );
    service.drained();
}

#[test]
fn memory_of_another_owner_size_or_node_is_not_taken() {
    let service = Service::start(USUAL);
    let fails = |args: &[&str], words: &str| {
        let output = service.fetch(args);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {text}");
        assert!(
            text.contains(words) && text.contains("what to do"),
            "{text}"
        );
    };
    let succeeds = |args: &[&str]| {
        let output = service.fetch(args);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    };
    let me = format!("uid:{}", rustix::process::geteuid().as_raw());
    let other = ["scratch", "--owner", "uid:4000000"];
    fails(&other, "its owner is @server, expected uid:4000000");
    succeeds(&["scratch", "--owner", "@server"]);
    let squatted = ["scratch", "--create", "--bytes", "5000000"];
    fails(&squatted, &format!("its owner is @server, expected {me}"));
    let mine = ["mine", "--create", "--bytes", "2MiB", "--node", "0"];
    succeeds(&mine);
    succeeds(&mine);
    succeeds(&["mine", "--owner", &me]);
    fails(
        &["mine", "--create", "--bytes", "1MiB"],
        "its size is 2 MiB",
    );
    assert_eq!(service.metric("egmem_leases"), 0);
    service.drained();
}

#[test]
fn quotas_hold() {
    let service = Service::start(USUAL);
    let create = |name: &str, bytes: &str| {
        let output = service.fetch(&[name, "--create", "--bytes", bytes]);
        (output.status.success(), stderr(&output))
    };
    assert!(create("a", "56MiB").0);
    let (done, text) = create("b", "8MiB");
    assert!(!done && text.contains("over the quota"), "{text}");
    assert!(create("b", "2MiB").0);
    assert!(create("c", "1").0);
    let (done, text) = create("d", "1");
    assert!(!done && text.contains("3 names"), "{text}");
    assert_eq!(service.metric("egmem_creations_refused_total"), 2);
    assert_eq!(names(&service.ls()), ["a", "b", "c", "scratch", "weights"]);
    let (done, text) = create("e", "0");
    assert!(!done, "{text}");
    service.drained();
}

#[test]
fn the_default_address_is_the_users_own_service() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("egmem")).unwrap();
    let config = USUAL.replace("unix:@/egmem.sock", "unix:@/egmem/egmem.sock");
    let service = Service::start_in(folder, &config, |_| {});
    let output = egmem(&["ls"])
        .env("XDG_RUNTIME_DIR", service.folder.path())
        .output()
        .unwrap();
    assert!(stdout(&output).contains("weights"), "{}", stderr(&output));
    service.drained();
}

#[test]
fn ps_shows_the_memory_of_a_service() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = tempfile::tempdir().unwrap();
    let service = Service::start_in(folder, USUAL, |command| {
        command.env("XDG_RUNTIME_DIR", runtime.path());
    });
    let ps = |args: &[&str]| {
        let mut command = egmem(&["ps"]);
        command
            .args(args)
            .args(driver())
            .env("XDG_RUNTIME_DIR", runtime.path());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output)
    };
    // Other tests' services offer theirs elsewhere.
    let own = |report: &Value| {
        let mut ledgers = report["processes"].as_array().unwrap().clone();
        ledgers.retain(|ledger| ledger["process"]["pid"] == service.running.id());
        ledgers
    };
    let report: Value = serde_json::from_str(&ps(&["--json"])).unwrap();
    let [ledger] = &own(&report)[..] else {
        panic!("{report}");
    };
    // Two buffers and the reserve, which is being filled.
    assert!(
        ledger["totals"][0]["own"].as_u64().unwrap() >= 8 << 20,
        "{ledger}"
    );
    assert_eq!(ledger["process"]["name"], "egmem");
    // A folder that others can access is left out, and named.
    let shared = runtime.path().join("egmem");
    std::fs::set_permissions(&shared, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    assert!(ps(&[]).contains("processes are missing"));
    std::fs::set_permissions(&shared, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    service.drained();
    assert_eq!(std::fs::read_dir(shared).unwrap().count(), 0);
}

#[test]
fn deletion_asks_the_holders_and_reports_the_result() {
    let service = Service::start(USUAL);
    let delete = |args: &[&str]| {
        let output = service.run("delete", args);
        (output.status.code(), stdout(&output), stderr(&output))
    };
    let mut holder = service.hold(&["mine", "--create", "--bytes", "2MiB"]);
    let (code, text, errors) = delete(&["mine", "--wait", "100"]);
    assert_eq!(
        (code, text.as_str()),
        (Some(0), "deleted mine\n"),
        "{errors}"
    );
    holder.line("being withdrawn");
    assert_eq!(holder.end().code(), Some(0));
    assert_eq!(names(&service.ls()), ["scratch", "weights"]);

    // A peer cannot delete a name that is gone, nor one that it did not create.
    for (name, why) in [
        ("mine", "created no such name"),
        ("weights", "configuration"),
    ] {
        let (code, _, errors) = delete(&[name]);
        assert_eq!(code, Some(1), "{errors}");
        assert!(
            errors.contains(why) && errors.contains("what to do"),
            "{errors}"
        );
    }

    // A stopped holder does not react: no other peer gets the memory, and the name is deleted later.
    let mut holder = service.hold(&["kept", "--create", "--bytes", "2MiB"]);
    assert_eq!(service.metric("egmem_owners"), 1);
    holder.stop();
    let (code, _, errors) = delete(&["kept", "--wait", "0"]);
    assert_eq!(code, Some(3), "{errors}");
    assert!(
        errors.contains("kept is still held by uid:") && errors.contains("what to do"),
        "{errors}"
    );
    let output = service.fetch(&["kept"]);
    assert!(!output.status.success(), "{}", stdout(&output));
    holder.signal(Signal::CONT);
    assert_eq!(holder.end().code(), Some(0));
    service.until("egmem_names", 2);
    service.until("egmem_owners", 0);
    assert_eq!(egmem(&["delete"]).output().unwrap().status.code(), Some(2));
    service.drained();
}

#[test]
fn a_reader_that_goes_away_ends_the_program_it_read() {
    let service = Service::start(USUAL);
    let mut fetch = egmem(&["fetch", &service.address(), "scratch", "--read", "-"]);
    fetch
        .args(driver())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut fetch = fetch.spawn().unwrap();
    drop(fetch.stdout.take());
    let output = fetch.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(service.metric("egmem_released_total"), 1);

    service.drained();
}

#[test]
fn without_an_address_and_a_service_it_says_where_it_looked() {
    let folder = tempfile::tempdir().unwrap();
    let output = egmem(&["ls"])
        .env("XDG_RUNTIME_DIR", folder.path())
        .output()
        .unwrap();
    // Unless the machine has one that is not ours.
    if !Path::new("/run/egmem/egmem.sock").exists() {
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(&*folder.path().to_string_lossy()), "{text}");
        assert!(text.contains("egmem serve"), "{text}");
    }
    // The working directory is none of the places.
    std::fs::create_dir(folder.path().join("egmem")).unwrap();
    std::fs::write(folder.path().join("egmem/egmem.sock"), "").unwrap();
    for (relative, address) in [("", "unix:egmem/"), (".", "unix:./egmem/")] {
        let mut command = egmem(&["ls"]);
        let command = command.env("XDG_RUNTIME_DIR", relative);
        let output = command.current_dir(folder.path()).output().unwrap();
        let text = stderr(&output);
        assert!(!text.contains(address), "{text}");
    }
}
