//! A service's logs, whose readers may be slow or gone: a writer that never blocks, and the audit log.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use tracing::Dispatch;

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
#[derive(Clone, Debug)]
pub struct LineWriter {
    queue: Sender<Job>,
    counts: Arc<Counts>,
}

/// Work of the thread, in order.
type Job = Box<dyn FnOnce(&mut Writer) + Send>;

#[derive(Debug, Default)]
struct Counts {
    /// The bytes that wait, with [`PER_LINE`] for each line.
    waiting: AtomicUsize,
    /// Lines lost since the start.
    dropped: AtomicU64,
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
    fn with_lost_line(
        what: &'static str,
        sink: impl Write + Send + 'static,
        lost_line: impl Fn(u64) -> String + Send + 'static,
    ) -> Result<Self> {
        let (queue, jobs) = channel::<Job>();
        let counts = Arc::<Counts>::default();
        let mut writer = Writer {
            sink: Box::new(sink),
            torn: false,
            reported: 0,
            lost_line: Box::new(lost_line),
            counts: Arc::clone(&counts),
        };
        std::thread::Builder::new()
            .name(format!("egmem-{what}"))
            .spawn(move || {
                for job in jobs {
                    job(&mut writer);
                    writer.report();
                }
            })
            .map_err(|error| Error::system("cannot start a thread", &error))?;
        Ok(Self { queue, counts })
    }

    /// Queues a line, or drops and counts it. Never waits for the sink.
    pub fn line(&self, line: &[u8]) {
        let size = line.len() + PER_LINE;
        if self.counts.waiting.fetch_add(size, Relaxed) + size > ROOM {
            self.counts.waiting.fetch_sub(size, Relaxed);
            self.counts.dropped.fetch_add(1, Relaxed);
            return;
        }
        let line = line.to_vec();
        self.send(move |writer| {
            if !writer.write(&line) {
                writer.counts.dropped.fetch_add(1, Relaxed);
            }
            writer.counts.waiting.fetch_sub(size, Relaxed);
        });
    }

    /// Returns how many lines were dropped or could not be written.
    pub fn dropped(&self) -> u64 {
        self.counts.dropped.load(Relaxed)
    }

    /// Waits until all lines are written, for at most `most`; returns whether they are.
    pub fn flush_within(&self, most: Duration) -> bool {
        let (done, flushed) = channel();
        self.send(move |writer| {
            writer.report();
            let _ = done.send(());
        });
        flushed.recv_timeout(most).is_ok()
    }

    fn send(&self, job: impl FnOnce(&mut Writer) + Send + 'static) {
        // The thread ends only when the last sender has gone.
        let _ = self.queue.send(Box::new(job));
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
    /// Makes the line that reports how many were lost.
    lost_line: Box<dyn Fn(u64) -> String + Send>,
    counts: Arc<Counts>,
}

impl Writer {
    /// Writes how many lines were lost since the last report, if any were.
    fn report(&mut self) {
        let dropped = self.counts.dropped.load(Relaxed);
        let lost = dropped - self.reported;
        if lost > 0 && self.write((self.lost_line)(lost).as_bytes()) {
            self.reported = dropped;
        }
    }

    /// Writes a line, and returns whether that succeeded. If the previous one may be incomplete, writes a line
    /// feed first, so that the fragment does not spoil this line too.
    fn write(&mut self, line: &[u8]) -> bool {
        let line = if self.torn {
            &[b"\n", line].concat()
        } else {
            line
        };
        let written = self.sink.write_all(line).and_then(|()| self.sink.flush());
        self.torn = written.is_err();
        written.is_ok()
    }
}

/// How long the end of the service waits for a slow disk.
const LAST: Duration = Duration::from_secs(1);

/// The file and its queue. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct AuditFile {
    path: PathBuf,
    pub lines: LineWriter,
}

impl AuditFile {
    /// Opens the file to append to it; creates it with mode 0600.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) that names the file: if it cannot be opened, or is not a regular
    /// file of this process's user.
    pub fn open(path: &Path) -> Result<Self> {
        let lines = LineWriter::with_lost_line("audit log", file(path)?, |count| {
            format!("{{\"event\":\"lost\",\"count\":{count}}}\n")
        })?;
        Ok(Self {
            path: path.to_owned(),
            lines,
        })
    }

    /// Reopens the file at the path, after it was moved away.
    ///
    /// # Errors
    /// Those of [`open`](Self::open): events then still go to the old file.
    pub fn reopen(&self) -> Result<()> {
        let sink = file(&self.path)?;
        self.lines.send(move |writer| {
            writer.sink = Box::new(sink);
            writer.torn = false;
        });
        Ok(())
    }

    /// Returns the subscriber for a server's events.
    pub fn subscriber(&self) -> Dispatch {
        let lines = self.lines.clone();
        let format = tracing_subscriber::fmt().json().flatten_event(true);
        let format = format.with_level(false).with_target(false);
        format.with_writer(move || lines.clone()).finish().into()
    }

    /// Waits until queued lines are written, for at most a second.
    pub fn flush(&self) {
        if !self.lines.flush_within(LAST) {
            tracing::warn!(path = %self.path.display(), "not all of the audit log is written");
        }
    }
}

fn file(path: &Path) -> Result<File> {
    let failed = |error| Error::system(format!("audit log {}", path.display()), &error);
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(flags.bits() as i32)
        .open(path)
        .map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    let own = rustix::process::geteuid().as_raw();
    if !found.is_file() || found.uid() != own {
        let why = format!("it is not a regular file of uid {own}; name another file");
        return Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, why)));
    }
    file.set_permissions(Permissions::from_mode(0o600))
        .map_err(failed)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

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

    fn write(audit: &AuditFile, peer: &str) {
        tracing::dispatcher::with_default(&audit.subscriber(), || {
            tracing::info!(event = "granted", peer, lease = 7);
        });
        audit.flush();
    }

    #[test]
    fn events_are_appended_as_json_and_go_on_in_a_new_file_after_a_rotation() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.jsonl");
        let audit = AuditFile::open(&path).unwrap();
        write(&audit, "a\n\u{1b}");
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o600);
        let moved = folder.path().join("audit.jsonl.1");
        std::fs::rename(&path, &moved).unwrap();
        audit.reopen().unwrap();
        write(&audit, "b");
        for (file, peer) in [(&moved, "a\n\u{1b}"), (&path, "b")] {
            let text = std::fs::read_to_string(file).unwrap();
            assert_eq!(text.lines().count(), 1, "{text}");
            assert!(!text.trim_end().contains(crate::text::is_unsafe), "{text}");
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(value["peer"], peer);
            assert_eq!(value["lease"], 7);
            let time = value["timestamp"].as_str().unwrap();
            assert!(time.starts_with("20") && time.ends_with('Z'), "{time}");
        }
        assert_eq!(audit.lines.dropped(), 0);
    }

    #[test]
    fn a_link_or_a_folder_is_no_audit_log() {
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        std::fs::write(&precious, "").unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        for wrong in [link.as_path(), folder.path()] {
            let error = AuditFile::open(wrong).unwrap_err().to_string();
            assert!(error.contains("audit log"), "{error}");
        }
    }
}
