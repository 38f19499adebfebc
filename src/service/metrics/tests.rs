use std::io::{Read, Write};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::{MemoryError, ShareError};

/// How long a test waits for an answer that never comes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the state of a service that is not ready, with no node.
fn state() -> Arc<ServiceState> {
    let unready = Arc::new(tokio::sync::watch::Sender::new(1));
    Arc::new(ServiceState {
        unready,
        ..ServiceState::default()
    })
}

async fn start(address: &str, anywhere: bool) -> Result<(SocketAddr, JoinSet<()>)> {
    let address = address.into();
    serve(&MetricsConfig { address, anywhere }, state()).await
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
    let endpoint = start("127.0.0.1:0", false).await.unwrap();
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n");
    for (request, status, body) in [
        (get("/metrics"), "200", "# EOF\n"),
        (get("/healthz"), "200", "alive\n"),
        (
            get("/readyz"),
            "503",
            "1 reserves or steps of the start are not done\n",
        ),
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
        let answer = ask(endpoint.0, &request).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{answer}"
        );
        assert!(answer.ends_with(body), "{answer}");
    }
    let answer = ask(endpoint.0, "HEAD /metrics HTTP/1.1\r\n\r\n").await;
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.ends_with("\r\n\r\n"),
        "{answer}"
    );
}

#[tokio::test]
async fn other_machines_are_kept_out_unless_asked_for() {
    let error = start("0.0.0.0:0", false).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Share(ShareError::Memory(MemoryError::InvalidArgument { .. }))
        ),
        "{error}"
    );
    let open = start("0.0.0.0:0", true).await.unwrap();
    let address = open.0;
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
    let endpoint = start("127.0.0.1:0", false).await.unwrap();
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit {
        current: most.maximum,
        ..most
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let address = endpoint.0;
    let client = tokio::task::spawn_blocking(move || {
        let begun = tokio::time::Instant::now();
        ask_beside_idle_connections(address);
        begun.elapsed()
    });
    assert_eq!(client.await.unwrap(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_silent_client_is_dropped() {
    let endpoint = start("127.0.0.1:0", false).await.unwrap();
    let mut stream = TcpStream::connect(endpoint.0).await.unwrap();
    stream.write_all(b"GET /metr").await.unwrap();
    let mut answer = Vec::new();
    let read = tokio::time::timeout(2 * CONNECTION, stream.read_to_end(&mut answer));
    let _ = read.await.expect("closed by the other side");
}

#[test]
fn metrics_are_comments_and_samples() {
    let text = metrics! { GAUGE;
        "ready", "Whether it is ready" => one(1_u64);
        "none", "None" => by("node", [0; 0].map(|node| (node, 0)));
    } + &metrics! { COUNTER;
        "fetches", "Leases granted" => one(u64::MAX);
        "refusals", "By reason" => by("reason", [("quota\"\n\\", 2), ("limit", 3)]);
    };
    let expected = r#"# HELP egmem_ready Whether it is ready.
# TYPE egmem_ready gauge
egmem_ready 1
# HELP egmem_fetches Leases granted.
# TYPE egmem_fetches counter
egmem_fetches_total 18446744073709551615
# HELP egmem_refusals By reason.
# TYPE egmem_refusals counter
egmem_refusals_total{reason="quota\"\n\\"} 2
egmem_refusals_total{reason="limit"} 3
"#;
    assert_eq!(text, expected);
    let others = by("of", [("\t'é\u{7f}", 1)]);
    assert_eq!(others[0].0, "{of=\"\t'é\u{7f}\"}");
}
