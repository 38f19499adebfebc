//! A second signal ends `egmem serve`, even if a driver call never returns.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};

use egmem_tests::egmem;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::serve_cli::harness::Running;
use crate::stub_driver::harness::{Installed, cuda};

/// A service that finds a stub, and the folder that it lives in; `None` without a C compiler.
fn serve(
    installed: &Installed,
    more: impl FnOnce(&mut Command, &Path),
) -> Option<(Running, TempDir)> {
    let folder = tempfile::tempdir().unwrap();
    if !installed.install(folder.path()) {
        eprintln!("SKIPPED: there is no C compiler");
        return None;
    }
    let file = folder.path().join("egmem.toml");
    let socket = folder.path().join("egmem.sock");
    let text = format!("listen = [\"unix:{}\"]\n", socket.display());
    std::fs::write(&file, text).unwrap();
    let mut command = egmem(&["serve", "--config", file.to_str().unwrap()]);
    installed.show(folder.path(), &mut command);
    more(&mut command, folder.path());
    Some((Running::start(command), folder))
}

/// Ended by a second signal; on a slow machine the end itself may take the second that it has.
fn at_once(status: ExitStatus, signal: Signal) -> bool {
    status.code() == Some(128 + signal.as_raw()) || status.signal() == Some(Signal::KILL.as_raw())
}

#[test]
#[cfg_attr(
    egmem_slow,
    ignore = "ThreadSanitizer delivers signals only to code that was built with it"
)]
fn in_a_start_that_hangs() {
    let Some((mut running, _folder)) = serve(&cuda().set("STUB_HANG", "cuInit"), |_, _| {}) else {
        return;
    };
    running.line("the stub hangs: cuInit");
    // Two pending signals of the same kind would merge. The kernel decides which of these two arrives first.
    running.signal(Signal::TERM);
    running.signal(Signal::INT);
    let line = running.line("error: ended at once by a second ");
    let (name, what) = line.split_once(": ").unwrap();
    assert_eq!(what, "memory created so far was not given back");
    let signal = match name {
        "SIGTERM" => Signal::TERM,
        "SIGINT" => Signal::INT,
        _ => panic!("{line}"),
    };
    let status = running.end();
    assert!(at_once(status, signal), "{status}");
}

/// A driver's library may also hang in its work at the end of a process. The stub is loaded beside the
/// simulator: it has no memory for a service.
#[test]
#[cfg_attr(
    egmem_slow,
    ignore = "ThreadSanitizer delivers signals only to code that was built with it"
)]
fn where_a_library_hangs_at_the_end() {
    let installed = cuda().set("STUB_HANG", "at the end");
    let simulated = |command: &mut Command, folder: &Path| {
        command.args(["--sim", "gh200"]);
        command.env("LD_PRELOAD", folder.join("libcuda.so.1"));
    };
    let Some((mut running, _folder)) = serve(&installed, simulated) else {
        return;
    };
    running.line("ready");
    running.signal(Signal::TERM);
    running.line("the stub hangs: at the end");
    running.signal(Signal::INT);
    running.line("error: ended at once by a second SIGINT: a driver call was not waited for");
    assert_eq!(running.end().signal(), Some(Signal::KILL.as_raw()));
}
