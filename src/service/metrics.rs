//! The HTTP endpoint: metrics in Prometheus' text form (OpenMetrics 1.0), liveness and readiness.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, lookup_host};
use tokio::task::{AbortHandle, JoinSet};

use super::config::{MetricsConfig, elsewhere};
use super::lines::LineWriter;
use super::quota::Use;
use super::reserve::{Counts, Levels};
use super::state::ServiceState;
use crate::exchange::directory::Registration;
use crate::exchange::server::ServerStats;
use crate::per_driver::lock;
use crate::{Error, Result};

/// The most connections at once: a new one replaces the oldest. With [`BUFFER`] this bounds the memory that clients can
/// make the endpoint use.
const CONNECTIONS: usize = 64;
/// The most bytes of a request's head.
const BUFFER: usize = 16 << 10;
/// The time limits of a request's head and of a connection.
const HEAD: Duration = Duration::from_secs(5);
const CONNECTION: Duration = Duration::from_secs(30);
/// How long to wait after the kernel had no file descriptor or memory for a connection.
const AFTER_FAILURE: Duration = Duration::from_millis(100);

/// Serves the metrics at `address`, host and port, until the task is dropped; returns the address that it listens at.
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an address that other machines reach,
/// unless `anywhere`; [`System`](crate::MemoryError::System) if the socket cannot be opened.
pub(super) async fn serve(
    MetricsConfig { address, anywhere }: &MetricsConfig,
    state: Arc<ServiceState>,
) -> Result<(SocketAddr, JoinSet<()>)> {
    let fail = |error| Error::system(format!("cannot serve metrics at {address}"), &error);
    let found: Vec<SocketAddr> = lookup_host(address).await.map_err(fail)?.collect();
    let is_local = |found: &SocketAddr| found.ip().to_canonical().is_loopback();
    if !anywhere && !found.iter().all(is_local) {
        return Err(elsewhere(address));
    }
    let listener = TcpListener::bind(&found[..]).await.map_err(fail)?;
    let address = listener.local_addr().map_err(fail)?;
    let mut task = JoinSet::new();
    task.spawn(accept(listener, state));
    Ok((address, task))
}

async fn accept(listener: TcpListener, state: Arc<ServiceState>) {
    let mut open = VecDeque::<AbortHandle>::new();
    // Dropped with this task, and the connections' tasks with it.
    let mut tasks = JoinSet::new();
    loop {
        let accepted = listener.accept().await;
        while tasks.try_join_next().is_some() {}
        open.retain(|task| !task.is_finished());
        if (accepted.is_err() || open.len() >= CONNECTIONS)
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
        }
        let accepted = accepted.inspect_err(|error| tracing::debug!(%error, "metrics: accept"));
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(AFTER_FAILURE).await;
            continue;
        };
        let state = Arc::clone(&state);
        let task = tasks.spawn(async move {
            let answer = service_fn(|request| {
                let response = respond(&request, &state);
                async { Ok::<_, Infallible>(response) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD)
                .max_buf_size(BUFFER)
                .max_headers(64)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), answer);
            if let Ok(Err(error)) = tokio::time::timeout(CONNECTION, connection).await {
                tracing::debug!(%error, "metrics: connection");
            }
        });
        open.push_back(task);
    }
}

const PATHS: &str = "/metrics, /healthz, /readyz\n";

fn respond(request: &Request<Incoming>, state: &ServiceState) -> Response<Full<Bytes>> {
    let mut kind = "text/plain; charset=utf-8";
    let is_head = request.method() == Method::HEAD;
    let (status, text) = match request.uri().path() {
        _ if !is_head && request.method() != Method::GET => {
            (StatusCode::METHOD_NOT_ALLOWED, "GET or HEAD\n".into())
        }
        "/metrics" => {
            kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            (StatusCode::OK, state.metrics())
        }
        "/healthz" => (StatusCode::OK, "alive\n".into()),
        "/readyz" => match state.readiness() {
            Ok(()) => (StatusCode::OK, "ready\n".into()),
            Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
        },
        _ => (StatusCode::NOT_FOUND, PATHS.into()),
    };
    let body = if is_head { String::new() } else { text };
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    response
}

