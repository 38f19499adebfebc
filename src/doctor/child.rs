//! One child process with its pipes.
//!
//! A program that the child starts may keep the child's output open after the child has ended. So the end of the child
//! ends the reading, not the end of its output.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use egmem_core::doctor::Libraries;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{ioctl_fionread, retry_on_intr};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::children::Problem;
use crate::probe::{LIBRARIES, MARK};

/// How often the parent looks whether the child has ended.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A running child; if it still runs when dropped, it is killed.
pub(crate) struct Guarded {
    child: Child,
    /// How long the child may take for each answer and to exit.
    patience: Duration,
    /// The answers as JSON.
    answers: Receiver<String>,
    libraries: Receiver<Libraries>,
    last_words: Option<JoinHandle<String>>,
    /// Shut down when the child has ended: then the readers take what it has written, and end.
    ended: UnixStream,
}

impl Guarded {
    /// Starts a child that is to answer the questions.
    pub(crate) fn start(
        command: &[OsString],
        questions: &[impl Serialize],
        patience: Duration,
    ) -> Result<Self, Problem> {
        let not_started = |why: String| Problem::Died(format!("it could not be started: {why}"));
        let of_pipe = |error: io::Error| not_started(error.to_string());
        let (program, args) = command
            .split_first()
            .ok_or_else(|| not_started("no command".into()))?;
        let input =
            serde_json::to_vec(questions).map_err(|error| not_started(error.to_string()))?;
        let (ended, of_readers) = UnixStream::pair().map_err(of_pipe)?;
        let of_words = of_readers.try_clone().map_err(of_pipe)?;
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| not_started(format!("{}: {error}", program.display())))?;
        if let Some(mut stdin) = child.stdin.take() {
            // In a thread, because a child that hangs reads nothing. If it is dead already, `next` finds out.
            thread::spawn(move || stdin.write_all(&input));
        }
        let (sender, answers) = mpsc::channel();
        let (of_process, libraries) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            let stdout = UntilItEnds::new(stdout, of_readers);
            thread::spawn(move || read_answers(stdout, &sender, &of_process));
        }
        let last_words = child.stderr.take().map(|stderr| {
            let stderr = UntilItEnds::new(stderr, of_words);
            thread::spawn(move || read_last_words(stderr))
        });
        Ok(Self {
            child,
            patience,
            answers,
            libraries,
            last_words,
            ended,
        })
    }

    /// Waits for the next answer of this type.
    pub(crate) fn next<A: DeserializeOwned>(&mut self) -> Result<A, Problem> {
        let start = Instant::now();
        loop {
            match self.answers.recv_timeout(LOOK_EVERY) {
                Ok(answer) => match serde_json::from_str(&answer) {
                    Ok(answer) => return Ok(answer),
                    // Libraries may print the same prefix.
                    Err(error) => tracing::info!(%error, "a child says: {answer}"),
                },
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.end()?;
                    return Err(self.died(status));
                }
                Err(RecvTimeoutError::Timeout) if start.elapsed() > self.patience => {
                    return Err(Problem::Hung(self.patience));
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.has_ended()?;
                }
            }
        }
    }

    /// Sets how long the child may take for each further answer and to exit.
    pub(crate) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Returns the child's libraries, once it has [answered](Self::next) or ended.
    pub(crate) fn libraries(&self) -> Libraries {
        self.libraries.try_recv().unwrap_or_default()
    }

    /// Waits for the exit, but not forever.
    pub(crate) fn end(&mut self) -> Result<ExitStatus, Problem> {
        let start = Instant::now();
        loop {
            match self.has_ended()? {
                Some(status) => return Ok(status),
                None if start.elapsed() > self.patience => {
                    return Err(Problem::Hung(self.patience));
                }
                None => thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// Returns the status of a child that has ended, and lets its readers end.
    fn has_ended(&mut self) -> Result<Option<ExitStatus>, Problem> {
        let status = self.child.try_wait();
        if !matches!(status, Ok(None)) {
            self.ended.shutdown(Shutdown::Both).ok();
        }
        status.map_err(|error| Problem::Died(format!("it was lost: {error}")))
    }

    /// Says how a child died that [has ended](Self::end).
    pub(crate) fn died(&mut self, status: ExitStatus) -> Problem {
        let mut how = match status.signal() {
            Some(signal) => format!("killed by {}", signal_name(signal)),
            None => status.to_string(),
        };
        let words = self.last_words.take().map(JoinHandle::join);
        if let Some(Ok(words)) = words
            && !words.is_empty()
        {
            how = format!("{how}: {words}");
        }
        Problem::Died(how)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if matches!(self.has_ended(), Ok(None)) {
            self.child.kill().ok();
            // A child that the kernel's driver does not let go cannot be waited for.
            self.end().ok();
            self.ended.shutdown(Shutdown::Both).ok();
        }
    }
}

/// Sends the answers in a child's output, and its libraries.
fn read_answers(stdout: impl Read, answers: &Sender<String>, libraries: &Sender<Libraries>) {
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        let told = line.strip_prefix(LIBRARIES).map(serde_json::from_str);
        if let Some(Ok(told)) = told {
            libraries.send(told).ok();
        }
        if let Some(answer) = line.strip_prefix(MARK)
            && answers.send(answer.to_owned()).is_err()
        {
            break;
        }
    }
}

/// Logs a child's messages. Returns the last one.
fn read_last_words(stderr: impl Read) -> String {
    let mut last = String::new();
    for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        if !line.trim().is_empty() {
            tracing::info!("a child says: {line}");
            last = line.trim().chars().take(200).collect();
        }
    }
    last
}

/// A child's output up to its end, or up to what is there when the child has ended.
struct UntilItEnds<P> {
    pipe: P,
    /// At its end when the child has ended.
    ended: UnixStream,
    /// How many bytes are left to read once the child has ended.
    left: Option<u64>,
}

impl<P> UntilItEnds<P> {
    const fn new(pipe: P, ended: UnixStream) -> Self {
        let left = None;
        Self { pipe, ended, left }
    }
}

impl<P: Read + AsFd> Read for UntilItEnds<P> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = match self.left {
            Some(left) => left,
            None => {
                let mut fds = [
                    PollFd::new(&self.pipe, PollFlags::IN),
                    PollFd::new(&self.ended, PollFlags::IN),
                ];
                retry_on_intr(|| poll(&mut fds, None))?;
                if fds[1].revents().is_empty() {
                    return self.pipe.read(buf);
                }
                ioctl_fionread(&self.pipe)?
            }
        };
        let most = buf.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        // These bytes are there, so this does not wait.
        let read = self.pipe.read(&mut buf[..most])?;
        self.left = Some(left - read as u64);
        Ok(read)
    }
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
        use std::os::fd::AsRawFd;
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
    fn a_child_that_reads_nothing_is_stopped() {
        let trial = Trial {
            location: crate::driver::Location::Host,
            gpu: 0,
            path: crate::capability::Path::Vmm,
            handle_types: crate::driver::HandleTypes::NONE,
        };
        let (_pipe, path) = waiting_place();
        // More than a pipe has room for.
        let trials = vec![trial; 20_000];
        let patience = Duration::from_millis(1);
        let mut child = shell(&format!("exec cat {path}"), &trials, patience);
        assert!(matches!(child.next::<Answer>(), Err(Problem::Hung(_))));
    }
}
