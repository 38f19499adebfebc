//! The holders of published memory, and whether a process of this machine still runs, which `/proc` tells: no fd is kept for it.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use egmem_core::host::ProcessStat;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::PeerName;
use crate::share::fd::has_ended;
use crate::transport::Connection;

/// The most bytes of a program's name.
const MAX_NAME: usize = 15;

/// The state of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HolderState {
    /// It holds the memory and is alive.
    Held,
    /// It has been asked to release the memory.
    Withdrawing,
    /// It fell silent, and its lease has ended: it may still have the memory mapped.
    Expired,
}

/// A holder of published memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The peer.
    pub peer: PeerName,
    /// The lease.
    pub lease: u64,
    /// When it got the lease.
    pub since: Instant,
    /// Its state.
    pub state: HolderState,
    /// Over a Unix socket: the process.
    pub process: Option<HolderProcess>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.process {
            Some(process) => write!(f, "{}, {process}", self.peer),
            None => self.peer.fmt(f),
        }
    }
}

/// Describes holders, for a message.
pub(super) fn describe(holders: &[Holder], more: usize) -> Vec<String> {
    const SHOWN: usize = 16;
    let now = Instant::now();
    let one = |holder: &Holder| {
        let seconds = now.saturating_duration_since(holder.since).as_secs_f32();
        match holder.state {
            HolderState::Expired => format!(
                "{holder} (for {seconds:.1} s; silent, its lease has ended: it may still have it mapped)"
            ),
            _ => format!("{holder} (for {seconds:.1} s)"),
        }
    };
    let mut list: Vec<_> = holders.iter().take(SHOWN).map(one).collect();
    let rest = holders.len().saturating_sub(SHOWN) + more;
    if rest > 0 {
        list.push(format!("{rest} more"));
    }
    list
}

/// A process of this machine that holds something, for display: after its end its number may be reused.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct HolderProcess {
    /// Its number in the server's PID namespace.
    pub pid: u32,
    /// The program's name, as the process reports it: at most 15 ASCII letters, digits and signs, `?` for
    /// others.
    pub program: Arc<str>,
    /// Its start, in ticks since the machine started: a later process with the same number has another.
    started: u64,
}

impl fmt::Display for HolderProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.program)
    }
}

impl HolderProcess {
    /// Returns the process at the other end of a Unix socket. `None` if it is not visible, or if it has ended since:
    /// another may have the socket now.
    pub(super) fn of_peer(connection: &mut Connection) -> Option<Self> {
        let pidfd = connection.process.take();
        let process = Self::of(connection.pid?)?;
        // While it runs its number is not reused.
        (!pidfd.as_ref().is_some_and(has_ended)).then_some(process)
    }

    /// Returns the process with that number now; `None` if `/proc` does not show it.
    pub(super) fn of(pid: u32) -> Option<Self> {
        let text = std::fs::read_to_string(path(pid)).ok()?;
        let stat = ProcessStat::parse(&text)?;
        Some(Self {
            pid,
            program: program(stat.name),
            started: stat.started,
        })
    }

    /// Returns one of many processes that do not exist.
    #[cfg(test)]
    pub(super) fn without(started: u32) -> Self {
        Self {
            pid: i32::MAX as u32,
            program: "".into(),
            started: started.into(),
        }
    }

    /// Returns whether it has certainly ended. If that cannot be found out, it counts as running.
    pub(super) fn has_ended(&self) -> bool {
        match std::fs::read_to_string(path(self.pid)) {
            Ok(text) => ProcessStat::parse(&text).is_some_and(|now| self.has_ended_by(&now)),
            // `/proc` may hide other users' processes (hidepid), and this one may have changed its user
            // since. A test signal finds all.
            Err(_) => self.is_unknown(),
        }
    }

    /// Returns whether no process has its number.
    fn is_unknown(&self) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
    }

    fn has_ended_by(&self, now: &ProcessStat<'_>) -> bool {
        now.has_ended() || now.started != self.started
    }
}

/// Returns a program's name, which the process chooses itself, for display.
fn program(name: &str) -> Arc<str> {
    let shown = |c: char| if matches!(c, ' '..='~') { c } else { '?' };
    let shown: String = name.chars().take(MAX_NAME).map(shown).collect();
    shown.into()
}

/// Returns the path for its first thread, which stands for the process: for `/proc/PID/stat` QEMU's user mode
/// invents one, with the start time of the thread that reads it.
fn path(pid: u32) -> String {
    format!("/proc/{pid}/task/{pid}/stat")
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    const LINE: &str = "42 (a) b (c)) S 1 42 42 0 -1 4194560 9 0 0 0 1 2 3 4 20 0 7 0 123456 8 9";

    fn process(pid: u32, started: u64) -> HolderProcess {
        HolderProcess {
            pid,
            started,
            ..HolderProcess::without(0)
        }
    }

    #[test]
    fn another_start_or_a_zombie_without_threads_has_ended() {
        let stat = ProcessStat::parse(LINE).unwrap();
        let process = process(42, 123_456);
        for (state, threads, started, ended) in [
            ('S', 7, 123_456, false),
            ('T', 7, 123_456, false),
            ('Z', 7, 123_456, false),
            ('Z', 1, 123_456, true),
            ('S', 7, 123_457, true),
        ] {
            let now = ProcessStat {
                state,
                threads,
                started,
                ..stat
            };
            assert_eq!(process.has_ended_by(&now), ended, "{now:?}");
        }
    }

    #[test]
    fn names_of_programs_can_be_printed() {
        for (own, name) in [
            ("a) b (c)", "a) b (c)"),
            ("a\u{1b}[2J\n\u{e9}", "a?[2J??"),
            ("0123456789abcdefgh", "0123456789abcde"),
            ("", ""),
        ] {
            assert_eq!(&*program(own), name);
        }
    }

    #[test]
    fn a_child_runs_until_it_has_ended() {
        let own = HolderProcess::of(std::process::id()).unwrap();
        assert!(!own.has_ended());
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let running = HolderProcess::of(child.id()).unwrap();
        assert!(!running.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(running.has_ended());
        // One whose number is reused.
        let before = process(own.pid, own.started - 1);
        assert!(before.has_ended());
    }

    #[test]
    fn a_process_that_proc_hides_is_not_taken_for_ended() {
        // Its own, and process 1, which belongs to another user: a signal could not be sent.
        for pid in [std::process::id(), 1] {
            let hidden = process(pid, 0);
            assert!(!hidden.is_unknown(), "{pid}");
        }
        for pid in [0, u32::MAX] {
            let none = process(pid, 0);
            assert!(!none.is_unknown(), "{pid} is no number of a process");
        }
        // Linux has at most 2^22.
        let none = HolderProcess::without(0);
        assert!(none.is_unknown() && none.has_ended());
    }
}