/// A metric's type, and the end of its samples' name.
type Kind = (&'static str, &'static str);
const GAUGE: Kind = ("gauge", "");
const COUNTER: Kind = ("counter", "_total");

/// A metric's values, each with its label in braces.
type Samples = Vec<(String, u64)>;

fn one(value: impl Into<u64>) -> Samples {
    vec![(String::new(), value.into())]
}

/// Returns a sample for each value of a label.
fn by(label: &str, all: impl IntoIterator<Item = (impl ToString, u64)>) -> Samples {
    let label = |of: String| {
        // OpenMetrics knows no other escapes.
        let of = (of.replace('\\', r"\\").replace('"', r#"\""#)).replace('\n', r"\n");
        format!(r#"{{{label}="{of}"}}"#)
    };
    let all = all.into_iter();
    all.map(|(of, value)| (label(of.to_string()), value))
        .collect()
}

/// Returns the text of metrics of one kind: name, help and samples. Every name begins with `egmem_`.
macro_rules! metrics {
    ($kind:expr; $($name:literal, $help:literal => $samples:expr;)*) => {
        [$(family($kind, $name, $help, $samples),)*].concat()
    };
}

fn family((kind, end): Kind, name: &str, help: &str, samples: Samples) -> String {
    if samples.is_empty() {
        return String::new();
    }
    let head = format!("# HELP egmem_{name} {help}.\n# TYPE egmem_{name} {kind}\n");
    let samples = samples.into_iter();
    let lines = samples.map(|(label, value)| format!("egmem_{name}{end}{label} {value}\n"));
    head + &lines.collect::<String>()
}

/// Returns a number of each node.
type OfNodes<'a> = &'a dyn Fn(fn(&Levels, &Counts) -> u64) -> Samples;

impl ServiceState {
    /// Returns the metrics in Prometheus' text form.
    pub fn metrics(&self) -> String {
        let server = self.server();
        let stats = server.map_or_else(ServerStats::default, |server| server.stats());
        let nodes = self.nodes.iter();
        let nodes = nodes.map(|(node, reserve)| (node.0, reserve.levels(), reserve.counts()));
        let nodes: Vec<_> = nodes.collect();
        let of_nodes = |of: fn(&Levels, &Counts) -> u64| {
            let nodes = nodes.iter();
            by(
                "node",
                nodes.map(|(node, levels, counts)| (node, of(levels, counts))),
            )
        };
        self.gauges(&stats, &of_nodes) + &self.counts(&stats, &of_nodes) + "# EOF\n"
    }

    /// Returns whether the service is ready, or the reason why not.
    pub fn readiness(&self) -> Result<(), String> {
        if self.draining.load(Relaxed) {
            return Err("draining".into());
        }
        match *self.unready.borrow() {
            0 => Ok(()),
            count => Err(format!(
                "{count} reserves or steps of the start are not done"
            )),
        }
    }

    /// Returns the numbers that rise and fall.
    fn gauges(&self, stats: &ServerStats, of_nodes: OfNodes<'_>) -> String {
        let (charged, owners) = self.ledger.all();
        // Without a directory, no sample.
        let registered = lock(&self.directory)
            .as_ref()
            .map(Registration::is_registered);
        metrics! { GAUGE;
            "directory_registered", "Whether the directory knows this service" => registered.map(one).unwrap_or_default();
            "ready", "Whether the service is ready" => one(self.readiness().is_ok());
            "draining", "Whether the service is ending" => one(self.draining.load(Relaxed));
            "connections", "Open connections" => one(stats.connections);
            "handshakes", "Open connections that have not been greeted yet" => one(stats.handshakes);
            "fds", "File descriptors open for peers" => one(stats.fds);
            "sessions", "Sessions, with and without a connection" => one(stats.sessions);
            "leases", "Leases that are held" => one(stats.leases);
            "names", "Published names" => one(stats.names);
            "published_bytes", "Published memory, padding included" => one(stats.bytes);
            "owners", "Peers that have created names" => one(owners as u64);
            "unconfirmed_bytes", "Bytes of deleted names that a silent holder may still have mapped"
                => one(charged.of(Use::Unconfirmed));
            "charged_bytes", "Bytes that count against peers' quotas, by what they are"
                => by("state", charged.by_use());
            "reserve_target_bytes", "Bytes to keep ready for any peer" => of_nodes(|node, _| node.target);
            "reserve_bytes", "Bytes ready for any peer" => of_nodes(|node, _| node.warm);
            "kept_bytes", "Bytes ready for the one peer that had them" => of_nodes(|node, _| node.kept);
            "dirty_bytes", "Bytes waiting to be zeroed" => of_nodes(|node, _| node.dirty_warm + node.dirty_kept);
            "pinned_bytes", "Bytes that the service has pinned" => of_nodes(|node, _| node.pinned);
        }
    }

    /// Returns the numbers that only rise.
    fn counts(&self, stats: &ServerStats, of_nodes: OfNodes<'_>) -> String {
        metrics! { COUNTER;
            "created", "Names created by request" => one(self.created.load(Relaxed));
            "deleted", "Names deleted by request" => one(self.deleted.load(Relaxed));
            "creations_refused", "Requests for memory that were refused"
                => one(self.refused.load(Relaxed));
            "forgiven_bytes", "Bytes of unconfirmed releases that no longer count after too long a silence"
                => one(self.forgiven_bytes.load(Relaxed));
            "dropped_log_lines", "Lines of the log that were not read in time"
                => one(self.log.get().map_or(0, LineWriter::dropped));
            "dropped_audit_lines", "Lines of the audit log that could not be written"
                => one(self.audit.as_ref().map_or(0, |audit| audit.lines.dropped()));
            "accepted", "Connections accepted" => one(stats.accepted);
            "failed_handshakes", "Connections that did not get to a welcome"
                => one(stats.failed_handshakes);
            "dropped_handshakes", "Connections that gave way to newer ones before a welcome"
                => one(stats.dropped_handshakes);
            "protocol_errors", "Connections ended because the peer broke the protocol"
                => one(stats.protocol_errors);
            "dropped_peers", "Connections ended because the peer was silent or slow, or had no room for a notice"
                => one(stats.dropped_peers);
            "resumed", "Sessions that went on after a broken connection" => one(stats.resumed);
            "requests", "Requests" => one(stats.requests);
            "fetches", "Leases granted" => one(stats.fetches);
            "released", "Leases released by their holders" => one(stats.released);
            "expired", "Leases that ended because their holder went silent" => one(stats.expired);
            "refusals", "Requests refused, by reason"
                => by("reason", stats.refusals.iter().map(|(reason, &count)| (reason, count)));
            "chunks_made", "Pieces of memory made by the driver" => of_nodes(|_, node| node.made_chunks);
            "made_bytes", "Bytes made by the driver" => of_nodes(|_, node| node.made_bytes);
            "chunks_failed", "Pieces of memory that the driver or a limit refused"
                => of_nodes(|_, node| node.failed_chunks);
            "taken_warm_bytes", "Bytes given out that were ready" => of_nodes(|_, node| node.taken_warm_bytes);
            "taken_cold_bytes", "Bytes given out that had to be made first"
                => of_nodes(|_, node| node.taken_cold_bytes);
            "scrubbed_bytes", "Bytes zeroed for reuse" => of_nodes(|_, node| node.scrubbed_bytes);
            "scrub_failures", "Pieces that could not be zeroed" => of_nodes(|_, node| node.scrub_failures);
            "discarded_tainted_bytes", "Bytes given up because a holder may still have them mapped"
                => of_nodes(|_, node| node.discarded_tainted_bytes);
            "discarded_policy_bytes", "Bytes given up by the reuse policy or because they were unused"
                => of_nodes(|_, node| node.discarded_policy_bytes);
            "evicted_bytes", "Bytes in reserve given up for requests" => of_nodes(|_, node| node.evicted_bytes);
        }
    }
}

#[cfg(test)]
mod tests;
