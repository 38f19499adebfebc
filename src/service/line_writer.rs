//! A writer that never blocks: for a service's logs, whose readers may be slow or gone.

use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::Duration;

use crate::{Error, Result};

/// How many bytes may wait for a slow reader.
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
pub struct LineWriter {
    queue: Sender<Message>,
    counts: Arc<Counts>,
}

enum Message {
    Line(Vec<u8>),
    /// Continue with this sink.
    Reopen(Box<dyn Write + Send>),
    /// Answer when everything before this is written.
    Flush(Sender<()>),
}

#[derive(Default)]
struct Counts {
    /// The bytes that wait, with [`PER_LINE`] for each line.
    waiting: AtomicUsize,
    /// Lines lost since the start.
    dropped: AtomicU64,
}

impl fmt::Debug for LineWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LineWriter").finish_non_exhaustive()
    }
}

impl LineWriter {
    /// Writes to `sink`, in a thread named after `what`; 1 MiB may wait.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) if the thread cannot be started.
    pub fn new(what: &'static str, sink: impl Write + Send + 'static) -> Result<Self> {
        Self::with_lost_line(what, sink, move |lost| {
            format!("WARN egmem: {lost} lines of the {what} were lost\n")
        })
    }

    /// As [`new`](Self::new); `lost_line` makes the line that reports how many were lost.
    pub(crate) fn with_lost_line(
        what: &'static str,
        sink: impl Write + Send + 'static,
        lost_line: impl Fn(u64) -> String + Send + 'static,
    ) -> Result<Self> {
        let (queue, messages) = channel();
        let counts = Arc::<Counts>::default();
        let writer = Writer {
            sink: Box::new(sink),
            torn: false,
            reported: 0,
            counts: Arc::clone(&counts),
        };
        std::thread::Builder::new()
            .name(format!("egmem-{what}"))
            .spawn(move || writer.run(&messages, &lost_line))
            .map_err(|error| Error::system("cannot start a thread", &error))?;
        Ok(Self { queue, counts })
    }

    /// Queues a line, or drops and counts it. Never waits for the sink.
    pub fn line(&self, line: &[u8]) {
        let size = line.len() + PER_LINE;
        if self.counts.waiting.fetch_add(size, Relaxed) + size > ROOM {
            self.counts.waiting.fetch_sub(size, Relaxed);
            self.counts.dropped.fetch_add(1, Relaxed);
        } else {
            self.send(Message::Line(line.to_vec()));
        }
    }

    /// Returns how many lines were dropped or could not be written.
    pub fn dropped(&self) -> u64 {
        self.counts.dropped.load(Relaxed)
    }

    /// Writes to another sink from the next line on.
    pub(crate) fn reopen(&self, sink: impl Write + Send + 'static) {
        self.send(Message::Reopen(Box::new(sink)));
    }

    /// Waits until all lines are written, for at most `most`; returns whether they are.
    pub fn flush_within(&self, most: Duration) -> bool {
        let (done, flushed) = channel();
        self.send(Message::Flush(done));
        flushed.recv_timeout(most).is_ok()
    }

    fn send(&self, message: Message) {
        // The thread ends only when the last sender has gone.
        let _ = self.queue.send(message);
    }
}

