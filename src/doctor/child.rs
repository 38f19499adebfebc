//! One child process. Its input and output are files in memory, which it can neither fill nor keep the parent waiting at.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Take};
use std::mem;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use egmem_core::doctor::Libraries;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::children::Problem;
use crate::probe::{LIBRARIES, MARK};

/// How often the parent looks whether the child has said something or ended.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// More than this a child must not write to one of its outputs, in bytes.
const MOST: u64 = 16 << 20;

/// A running child; if it still runs when dropped, it is killed.
pub(crate) struct Guarded {
    child: Child,
    /// How long the child may take for each answer and to exit.
    patience: Duration,
    stdout: Output,
    stderr: Output,
    libraries: Libraries,
    /// The last line of its messages.
    last_words: String,
}

impl Guarded {
    /// Starts a child that is to answer the questions.
    pub(crate) fn start(
        command: &[OsString],
        questions: &[impl Serialize],
        patience: Duration,
    ) -> Result<Self, Problem> {
        let not_started = |why: String| Problem::Died(format!("it could not be started: {why}"));
        let of_file = |error: io::Error| not_started(error.to_string());
        let (program, args) = command
            .split_first()
            .ok_or_else(|| not_started("no command".into()))?;
        let input =
            serde_json::to_vec(questions).map_err(|error| not_started(error.to_string()))?;
        let stdin = in_memory().map_err(of_file)?;
        stdin.write_all_at(&input, 0).map_err(of_file)?;
        let (stdout, of_stdout) = Output::new().map_err(of_file)?;
        let (stderr, of_stderr) = Output::new().map_err(of_file)?;
        let child = Command::new(program)
            .args(args)
            .stdin(stdin)
            .stdout(of_stdout)
            .stderr(of_stderr)
            .spawn()
            .map_err(|error| not_started(format!("{}: {error}", program.display())))?;
        Ok(Self {
            child,
            patience,
            stdout,
            stderr,
            libraries: Libraries::default(),
            last_words: String::new(),
        })
    }

    /// Waits for the next answer of this type.
    pub(crate) fn next<A: DeserializeOwned>(&mut self) -> Result<A, Problem> {
        let start = Instant::now();
        loop {
            // First, so that all that it has written is read if it has ended.
            let ended = self.look()?;
            while let Some(line) = self.stdout.line(ended.is_some()) {
                if let Some(Ok(told)) = line.strip_prefix(LIBRARIES).map(serde_json::from_str) {
                    self.libraries = told;
                }
                match line.strip_prefix(MARK).map(serde_json::from_str) {
                    Some(Ok(answer)) => return Ok(answer),
                    // Libraries may print the same prefix.
                    Some(Err(error)) => tracing::info!(%error, "a child says: {line}"),
                    None => {}
                }
            }
            match ended {
                Some(status) => return Err(self.died(status)),
                None => self.wait_since(start)?,
            }
        }
    }

    /// Sets how long the child may take for each further answer and to exit.
    pub(crate) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Returns the child's libraries, once it has [answered](Self::next) or ended.
    pub(crate) fn libraries(&self) -> Libraries {
        self.libraries.clone()
    }

    /// Waits for the exit, but not forever.
    pub(crate) fn end(&mut self) -> Result<ExitStatus, Problem> {
        let start = Instant::now();
        loop {
            match self.look()? {
                Some(status) => return Ok(status),
                None => self.wait_since(start)?,
            }
        }
    }

    /// Waits until the next look, but not longer than is left of the patience.
    fn wait_since(&self, start: Instant) -> Result<(), Problem> {
        if start.elapsed() > self.patience {
            return Err(Problem::Hung(self.patience));
        }
        thread::sleep(LOOK_EVERY);
        Ok(())
    }

    /// Returns the status of a child that has ended. Logs its messages, and keeps the last one.
    fn look(&mut self) -> Result<Option<ExitStatus>, Problem> {
        let lost = |error| Problem::Died(format!("it was lost: {error}"));
        let status = self.child.try_wait().map_err(lost)?;
        while let Some(line) = self.stderr.line(status.is_some()) {
            if !line.is_empty() {
                tracing::info!("a child says: {line}");
                self.last_words = line.chars().take(200).collect();
            }
        }
        if status.is_none() && (self.stdout.is_full() || self.stderr.is_full()) {
            return Err(Problem::Died(format!("it wrote more than {MOST} bytes")));
        }
        Ok(status)
    }

