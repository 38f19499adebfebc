//! The log, on standard error.

use std::fmt;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use egmem::exchange::Result;
use egmem::service::LineWriter;
use egmem::text::escape;
use tracing::field::Field;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry};

use crate::trace;

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
    match service {
        true => {
            let queue = LineWriter::new("log", std::io::stderr())?;
            let queue = QUEUE.get_or_init(|| queue);
            let log = log.with_writer(|| queue.clone()).with_filter(filter);
            init(log, trace)
        }
        false => {
            let log = log.with_writer(std::io::stderr).without_time();
            init(log.with_filter(filter), trace)
        }
    }
}

fn init(log: impl Layer<Registry> + Send + Sync, trace: Option<&Path>) -> Result<()> {
    let log = tracing_subscriber::registry().with(log);
    let started = match trace {
        None => log.try_init(),
        Some(path) => log.with(trace::layer(path)?).try_init(),
    };
    // The process has a log already: of an earlier run, or its own.
    started.map_err(|error| egmem::Error::failed("starting the log", error.to_string()).into())
}

/// Returns a filter's directives. A service's audit events are on unless a directive names their target.
fn with_audit(directives: String, service: bool) -> String {
    let named = |directive: &str| directive.trim().starts_with("egmem::audit");
    match service && !directives.split(',').any(named) {
        true => format!("{directives},egmem::audit=info"),
        false => directives,
    }
}

/// Returns the queue of a service's log.
pub fn queue() -> Option<&'static LineWriter> {
    QUEUE.get()
}

/// Waits up to `most` for readers of the log, and writes the rest of the trace.
pub fn flush(most: Duration) {
    if let Some(error) = trace::finish() {
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