/// Each write is one line, as `tracing`'s subscribers write. Never fails and never waits for the sink.
impl Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.line(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The thread's part.
struct Writer {
    sink: Box<dyn Write + Send>,
    /// Whether the sink may end with an incomplete line.
    torn: bool,
    /// How many lost lines were reported.
    reported: u64,
    counts: Arc<Counts>,
}

impl Writer {
    fn run(mut self, messages: &Receiver<Message>, lost_line: &dyn Fn(u64) -> String) {
        loop {
            let message = match messages.try_recv() {
                Err(TryRecvError::Empty) => {
                    self.report(lost_line);
                    messages.recv().ok()
                }
                received => received.ok(),
            };
            match message {
                Some(Message::Line(line)) => {
                    self.report(lost_line);
                    if !self.write(&line) {
                        self.counts.dropped.fetch_add(1, Relaxed);
                    }
                    let size = line.len() + PER_LINE;
                    self.counts.waiting.fetch_sub(size, Relaxed);
                }
                Some(Message::Reopen(sink)) => {
                    self.sink = sink;
                    self.torn = false;
                }
                Some(Message::Flush(done)) => {
                    self.report(lost_line);
                    let _ = done.send(());
                }
                None => return self.report(lost_line),
            }
        }
    }

    /// Writes how many lines were lost since the last report, if any were.
    fn report(&mut self, lost_line: &dyn Fn(u64) -> String) {
        let dropped = self.counts.dropped.load(Relaxed);
        let lost = dropped - self.reported;
        if lost > 0 && self.write(lost_line(lost).as_bytes()) {
            self.reported = dropped;
        }
    }

    /// Writes a line, and returns whether that succeeded. If the previous one may be incomplete, writes a line
    /// feed first, so that the fragment does not spoil this line too.
    fn write(&mut self, line: &[u8]) -> bool {
        let begun = if self.torn {
            self.sink.write_all(b"\n")
        } else {
            Ok(())
        };
        let written = begun
            .and_then(|()| self.sink.write_all(line))
            .and_then(|()| self.sink.flush());
        self.torn = written.is_err();
        written.is_ok()
    }
}

#[cfg(test)]
mod tests {
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

    fn log(sink: impl Write + Send + 'static) -> LineWriter {
        LineWriter::with_lost_line("log", sink, |lost| format!("lost {lost}\n")).unwrap()
    }

    /// Returns the sum of the reports in these lines.
    fn lost(lines: &[String]) -> u64 {
        let counts = lines.iter().filter_map(|line| line.strip_prefix("lost "));
        counts
            .map(|count| count.trim().parse::<u64>().unwrap())
            .sum()
    }

    #[test]
    fn a_reader_that_does_not_read_holds_nobody_up_and_is_told_what_it_missed() {
        let (go, wait) = channel();
        let (tell, lines) = channel();
        let mut log = log(Slow(wait, tell));
        let line = [b'x'; 1024 - PER_LINE];
        for _ in 0..2000 {
            log.write_all(&line).unwrap();
        }
        assert_eq!(log.dropped(), 2000 - 1024);
        assert!(!log.flush_within(Duration::from_millis(20)));
        drop(go);
        assert!(log.flush_within(PATIENCE));
        let read: Vec<String> = lines.try_iter().collect();
        assert_eq!(lost(&read), 2000 - 1024);
        log.write_all(b"after\n").unwrap();
        assert!(log.flush_within(PATIENCE));
        assert_eq!(lines.recv_timeout(PATIENCE).unwrap(), "after\n");
        assert_eq!(log.dropped(), 2000 - 1024);
    }

    /// A disk with room for this many bytes before it is full once.
    struct Full(usize, bool, Sender<Vec<u8>>);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0 == 0 && !self.1 {
                self.1 = true;
                return Err(io::ErrorKind::StorageFull.into());
            }
            let taken = if self.1 {
                bytes.len()
            } else {
                bytes.len().min(self.0)
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
    fn a_line_that_a_full_disk_loses_is_reported_on_a_line_of_its_own() {
        let (tell, parts) = channel();
        let mut log = log(Full(6, false, tell));
        for line in ["one\n", "two\n", "three\n", "four\n"] {
            log.write_all(line.as_bytes()).unwrap();
        }
        assert!(log.flush_within(PATIENCE));
        let written: Vec<u8> = parts.try_iter().flatten().collect();
        assert_eq!(written, b"one\ntw\nlost 1\nthree\nfour\n");
        assert_eq!(log.dropped(), 1);
    }

    #[test]
    fn a_line_longer_than_the_room_is_dropped_and_others_come() {
        let (tell, lines) = channel();
        let mut log = log(Slow(channel().1, tell));
        log.write_all(&vec![b'x'; ROOM]).unwrap();
        log.write_all(b"short\n").unwrap();
        assert!(log.flush_within(PATIENCE));
        let all: String = lines.try_iter().collect();
        assert!(all.contains("lost 1\n") && all.contains("short\n"), "{all}");
    }
}
