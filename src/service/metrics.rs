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
use super::lines::{AuditFile, LineWriter};
use super::quota::Use;
use super::reserve::{Counts, Levels};
use super::state::ServiceState;
use crate::exchange::server::ServerStats;
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
    if !anywhere && found.iter().any(|found| !found.ip().is_loopback()) {
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
        _ => (
            StatusCode::NOT_FOUND,
            "/metrics, /healthz, /readyz\n".into(),
        ),
    };
    let body = if is_head { String::new() } else { text };
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    for (name, value) in [
        (CONTENT_TYPE, kind),
        (CACHE_CONTROL, "no-store"),
        (ALLOW, "GET, HEAD"),
    ] {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

/// A metric's type, and the end of its samples' name.
type Kind = (&'static str, &'static str);
const GAUGE: Kind = ("gauge", "");
const COUNTER: Kind = ("counter", "_total");

/// A metric's values, each with its label in braces.
struct Samples(Vec<(String, u64)>);

impl From<u64> for Samples {
    fn from(value: u64) -> Self {
        Self(vec![(String::new(), value)])
    }
}

impl Samples {
    /// Returns a sample for each value of a label.
    fn by(label: &str, all: impl IntoIterator<Item = (impl ToString, u64)>) -> Self {
        let all = all.into_iter();
        Self(
            all.map(|(of, value)| (format!("{{{label}={:?}}}", of.to_string()), value))
                .collect(),
        )
    }
}

/// Returns the text of metrics of one kind: name, help and samples. Every name begins with `egmem_`.
macro_rules! metrics {
    ($kind:expr; $($name:literal, $help:literal => $samples:expr;)*) => {
        [$(family($kind, $name, $help, $samples.into()),)*].concat()
    };
}

fn family((kind, end): Kind, name: &str, help: &str, Samples(samples): Samples) -> String {
    if samples.is_empty() {
        return String::new();
    }
    let head = format!("# HELP egmem_{name} {help}.\n# TYPE egmem_{name} {kind}\n");
    let samples = samples.into_iter();
    let lines = samples.map(|(label, value)| format!("egmem_{name}{end}{label} {value}\n"));
    head + &lines.collect::<String>()
}

/// Each node, and its reserve's numbers.
type Nodes = Vec<(i32, Levels, Counts)>;

impl ServiceState {
    /// Returns the metrics in Prometheus' text form.
    pub fn metrics(&self) -> String {
        let stats = self.server().map(|server| server.stats());
        let stats = stats.unwrap_or_default();
        let nodes = self.nodes.iter();
        let nodes = nodes.map(|(node, reserve)| (node.0, reserve.levels(), reserve.counts()));
        let nodes = nodes.collect();
        self.gauges(&stats, &nodes) + &self.counts(&stats, &nodes) + "# EOF\n"
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
    fn gauges(&self, stats: &ServerStats, nodes: &Nodes) -> String {
        let (charged, owners) = self.ledger.all();
        let registered = self.is_registered();
        let registered = registered.map(|is| (String::new(), u64::from(is)));
        let registered = Samples(registered.into_iter().collect());
        let of_nodes = |of: fn(&Levels) -> u64| {
            Samples::by(
                "node",
                nodes.iter().map(|(node, levels, _)| (node, of(levels))),
            )
        };
        metrics! { GAUGE;
            "directory_registered", "Whether the directory knows this service" => registered;
            "ready", "Whether the service is ready" => u64::from(self.readiness().is_ok());
            "draining", "Whether the service is ending" => u64::from(self.draining.load(Relaxed));
            "connections", "Open connections" => stats.connections;
            "handshakes", "Open connections that have not been greeted yet" => stats.handshakes;
            "fds", "File descriptors open for peers" => stats.fds;
            "sessions", "Sessions, with and without a connection" => stats.sessions;
            "leases", "Leases that are held" => stats.leases;
            "names", "Published names" => stats.names;
            "published_bytes", "Published memory, padding included" => stats.bytes;
            "owners", "Peers that have created names" => owners as u64;
            "unconfirmed_bytes", "Bytes of deleted names that a silent holder may still have mapped"
                => charged.of(Use::Unconfirmed);
            "charged_bytes", "Bytes that count against peers' quotas, by what they are"
                => Samples::by("state", charged.by_use());
            "reserve_target_bytes", "Bytes to keep ready for any peer" => of_nodes(|node| node.target);
            "reserve_bytes", "Bytes ready for any peer" => of_nodes(|node| node.warm);
            "kept_bytes", "Bytes ready for the one peer that had them" => of_nodes(|node| node.kept);
            "dirty_bytes", "Bytes waiting to be zeroed" => of_nodes(|node| node.dirty_warm + node.dirty_kept);
            "pinned_bytes", "Bytes that the service has pinned" => of_nodes(|node| node.pinned);
        }
    }

    /// Returns the numbers that only rise.
    fn counts(&self, stats: &ServerStats, nodes: &Nodes) -> String {
        let asked = &self.asked;
        let of_nodes = |of: fn(&Counts) -> u64| {
            Samples::by(
                "node",
                nodes.iter().map(|(node, _, counts)| (node, of(counts))),
            )
        };
        metrics! { COUNTER;
            "created", "Names created by request" => asked.created.load(Relaxed);
            "deleted", "Names deleted by request" => asked.deleted.load(Relaxed);
            "creations_refused", "Requests for memory that were refused"
                => asked.refused.load(Relaxed);
            "forgiven_bytes", "Bytes of unconfirmed releases that no longer count after too long a silence"
                => asked.forgiven_bytes.load(Relaxed);
            "dropped_log_lines", "Lines of the log that were not read in time"
                => self.log.get().map_or(0, LineWriter::dropped);
            "dropped_audit_lines", "Lines of the audit log that could not be written"
                => self.audit.as_ref().map_or(0, AuditFile::dropped);
            "accepted", "Connections accepted" => stats.accepted;
            "failed_handshakes", "Connections that did not get to a welcome"
                => stats.failed_handshakes;
            "dropped_handshakes", "Connections that gave way to newer ones before a welcome"
                => stats.dropped_handshakes;
            "protocol_errors", "Connections ended because the peer broke the protocol"
                => stats.protocol_errors;
            "dropped_peers", "Connections ended because the peer was silent or slow, or had no room for a notice"
                => stats.dropped_peers;
            "resumed", "Sessions that went on after a broken connection" => stats.resumed;
            "requests", "Requests" => stats.requests;
            "fetches", "Leases granted" => stats.fetches;
            "released", "Leases released by their holders" => stats.released;
            "expired", "Leases that ended because their holder went silent" => stats.expired;
            "refusals", "Requests refused, by reason"
                => Samples::by("reason", stats.refusals.iter().map(|(reason, &count)| (reason, count)));
            "chunks_made", "Pieces of memory made by the driver" => of_nodes(|node| node.made_chunks);
            "made_bytes", "Bytes made by the driver" => of_nodes(|node| node.made_bytes);
            "chunks_failed", "Pieces of memory that the driver or a limit refused"
                => of_nodes(|node| node.failed_chunks);
            "taken_warm_bytes", "Bytes given out that were ready" => of_nodes(|node| node.taken_warm_bytes);
            "taken_cold_bytes", "Bytes given out that had to be made first"
                => of_nodes(|node| node.taken_cold_bytes);
            "scrubbed_bytes", "Bytes zeroed for reuse" => of_nodes(|node| node.scrubbed_bytes);
            "scrub_failures", "Pieces that could not be zeroed" => of_nodes(|node| node.scrub_failures);
            "discarded_tainted_bytes", "Bytes given up because a holder may still have them mapped"
                => of_nodes(|node| node.discarded_tainted_bytes);
            "discarded_policy_bytes", "Bytes given up by the reuse policy or because they were unused"
                => of_nodes(|node| node.discarded_policy_bytes);
            "evicted_bytes", "Bytes in reserve given up for requests" => of_nodes(|node| node.evicted_bytes);
        }
    }
}

#[cfg(test)]
mod tests;