    /// Says how a child died that [has ended](Self::end).
    pub(crate) fn died(&self, status: ExitStatus) -> Problem {
        let mut how = match status.signal() {
            Some(signal) => format!("killed by {}", signal_name(signal)),
            None => status.to_string(),
        };
        if !self.last_words.is_empty() {
            how = format!("{how}: {}", self.last_words);
        }
        Problem::Died(how)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.child.kill().ok();
            // A child that the kernel's driver does not let go cannot be waited for.
            self.end().ok();
        }
    }
}

/// One of a child's outputs.
struct Output {
    /// Has a position of its own: the child and what it starts share another.
    written: BufReader<Take<File>>,
    /// The start of a line of which the rest is not written yet.
    line: Vec<u8>,
}

impl Output {
    /// Returns an empty output, and the file that the child writes.
    fn new() -> io::Result<(Self, File)> {
        let file = in_memory()?;
        let written = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?.take(MOST);
        let (written, line) = (BufReader::new(written), Vec::new());
        Ok((Self { written, line }, file))
    }

    /// Returns the next line; once the child has `ended`, also a last one without an end.
    fn line(&mut self, ended: bool) -> Option<String> {
        self.written.read_until(b'\n', &mut self.line).ok()?;
        let whole = self.line.ends_with(b"\n") || (ended && !self.line.is_empty());
        whole.then(|| {
            let line = mem::take(&mut self.line);
            String::from_utf8_lossy(&line).trim_end().to_owned()
        })
    }

    /// Whether no more of it is read.
    fn is_full(&self) -> bool {
        self.written.get_ref().limit() == 0
    }
}

/// Returns an empty file in memory.
fn in_memory() -> io::Result<File> {
    Ok(memfd_create("egmem-probe", MemfdFlags::CLOEXEC)?.into())
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        15 => "SIGTERM",
        31 => "SIGSYS",
        _ => return format!("signal {signal}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Answer;
    use crate::capability::Trial;

    /// Starts a child that runs `script` for `trials`.
    fn shell(script: &str, trials: &[Trial], patience: Duration) -> Guarded {
        let command = ["/bin/sh", "-c", script].map(OsString::from);
        Guarded::start(&command, trials, patience).unwrap()
    }

    /// Longer than a test takes on any machine.
    const LONG: Duration = Duration::from_secs(100);

    /// Returns a pipe, and the path by which a child opens the end that it then waits at.
    fn waiting_place() -> ((io::PipeReader, io::PipeWriter), String) {
        let pipe = io::pipe().unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), pipe.0.as_raw_fd());
        (pipe, path)
    }

    #[test]
    fn a_grandchild_that_keeps_the_output_open_delays_no_report() {
        let (_pipe, path) = waiting_place();
        let script = format!("cat {path} & echo 'its last words' >&2; exit 3");
        let mut child = shell(&script, &[], LONG);
        let Err(Problem::Died(how)) = child.next::<Answer>() else {
            panic!("it gave no answer");
        };
        assert_eq!(how, "exit status: 3: its last words");
    }

    #[test]
    fn an_answer_counts_although_a_grandchild_keeps_the_output_open() {
        let (_pipe, path) = waiting_place();
        let answer = serde_json::to_string(&Answer::Yes).unwrap();
        let script = format!("cat {path} & echo '{MARK}{answer}'; exit 3");
        let mut child = shell(&script, &[], LONG);
        assert_eq!(child.next::<Answer>().unwrap(), Answer::Yes);
        let status = child.end().unwrap();
        assert!(matches!(child.died(status), Problem::Died(how) if how == "exit status: 3"));
    }

    #[test]
    fn the_last_words_of_a_talkative_child_are_kept() {
        let script = "head -c 300000 /dev/zero | tr '\\0' '\\n' >&2; echo last >&2; exit 1";
        let mut child = shell(script, &[], LONG);
        assert!(
            matches!(child.next::<Answer>(), Err(Problem::Died(how)) if how == "exit status: 1: last")
        );
    }

    #[test]
    fn a_child_that_writes_without_end_is_stopped() {
        let mut child = shell("exec cat /dev/zero", &[], LONG);
        assert!(
            matches!(child.next::<Answer>(), Err(Problem::Died(how)) if how.starts_with("it wrote more"))
        );
    }

    #[test]
    fn a_child_that_reads_nothing_is_stopped() {
        let trial = Trial {
            location: crate::driver::Location::Host,
            gpu: 0,
            path: crate::capability::Path::Vmm,
            handle_types: crate::driver::HandleTypes::NONE,
        };
        let (_pipe, path) = waiting_place();
        // More than a pipe would have room for.
        let trials = vec![trial; 20_000];
        let patience = Duration::from_millis(1);
        let mut child = shell(&format!("exec cat {path}"), &trials, patience);
        assert!(matches!(child.next::<Answer>(), Err(Problem::Hung(_))));
    }
}
