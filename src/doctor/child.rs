//! One child process. Its input and output are files in memory, which it can neither fill nor keep the parent waiting at.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Take};
use std::mem;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::children::{MARK, Problem};

/// How often the parent looks whether the child has said something or ended.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// More than this a child must not write to one of its outputs, in bytes.
const MOST: u64 = 16 << 20;
/// How long a killed child may take to end, at least: its memory on GPUs is given back meanwhile.
const LEAST: Duration = Duration::from_secs(1);

/// A running child; if it still runs when dropped, it is killed.
pub(crate) struct Guarded {
    child: Child,
    /// How long the child may take for each answer and to exit.
    pub(crate) patience: Duration,
    stdout: Output,
    stderr: Output,
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
        let start = || -> io::Result<Self> {
            let (program, args) = command
                .split_first()
                .ok_or_else(|| io::Error::other("no command"))?;
            let stdin = in_memory()?;
            stdin.write_all_at(&serde_json::to_vec(questions)?, 0)?;
            let (stdout, of_stdout) = Output::new()?;
            let (stderr, of_stderr) = Output::new()?;
            let mut child = Command::new(program);
            child.args(args).stdin(stdin);
            let child = child.stdout(of_stdout).stderr(of_stderr).spawn();
            Ok(Self {
                child: child
                    .map_err(|error| io::Error::other(format!("{}: {error}", program.display())))?,
                patience,
                stdout,
                stderr,
                last_words: String::new(),
            })
        };
        start().map_err(|why| Problem::Died(format!("it could not be started: {why}")))
    }

    /// Waits for the next answer of this type.
    pub(crate) fn next<A: DeserializeOwned>(&mut self) -> Result<A, Problem> {
        let start = Instant::now();
        loop {
            // First, so that all that it has written is read if it has ended.
            let ended = self.look()?;
            while let Some(line) = self.stdout.line(ended.is_some()) {
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

    /// Waits for the exit, but not forever.
    pub(crate) fn end(&mut self) -> Result<ExitStatus, Problem> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.look()? {
                return Ok(status);
            }
            self.wait_since(start)?;
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
        let mut how = status.to_string();
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
            self.patience = self.patience.max(LEAST);
            let start = Instant::now();
            while matches!(self.child.try_wait(), Ok(None)) && self.wait_since(start).is_ok() {}
        }
    }
}

/// A file that is read at a position of its own: the child and the processes that it starts share the file's.
struct Written {
    file: File,
    at: u64,
}

impl Read for Written {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(bytes, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

/// One of a child's outputs.
struct Output {
    written: BufReader<Take<Written>>,
    /// The start of a line of which the rest is not written yet.
    line: Vec<u8>,
}

impl Output {
    /// Returns an empty output, and the file that the child writes.
    fn new() -> io::Result<(Self, File)> {
        let file = in_memory()?;
        let of_child = file.try_clone()?;
        let (written, line) = (Written { file, at: 0 }.take(MOST), Vec::new());
        let written = BufReader::new(written);
        Ok((Self { written, line }, of_child))
    }

    /// Returns the next line; once the child has `ended`, also a last one without an end.
    fn line(&mut self, ended: bool) -> Option<String> {
        self.written.read_until(b'\n', &mut self.line).ok()?;
        let whole = self.line.ends_with(b"\n") || (ended && !self.line.is_empty());
        whole.then(|| {
            let line = mem::take(&mut self.line);
            // A process that opens its output by name may have cut it: the kernel fills the gap with zeros.
            let line = String::from_utf8_lossy(&line);
            line.trim_start_matches('\0').trim_end().to_owned()
        })
    }

    fn file(&self) -> &File {
        &self.written.get_ref().get_ref().file
    }

    /// Returns whether the child has written more than is read.
    fn is_full(&self) -> bool {
        self.file().metadata().is_ok_and(|data| data.len() > MOST)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // A grandchild that goes on writing must not fill the memory.
        fcntl_add_seals(self.file(), SealFlags::GROW).ok();
    }
}

/// Returns an empty file in memory.
fn in_memory() -> io::Result<File> {
    Ok(memfd_create(
        "egmem-probe",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?
    .into())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::path::PathBuf;

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
        let process = PathBuf::from(format!("/proc/{}", child.child.id()));
        drop(child);
        assert!(!process.exists(), "a zombie");
    }

    #[test]
    fn a_child_that_writes_without_end_after_its_answer_is_stopped() {
        let ((_reader, mut writer), path) = waiting_place();
        let answer = serde_json::to_string(&Answer::Yes).unwrap();
        let script = format!("echo '{MARK}{answer}'; read line < {path}; exec cat /dev/zero");
        let mut child = shell(&script, &[], LONG);
        assert_eq!(child.next::<Answer>().unwrap(), Answer::Yes);
        writer.write_all(b"\n").unwrap();
        assert!(matches!(child.end(), Err(Problem::Died(how)) if how.starts_with("it wrote more")));
    }

    #[test]
    fn an_output_skips_what_was_cut_and_no_longer_grows_when_nobody_reads_it() {
        let (mut output, file) = Output::new().unwrap();
        file.write_all_at(b"whole\n", 10).unwrap();
        assert_eq!(output.line(false).unwrap(), "whole");
        assert_eq!(output.line(true), None);
        drop(output);
        assert!(file.write_all_at(b"more", 16).is_err());
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
