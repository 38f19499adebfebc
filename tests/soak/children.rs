//! The client processes as their parent sees them: started again whenever one dies.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::journal::Journal;
use crate::role::{MARK, ROLE, Setup};
use crate::service::PATIENCE;

/// A client, through all processes that play it.
pub struct Member {
    pub setup: Setup,
    /// None between the rounds.
    process: Option<Process>,
    /// Whether the load is on: a process that takes a dead one's place then begins at once.
    load: bool,
    idle: bool,
    /// When it is continued, while it is stopped.
    stopped: Option<Instant>,
}

struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    /// Whether it was killed, or said that it kills itself.
    dying: bool,
}

impl Process {
    fn start(setup: &Setup) -> Self {
        let mut child = egmem_tests::child("", "child_process")
            .env(ROLE, serde_json::to_string(setup).expect("JSON"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("a process");
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().expect("piped"));
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // libtest may have begun the line.
                if let Some((_, line)) = line.split_once(MARK)
                    && sender.send(line.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        Self {
            stdin: child.stdin.take(),
            child,
            lines,
            dying: false,
        }
    }

    /// Closes its standard input, which ends it, and waits.
    fn end(mut self) -> Result<(), String> {
        drop(self.stdin.take());
        let child = &mut self.child;
        let end = Instant::now() + PATIENCE;
        loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(10)),
                status => return Err(format!("{status:?}")),
            }
        }
    }

    fn tell(&mut self, word: &str) {
        // One that has died meanwhile is noticed at the next look.
        if let Some(stdin) = &mut self.stdin {
            let _ = writeln!(stdin, "{word}").and_then(|()| stdin.flush());
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Member {
    pub fn new(setup: Setup) -> Self {
        Self {
            process: None,
            setup,
            load: false,
            idle: true,
            stopped: None,
        }
    }

    /// Begins with the load, in a new process.
    pub fn load(&mut self) {
        self.load = true;
        self.begin();
    }

    fn begin(&mut self) {
        self.setup.seed = self.setup.seed.wrapping_add(0x9e37_79b9);
        let mut process = Process::start(&self.setup);
        process.tell("load");
        if !self.load {
            // It has to clear the remains of the process before it.
            process.tell("pause");
        }
        self.idle = false;
        self.process = Some(process);
    }

    /// Ends the process, which is idle, so that the service drops its records of the process.
    pub fn end(&mut self, journal: &Journal) {
        let Some(process) = self.process.take() else {
            return;
        };
        if let Err(error) = process.end() {
            journal.violation(format!("{} does not end: {error}", self.setup.name));
        }
    }

    /// Asks for a pause: [`is_idle`](Self::is_idle) once everything was given back.
    pub fn pause(&mut self) {
        self.resume();
        self.load = false;
        self.tell("pause");
    }

    fn tell(&mut self, word: &str) {
        if let Some(process) = &mut self.process {
            process.tell(word);
        }
    }

    pub fn is_idle(&self) -> bool {
        self.idle
    }

    /// Ends the process at once; the next [`look`](Self::look) replaces it.
    pub fn kill(&mut self, journal: &Journal) {
        if let Some(process) = &mut self.process {
            process.dying = true;
            let _ = process.child.kill();
            journal.count("client killed: anywhere");
        }
    }

    /// Stops the process for a while.
    pub fn stop(&mut self, duration: Duration, journal: &Journal) {
        if self.stopped.is_none() {
            self.stopped = Some(Instant::now() + duration);
            self.signal(Signal::STOP);
            journal.count("client stopped");
        }
    }

    fn resume(&mut self) {
        if self.stopped.take().is_some() {
            self.signal(Signal::CONT);
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(process) = &self.process {
            let _ = kill_process(Pid::from_child(&process.child), signal);
        }
    }

    /// Reads the lines of the process, continues it when its stop is over, and replaces it if it died.
    pub fn look(&mut self, journal: &Journal) {
        if self.stopped.is_some_and(|until| until <= Instant::now()) {
            self.resume();
        }
        while let Some(process) = &self.process {
            match process.lines.try_recv() {
                Ok(line) => self.hear(&line, journal),
                Err(TryRecvError::Empty) => break,
                // Its output is closed: it ends, if it has not ended yet.
                Err(TryRecvError::Disconnected) => return self.replace(journal),
            }
        }
    }

    fn hear(&mut self, line: &str, journal: &Journal) {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "dying" => {
                if let Some(process) = &mut self.process {
                    process.dying = true;
                }
                journal.count(format!("client killed: {rest}"));
            }
            "violation" => journal.violation(format!("{}: {rest}", self.setup.name)),
            "idle" => {
                self.idle = !self.load;
                let counts: BTreeMap<String, u64> =
                    serde_json::from_str(rest).expect("a client's counts");
                for (what, count) in counts {
                    journal.add(what, count);
                }
            }
            _ => {}
        }
    }

    fn replace(&mut self, journal: &Journal) {
        let Some(mut process) = self.process.take() else {
            return;
        };
        let status = process.child.wait();
        if !process.dying {
            journal.violation(format!("{} ended: {status:?}", self.setup.name));
        }
        self.stopped = None;
        self.begin();
    }
}
