//! The log, on standard error, and `--trace`: driver calls and allocations with their times, in the format of Chrome's
//! traces.

use std::fmt;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use egmem::exchange::{Error, Result};
use egmem::service::LineWriter;
use egmem::text::escape;
use tracing::field::Field;
use tracing::level_filters::LevelFilter;
use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry};

/// Lines that wait for a slow reader of standard error, when a service logs.
static QUEUE: OnceLock<LineWriter> = OnceLock::new();

/// Logs to standard error. `RUST_LOG` allows finer control than `-v`.
///
/// A service logs with the time, and never waits for a reader; its audit events are logged unless `RUST_LOG`
/// names their target, `egmem::audit`.
///
/// With `trace`, driver calls and allocations are also written there, in the format of Chrome's traces.
pub fn start(verbose: u8, service: bool, trace: Option<&Path>) -> Result<()> {
    let level = match verbose {
        0 => "warn",
        1 => "egmem=info",
        2 => "egmem=debug",
        _ => "trace",
    };
    let level = with_audit(level.to_owned(), service);
    let wanted = std::env::var(EnvFilter::DEFAULT_ENV).ok();
    let filter = (wanted.map(|wanted| with_audit(wanted, service)))
        .and_then(|wanted| EnvFilter::try_new(wanted).ok())
        .unwrap_or_else(|| EnvFilter::new(level));
    let log = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .fmt_fields(debug_fn(write_field).delimited(" "))
        // Such an error means that standard error is closed: reporting it there would panic.
        .log_internal_errors(false);
    let log = if service {
        let queue = LineWriter::new("log", std::io::stderr())?;
        let queue = QUEUE.get_or_init(|| queue);
        let log = log.with_writer(|| queue.clone());
        log.with_filter(filter).boxed()
    } else {
        let log = log.with_writer(std::io::stderr).without_time();
        log.with_filter(filter).boxed()
    };
    let mut layers = vec![log];
    if let Some(path) = trace {
        layers.push(trace_layer(path)?);
    }
    let started = tracing_subscriber::registry().with(layers).try_init();
    // The process has a log already: of an earlier run, or its own.
    started.map_err(|error| egmem::Error::failed("starting the log", error.to_string()).into())
}

/// Returns a filter's directives. A service's audit events are on unless a directive names their target.
fn with_audit(directives: String, service: bool) -> String {
    let named = |directive: &str| directive.trim().starts_with("egmem::audit");
    if service && !directives.split(',').any(named) {
        return format!("{directives},egmem::audit=info");
    }
    directives
}

/// Returns the queue of a service's log.
pub fn queue() -> Option<&'static LineWriter> {
    QUEUE.get()
}

/// Waits up to `most` for readers of the log, and writes the rest of the trace.
pub fn flush(most: Duration) {
    drop(TRACE.lock().unwrap_or_else(PoisonError::into_inner).take());
    if let Some(error) = FAILED.lock().unwrap_or_else(PoisonError::into_inner).take() {
        tracing::warn!(%error, "the trace is not complete");
    }
    if let Some(queue) = QUEUE.get() {
        queue.flush_within(most);
    }
}

/// A field's value may contain text of a peer or a file.
fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    let text = format!("{value:?}");
    match field.name() {
        "message" => writer.write_str(&escape(&text)),
        name => write!(writer, "{name}={}", escape(&text)),
    }
}

/// The trace, which is written before the program ends.
static TRACE: Mutex<Option<FlushGuard>> = Mutex::new(None);

/// The first error of writing: the layer's thread would panic.
static FAILED: Mutex<Option<io::Error>> = Mutex::new(None);

/// A file that takes everything; bytes that it could not write are lost.
struct Forgiving(BufWriter<File>);

impl Forgiving {
    fn note<T>(result: io::Result<T>, otherwise: T) -> io::Result<T> {
        Ok(result.unwrap_or_else(|error| {
            let mut failed = FAILED.lock().unwrap_or_else(PoisonError::into_inner);
            failed.get_or_insert(error);
            otherwise
        }))
    }
}

impl Write for Forgiving {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Self::note(self.0.write(bytes), bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Self::note(self.0.flush(), ())
    }
}

/// Returns the layer that writes to `path`, until [`flush`].
fn trace_layer(path: &Path) -> Result<Box<dyn Layer<Registry> + Send + Sync>> {
    let file = create_private(path)
        .map_err(|error| Error::system(format!("cannot write {}", path.display()), &error))?;
    let (calls, guard) = ChromeLayerBuilder::new()
        .writer(Forgiving(BufWriter::new(file)))
        .include_args(true)
        .build();
    *TRACE.lock().unwrap_or_else(PoisonError::into_inner) = Some(guard);
    let targets = [
        ("egmem::driver", LevelFilter::TRACE),
        ("egmem::alloc", LevelFilter::TRACE),
    ];
    Ok(calls
        .with_filter(Targets::new().with_targets(targets))
        .boxed())
}

/// Creates a file that only its owner can read, or empties it; follows no link.
pub fn create_private(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(path)?;
    if file.metadata()?.is_file() {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}
