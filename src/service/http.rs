//! The HTTP endpoint: metrics, liveness and readiness.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, lookup_host};
use tokio::task::{AbortHandle, JoinHandle};

use super::metrics;
use crate::exchange::bind;
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

/// The content that the endpoint serves.
pub(super) trait Pages: Send + Sync + 'static {
    /// Returns the metrics as text.
    fn metrics(&self) -> String;
    /// Returns whether the service is ready, or the reason why not.
    fn readiness(&self) -> Result<(), String>;
}

/// A running endpoint, which ends when dropped.
#[derive(Debug)]
pub(super) struct Endpoint {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Endpoint {
    /// Listens at `address`: host and port.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an address that other machines reach,
    /// unless `anywhere`; [`System`](crate::MemoryError::System) if the socket cannot be opened.
    pub async fn start(address: &str, anywhere: bool, pages: Arc<dyn Pages>) -> Result<Self> {
        let fail = |error| Error::system(format!("cannot serve metrics at {address}"), &error);
        let found: Vec<SocketAddr> = lookup_host(address).await.map_err(fail)?.collect();
        if !anywhere && found.iter().any(|found| !found.ip().is_loopback()) {
            return Err(elsewhere(address));
        }
        let mut bound = Err(io::ErrorKind::AddrNotAvailable.into());
        for at in found {
            bound = bind(at);
            if bound.is_ok() {
                break;
            }
        }
        let (listener, address) = bound.map_err(fail)?;
        let task = tokio::spawn(accept(listener, pages));
        Ok(Self { address, task })
    }

