//! The audit log: an event for each action, with its fields, and no secret in any of them.

use std::io::Write;
use std::sync::{Arc, Mutex};

use serde_json::Value;

use super::*;

/// The events that a server reported, as JSON lines.
#[derive(Clone, Default)]
struct Book(Arc<Mutex<Vec<u8>>>);

impl Write for Book {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Book {
    fn options(&self) -> ServerOptions {
        let book = self.clone();
        let events = tracing_subscriber::fmt().json().flatten_event(true);
        let events = events.with_writer(move || book.clone()).finish();
        loopback().audit(events.into())
    }

    fn all(&self, event: &str) -> Vec<Value> {
        let text = self.0.lock().unwrap().clone();
        let lines = text.split_inclusive(|&byte| byte == b'\n');
        let events = lines.map(|line| serde_json::from_slice::<Value>(line).unwrap());
        events.filter(|found| found["event"] == event).collect()
    }

    /// Waits for the only event of this kind.
    async fn one(&self, event: &str) -> Value {
        until(event, || !self.all(event).is_empty()).await;
        let all = self.all(event);
        assert_eq!(all.len(), 1, "{all:?}");
        assert_eq!(all[0]["target"], "egmem::audit");
        assert_eq!(all[0]["peer"], "local");
        all[0].clone()
    }

    /// Asserts that no secret's bytes are in any event, in any form.
    fn holds_none_of(&self, secrets: &[&[u8]]) {
        let text = self.0.lock().unwrap();
        for secret in secrets {
            assert!(secret.len() >= 16);
            let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
            let list = format!("{secret:?}");
            let forms = [
                secret.to_vec(),
                hex.to_uppercase().into_bytes(),
                hex.into_bytes(),
                list.trim_matches(['[', ']']).as_bytes().to_vec(),
                base64(secret),
            ];
            for form in &forms {
                let within = |text: &[u8]| text.windows(form.len()).any(|part| part == form);
                assert!(!within(&text));
            }
        }
    }
}

/// Asserts that an event has a field of this value.
#[track_caller]
fn has(event: &Value, field: &str, value: impl Into<Value>) {
    assert_eq!(event[field], value.into(), "{field} of {event}");
}

/// Returns how many events were suppressed in all.
fn counts(suppressed: &[Value]) -> u64 {
    let counts = suppressed.iter();
    counts.map(|event| event["count"].as_u64().unwrap()).sum()
}

/// Encodes all whole groups of three bytes in Base64.
fn base64(bytes: &[u8]) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |three: &[u8]| {
        let word = three
            .iter()
            .fold(0_u32, |word, &byte| word << 8 | u32::from(byte));
        [18, 12, 6, 0].map(|shift| DIGITS[(word >> shift & 63) as usize])
    };
    bytes.chunks_exact(3).flat_map(group).collect()
}

#[tokio::test]
async fn sessions_grants_releases_revocations_and_refusals_are_reported() {
    let (driver, book) = (driver(), Book::default());
    let server = book.options().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let session = book.one("session_begun").await["session"].clone();
    assert!(session.is_u64());

    let (first, _) = raw.fetch(fetch("a")).await.unwrap();
    let granted = book.one("granted").await;
    has(&granted, "session", session.clone());
    has(&granted, "lease", first.lease);
    has(&granted, "name", "a");
    has(&granted, "bytes", MIB);
    has(&granted, "owner", "@server");
    raw.release(first.lease).await;
    let released = book.one("released").await;
    has(&released, "lease", first.lease);
    has(&released, "name", "a");
    has(&released, "bytes", MIB);

    assert_eq!(raw.fetch(fetch("b")).await.unwrap_err(), Refusal::NotFound);
    let refused = book.one("refused").await;
    has(&refused, "request", "fetch");
    has(&refused, "name", "b");
    has(&refused, "reason", "not_found");

    let (second, _) = raw.fetch(fetch("a")).await.unwrap();
    drop(published);
    let revoked = book.one("revoked").await;
    has(&revoked, "lease", second.lease);
    has(&revoked, "bytes", MIB);
    let resumed = raw.resume(&server).await;
    has(
        &book.one("session_resumed").await,
        "session",
        session.clone(),
    );

    let mut secrets = vec![raw.welcome().session.expose().to_vec()];
    for granted in [&first, &second] {
        let Handles::Fabric(handles) = &granted.handles else {
            panic!()
        };
        secrets.extend(handles.iter().map(|handle| handle.expose().to_vec()));
    }
    drop((raw, resumed));
    close(server, &driver).await;
    has(&book.one("session_ended").await, "session", session);
    let secrets: Vec<&[u8]> = secrets.iter().map(Vec::as_slice).collect();
    book.holds_none_of(&secrets);
}

#[tokio::test]
async fn moves_withdrawals_and_expired_leases_are_reported() {
    let (driver, book) = (driver(), Book::default());
    // No holder falls silent before the test makes it.
    let options = book.options().heartbeat(LONG).lease(LONG);
    let server = options.start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await.moved().await;
    has(&book.one("session_moved").await, "pid", std::process::id());
    let (granted, _) = raw.fetch(fetch_fds("a")).await.unwrap();

    published.withdraw(short()).await.unwrap_err();
    has(&book.one("withdrawing").await, "lease", granted.lease);
    let token = raw.welcome().session.clone();
    drop(raw);
    until("it is noticed", || server.stats().connections == 0).await;
    server
        .handle
        .inner
        .state()
        .expire(std::time::Instant::now() + 2 * LONG);
    let expired = book.one("expired").await;
    has(&expired, "lease", granted.lease);
    has(&expired, "name", "a");
    book.holds_none_of(&[token.expose()]);
    drop(published);
    close(server, &driver).await;
}

