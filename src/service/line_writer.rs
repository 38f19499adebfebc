//! A writer that never blocks: for a service's logs, whose readers may be slow or gone.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::per_driver::lock;
use crate::{Error, Result};

/// How many bytes may wait for a slow reader by default.
const ROOM: usize = 1 << 20;
/// The bytes that a line counts in addition to its own, for the queue's memory.
const PER_LINE: usize = 64;

/// Writes lines in a thread of its own. If too many bytes wait, it drops and counts further lines, and later
/// writes a line with their number. A clone writes to the same queue.
///
/// ```
/// use std::io::Write;
/// use egmem::service::LineWriter;
///
/// let mut log = LineWriter::new("log", std::io::stderr())?;
/// log.write_all(b"a line\n").unwrap();
/// log.flush_within(std::time::Duration::from_secs(1));
/// assert_eq!(log.dropped(), 0);
/// # Ok::<(), egmem::exchange::Error>(())
/// ```
#[derive(Clone)]
pub struct LineWriter(Arc<Owner>);

/// Ends the thread when the last writer is dropped.
struct Owner(Arc<SharedQueue>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.state().closed = true;
        self.0.changed.notify_all();
    }
}

struct SharedQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
    room: usize,
    /// Makes the line that reports lost ones.
    lost: Box<dyn Fn(u64) -> Vec<u8> + Send + Sync>,
}

#[derive(Default)]
struct QueueState {
    lines: VecDeque<Vec<u8>>,
    /// The bytes of `lines`, with [`PER_LINE`] for each.
    bytes: usize,
    /// Lines lost since the last report.
    lost: u64,
    /// Lines lost since the start.
    dropped: u64,
    /// Whether the thread is writing a line.
    writing: bool,
    closed: bool,
    /// The sink to continue with.
    next: Option<Box<dyn Write + Send>>,
}

impl fmt::Debug for LineWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LineWriter").finish_non_exhaustive()
    }
}

impl SharedQueue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        lock(&self.state)
    }

    fn push(&self, line: &[u8]) {
        let mut state = self.state();
        let size = line.len() + PER_LINE;
        // Leaves room for the line that reports lost ones.
        let told = if state.lost > 0 { 256 } else { 0 };
        if state.bytes + size + told > self.room {
            state.lost += 1;
            state.dropped += 1;
            drop(state);
            self.changed.notify_all();
            return;
        }
        self.tell(&mut state);
        state.bytes += size;
        state.lines.push_back(line.to_vec());
        drop(state);
        self.changed.notify_all();
    }

    /// Queues the line that reports lost ones, if there are any.
    fn tell(&self, state: &mut QueueState) {
        if state.lost > 0 {
            let line = (self.lost)(std::mem::take(&mut state.lost));
            state.bytes += line.len() + PER_LINE;
            state.lines.push_back(line);
        }
    }

    fn run(&self, mut sink: Box<dyn Write + Send>) {
        let mut state = self.state();
        // Whether the sink may end with an incomplete line.
        let mut torn = false;
        loop {
            if state.lines.is_empty() {
                self.tell(&mut state);
            }
            if let Some(next) = state.next.take() {
                sink = next;
                torn = false;
            }
            let Some(line) = state.lines.pop_front() else {
                state.writing = false;
                self.changed.notify_all();
                if state.closed {
                    return;
                }
                state = (self.changed.wait(state)).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.writing = true;
            drop(state);
            torn = write_line(&mut *sink, &line, torn).is_err();
            state = self.state();
            // Only now is there room: a line that is being written still takes memory.
            state.bytes = state.bytes.saturating_sub(line.len() + PER_LINE);
            state.dropped += u64::from(torn);
        }
    }
}

/// Writes a line. If the previous one may be incomplete (`torn`), writes a line feed first, so that the
/// fragment does not spoil this line too.
fn write_line(sink: &mut dyn Write, line: &[u8], torn: bool) -> io::Result<()> {
    if torn {
        sink.write_all(b"\n")?;
    }
    sink.write_all(line)?;
    sink.flush()
}

impl LineWriter {
    /// Writes to `sink`, in a thread named after `what`; 1 MiB may wait.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) if the thread cannot be started.
    pub fn new(what: &'static str, sink: impl Write + Send + 'static) -> Result<Self> {
        Self::with_room(what, ROOM, sink, move |lost| {
            format!(
                "WARN egmem: {lost} lines of the {what} were lost: they were not read fast enough\n"
            )
            .into_bytes()
        })
    }