    /// Returns the address that it listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns the error for an address that other machines may reach.
pub(super) fn elsewhere(address: &str) -> Error {
    Error::invalid(
        "metrics address",
        format!("other machines can reach {address}, and `metrics.anywhere` is not set"),
    )
}

async fn accept(listener: TcpListener, pages: Arc<dyn Pages>) {
    let mut open = VecDeque::<AbortHandle>::new();
    // Dropped with this task, and the connections' tasks with it.
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        while tasks.try_join_next().is_some() {}
        let (stream, _) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!(%error, "metrics: accept");
                if let Some(oldest) = open.pop_front() {
                    oldest.abort();
                }
                tokio::time::sleep(AFTER_FAILURE).await;
                continue;
            }
        };
        open.retain(|task| !task.is_finished());
        if open.len() >= CONNECTIONS
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
        }
        let pages = Arc::clone(&pages);
        let task = tasks.spawn(async move {
            let answer = service_fn(|request| {
                let response = respond(&request, &*pages);
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

fn respond(request: &Request<Incoming>, pages: &dyn Pages) -> Response<Full<Bytes>> {
    let (method, path) = (request.method(), request.uri().path());
    let (status, text) = match path {
        _ if method != Method::GET && method != Method::HEAD => {
            (StatusCode::METHOD_NOT_ALLOWED, "GET or HEAD\n".into())
        }
        "/metrics" => (StatusCode::OK, pages.metrics()),
        "/healthz" => (StatusCode::OK, "alive\n".into()),
        "/readyz" => match pages.readiness() {
            Ok(()) => (StatusCode::OK, "ready\n".into()),
            Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
        },
        _ => (
            StatusCode::NOT_FOUND,
            "/metrics, /healthz, /readyz\n".into(),
        ),
    };
    let is_metrics = path == "/metrics" && status == StatusCode::OK;
    let text_kind = "text/plain; charset=utf-8";
    let kind = if is_metrics {
        metrics::CONTENT_TYPE
    } else {
        text_kind
    };
    let is_head = method == Method::HEAD;
    let body = if is_head { String::new() } else { text };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    response
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;
    use crate::{MemoryError, ShareError};

    /// How long a test waits for an answer that never comes.
    const PATIENCE: Duration = Duration::from_secs(60);

    struct Two;

    impl Pages for Two {
        fn metrics(&self) -> String {
            "egmem_ready 0\n# EOF\n".into()
        }
        fn readiness(&self) -> Result<(), String> {
            Err("still filling".into())
        }
    }

    async fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn it_tells_what_it_is_asked_and_nothing_else() {
        let endpoint = Endpoint::start("127.0.0.1:0", false, Arc::new(Two))
            .await
            .unwrap();
        let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n");
        for (request, status, body) in [
            (get("/metrics"), "200", "# EOF\n"),
            (get("/healthz"), "200", "alive\n"),
            (get("/readyz"), "503", "still filling\n"),
            (get("/secret"), "404", "/metrics, /healthz, /readyz\n"),
            (
                get("/metrics").replace("GET", "POST"),
                "405",
                "GET or HEAD\n",
            ),
            ("garbage\r\n\r\n".into(), "400", ""),
            (
                format!(
                    "GET /metrics HTTP/1.1\r\nA: {}\r\n\r\n",
                    "a".repeat(64 << 10)
                ),
                "431",
                "",
            ),
        ] {
            let answer = ask(endpoint.address(), &request).await;
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")),
                "{answer}"
            );
            assert!(answer.ends_with(body), "{answer}");
        }
        let answer = ask(endpoint.address(), "HEAD /metrics HTTP/1.1\r\n\r\n").await;
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.ends_with("\r\n\r\n"),
            "{answer}"
        );
    }

    #[tokio::test]
    async fn other_machines_are_kept_out_unless_asked_for() {
        let error = Endpoint::start("0.0.0.0:0", false, Arc::new(Two))
            .await
            .unwrap_err();
        assert!(
            matches!(
                error,
                Error::Share(ShareError::Memory(MemoryError::InvalidArgument { .. }))
            ),
            "{error}"
        );
        let open = Endpoint::start("0.0.0.0:0", true, Arc::new(Two))
            .await
            .unwrap();
        let address = open.address();
        drop(open);
        for _ in 0..100 {
            if TcpStream::connect(("127.0.0.1", address.port()))
                .await
                .is_err()
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("it still listens");
    }

    /// Opens 1000 connections that never finish a request, then sends one.
    fn ask_beside_idle_connections(address: SocketAddr) {
        let connect = || {
            let stream = std::net::TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream
        };
        let open = |number| {
            let mut stream = connect();
            if number % 2 == 0 {
                // The endpoint may have closed it for newer ones already.
                let _ = stream.write_all(b"GET /metr");
            }
            stream
        };
        let idle: Vec<_> = (0..1000).map(open).collect();
        for path in ["/healthz", "/metrics", "/healthz", "/metrics"] {
            let mut stream = connect();
            let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n");
            stream.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            let read = stream.read_to_string(&mut answer);
            read.expect("the answer waits for a timer");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        drop(idle);
    }

    /// Idle connections do not delay an answer by 1 s: no answer waits for a timer.
    ///
    /// Tokio's paused clock stands still while a task of `spawn_blocking` runs, so no deadline of a
    /// connection passes before the last answer. Apart from timers, an answer takes only the processor's time
    /// for at most 1000 accepted connections, which depends on the machine and is not asserted.
    #[tokio::test(start_paused = true)]
    async fn answers_beside_a_thousand_idle_connections_wait_for_no_deadline() {
        let endpoint = Endpoint::start("127.0.0.1:0", false, Arc::new(Two))
            .await
            .unwrap();
        let most = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let raised = rustix::process::Rlimit {
            current: most.maximum,
            ..most
        };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
        let address = endpoint.address();
        let client = tokio::task::spawn_blocking(move || {
            let begun = tokio::time::Instant::now();
            ask_beside_idle_connections(address);
            begun.elapsed()
        });
        assert_eq!(client.await.unwrap(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_is_dropped() {
        let endpoint = Endpoint::start("127.0.0.1:0", false, Arc::new(Two))
            .await
            .unwrap();
        let mut stream = TcpStream::connect(endpoint.address()).await.unwrap();
        stream.write_all(b"GET /metr").await.unwrap();
        let mut answer = Vec::new();
        let read = tokio::time::timeout(2 * CONNECTION, stream.read_to_end(&mut answer));
        let _ = read.await.expect("closed by the other side");
    }
}