#[tokio::test]
async fn recalled_leases_and_dismissed_sessions_are_reported() {
    let (driver, book) = (driver(), Book::default());
    let server = book.options().start().await.unwrap();
    let names = ["a", "b"];
    let published = names.map(|name| server.publish(name, memory(&driver)).now().unwrap());
    let mut raw = Raw::open(&server).await;
    let session = book.one("session_begun").await["session"].clone();
    let (recalled, _) = raw.fetch(fetch("a")).await.unwrap();
    let (held, _) = raw.fetch(fetch("b")).await.unwrap();

    published[0].set_who_within(PeerList::nobody(), short());
    for event in ["withdrawing", "revoked"] {
        let found = book.one(event).await;
        has(&found, "bytes", MIB);
        has(&found, "session", session.clone());
        has(&found, "lease", recalled.lease);
        has(&found, "name", "a");
    }

    assert_eq!(server.end_sessions(&PeerName::Local), 1);
    let dismissed = book.one("session_dismissed").await;
    has(&dismissed, "reason", "forbidden");
    has(&dismissed, "session", session.clone());
    let expired = book.one("expired").await;
    has(&expired, "session", session.clone());
    has(&expired, "lease", held.lease);
    has(&expired, "name", "b");
    has(&book.one("session_ended").await, "session", session);
    drop((raw, published));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_peer_cannot_fill_the_disk_by_connecting_in_a_loop() {
    const TRIES: u64 = 300;
    let begun = std::time::Instant::now();
    let (driver, book) = (driver(), Book::default());
    let server = book.options().start().await.unwrap();
    for _ in 0..TRIES {
        drop(Raw::open(&server).await);
        until("few are left", || server.stats().sessions < 8).await;
    }
    until("none is left", || server.stats().sessions == 0).await;
    close(server, &driver).await;
    let seconds = begun.elapsed().as_secs();
    let written = (book.all("session_begun").len() + book.all("session_ended").len()) as u64;
    let suppressed = book.all("suppressed");
    assert!(written <= 256 + seconds + 1, "{written} in {seconds} s");
    assert!(suppressed.len() as u64 <= seconds + 1, "{suppressed:?}");
    assert!(suppressed.iter().all(|event| event["kind"] == "session"));
    let told: u64 = counts(&suppressed);
    assert_eq!(written + told, 2 * TRIES, "each is written or counted");
}

#[tokio::test]
async fn a_silent_server_tells_how_many_events_were_suppressed() {
    let (driver, book) = (driver(), Book::default());
    let server = book.options().start().await.unwrap();
    let mut raw = Raw::open(&server).await;
    for _ in 0..100 {
        let refusal = raw.fetch(fetch("a b")).await.unwrap_err();
        assert_eq!(refusal, Refusal::Invalid);
    }
    drop(raw);
    until("it is told", || !book.all("suppressed").is_empty()).await;
    close(server, &driver).await;
}

#[tokio::test]
async fn a_peer_cannot_fill_the_disk_by_being_refused() {
    const TRIES: usize = 1000;
    let (driver, book) = (driver(), Book::default());
    let server = book.options().start().await.unwrap();
    let mut raw = Raw::open(&server).await;
    for _ in 0..TRIES {
        let hostile = format!("b\u{1b}[2J\n{}", "x".repeat(1000));
        assert_eq!(
            raw.fetch(fetch(&hostile)).await.unwrap_err(),
            Refusal::Invalid
        );
    }
    drop(raw);
    close(server, &driver).await;
    let (refused, suppressed) = (book.all("refused"), book.all("suppressed"));
    assert!(!suppressed.is_empty());
    let told = counts(&suppressed);
    assert_eq!(
        refused.len() as u64 + told,
        TRIES as u64,
        "each is written or counted"
    );
    for event in refused {
        let name = event["name"].as_str().unwrap();
        assert!(name.len() <= MAX_NAME && !name.contains(crate::text::is_unsafe));
    }
}

#[tokio::test]
async fn a_peer_cannot_fill_the_disk_by_fetching_in_a_loop() {
    const TRIES: u64 = 4000;
    let begun = std::time::Instant::now();
    let (driver, book) = (driver(), Book::default());
    let server = book.options().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    for _ in 0..TRIES {
        let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
        raw.release(granted.lease).await;
    }
    drop((raw, published));
    close(server, &driver).await;
    let seconds = begun.elapsed().as_secs();
    let written = (book.all("granted").len() + book.all("released").len()) as u64;
    let suppressed = book.all("suppressed");
    assert!(
        written <= 4096 + 16 * (seconds + 1),
        "{written} in {seconds} s"
    );
    assert!(suppressed.iter().all(|event| event["kind"] == "memory"));
    assert_eq!(
        written + counts(&suppressed),
        2 * TRIES,
        "each is written or counted"
    );
}