    /// As [`new`](Self::new), but `room` bytes may wait, and `lost` makes the line of at most 192 bytes that
    /// reports how many were lost.
    pub(crate) fn with_room(
        what: &'static str,
        room: usize,
        sink: impl Write + Send + 'static,
        lost: impl Fn(u64) -> Vec<u8> + Send + Sync + 'static,
    ) -> Result<Self> {
        let shared = Arc::new(SharedQueue {
            state: Mutex::default(),
            changed: Condvar::new(),
            room,
            lost: Box::new(lost),
        });
        let writing = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(format!("egmem-{what}"))
            .spawn(move || writing.run(Box::new(sink)))
            .map_err(|error| Error::system("cannot start a thread", &error))?;
        Ok(Self(Arc::new(Owner(shared))))
    }

    /// Queues a line, or drops and counts it. Never waits for the sink.
    pub fn line(&self, line: &[u8]) {
        self.0.0.push(line);
    }

    /// Returns how many lines were dropped or could not be written.
    pub fn dropped(&self) -> u64 {
        self.0.0.state().dropped
    }

    /// Writes to another sink from the next line on.
    pub(crate) fn reopen(&self, sink: impl Write + Send + 'static) {
        self.0.0.state().next = Some(Box::new(sink));
    }

    /// Waits until all lines are written, for at most `most`; returns whether they are.
    pub fn flush_within(&self, most: Duration) -> bool {
        let until = Instant::now() + most;
        let shared = &self.0.0;
        let mut state = shared.state();
        while state.writing || !state.lines.is_empty() || state.lost > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// Each write is one line, as `tracing`'s subscribers write. Never fails and never blocks.
impl Write for LineWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.line(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(300);

    /// Waits for a message before each line, and passes the line on.
    struct Slow(Receiver<()>, Sender<String>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            let _ = self.1.send(String::from_utf8_lossy(bytes).into_owned());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_does_not_read_holds_nobody_up_and_is_told_what_it_missed() {
        let (go, wait) = channel();
        let (tell, lines) = channel();
        let log = LineWriter::with_room("log", 4096, Slow(wait, tell), |lost| {
            format!("lost {lost}\n").into_bytes()
        })
        .unwrap();
        let line = [b'x'; 36];
        for _ in 0..1000 {
            log.line(&line);
        }
        // 100 bytes each, of 4096.
        assert_eq!(log.dropped(), 1000 - 40);
        assert!(!log.flush_within(Duration::from_millis(20)));
        drop(go);
        assert!(log.flush_within(PATIENCE));
        let read: Vec<String> = lines.try_iter().collect();
        assert_eq!(read.len(), 41);
        assert_eq!(read[40], "lost 960\n");
        log.line(b"after\n");
        assert!(log.flush_within(PATIENCE));
        assert_eq!(lines.recv_timeout(PATIENCE).unwrap(), "after\n");
        assert_eq!(log.dropped(), 960);
    }

    /// A disk with room for this many bytes before it is full once.
    struct Full(usize, bool, Sender<Vec<u8>>);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0 == 0 && !self.1 {
                self.1 = true;
                return Err(io::ErrorKind::StorageFull.into());
            }
            let taken = match self.1 {
                true => bytes.len(),
                false => bytes.len().min(self.0),
            };
            self.0 = self.0.saturating_sub(taken);
            let _ = self.2.send(bytes[..taken].to_vec());
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_after_a_partial_write_is_a_line_of_its_own() {
        let (tell, parts) = channel();
        let log = LineWriter::new("log", Full(6, false, tell)).unwrap();
        for line in ["one\n", "two\n", "three\n", "four\n"] {
            log.line(line.as_bytes());
        }
        assert!(log.flush_within(PATIENCE));
        let written: Vec<u8> = parts.try_iter().flatten().collect();
        assert_eq!(written, b"one\ntw\nthree\nfour\n");
        assert_eq!(log.dropped(), 1);
    }

    #[test]
    fn a_line_longer_than_the_room_is_dropped_and_others_come() {
        let (tell, lines) = channel();
        let log = LineWriter::with_room("log", 1024, Slow(channel().1, tell), |lost| {
            format!("lost {lost}\n").into_bytes()
        })
        .unwrap();
        log.line(&[b'x'; 2000]);
        log.line(b"short\n");
        assert!(log.flush_within(PATIENCE));
        let all: String = lines.try_iter().collect();
        assert!(all.contains("lost 1\n") && all.contains("short\n"), "{all}");
    }
}
