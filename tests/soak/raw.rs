//! A connection whose every byte is the caller's own, over a Unix socket, TCP or TLS.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ciborium::Value;
use egmem::exchange::protocol::{Hello, MAGIC, Secret, VERSION, encode};
use egmem::share::BootId;
use egmem_tests::Connection;
use rustls::ClientConfig;

/// How long a hostile peer waits for anything.
const PATIENCE: Duration = Duration::from_secs(2);

/// See the module.
pub struct Raw(Connection);

impl Raw {
    pub fn unix(path: &Path) -> io::Result<Self> {
        Connection::unix(path, PATIENCE).map(Self)
    }

    pub fn tcp(address: &str) -> io::Result<Self> {
        Connection::tcp(address, PATIENCE).map(Self)
    }

    pub fn tls(address: &str, config: &Arc<ClientConfig>) -> io::Result<Self> {
        let host = address.split(':').next().unwrap_or_default();
        Connection::tls(address, host, Arc::clone(config), PATIENCE).map(Self)
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.send(bytes)
    }

    /// Sends bytes as a frame.
    pub fn frame(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.frame(bytes)
    }

    /// The next frame.
    pub fn read(&mut self) -> io::Result<Value> {
        let bytes = self.0.read_frame()?;
        ciborium::from_reader(&bytes[..]).map_err(io::Error::other)
    }

    /// Says hello, as no session's successor, and returns the welcome.
    pub fn greet(&mut self) -> io::Result<Value> {
        self.frame(&hello(None))?;
        let greeting = self.read()?;
        field(&greeting, "welcome")
            .cloned()
            .ok_or_else(|| io::Error::other("refused"))
    }

    /// Sends a request.
    pub fn request(&mut self, id: u64, what: &str, fields: serde_json::Value) -> io::Result<()> {
        self.frame(&request(id, what, fields))
    }

    /// Sends a request and returns its answer; events in between are skipped.
    pub fn ask(&mut self, id: u64, what: &str, fields: serde_json::Value) -> io::Result<Value> {
        self.request(id, what, fields)?;
        self.answer(id)
    }

    /// Returns the answer to a request; events in between are skipped.
    pub fn answer(&mut self, id: u64) -> io::Result<Value> {
        loop {
            let message = self.read()?;
            let reply = field(&message, "reply").and_then(Value::as_array);
            if let Some([of, answer]) = reply.map(Vec::as_slice)
                && *of == Value::from(id)
            {
                return Ok(answer.clone());
            }
        }
    }
}

/// A hello's bytes.
pub fn hello(resume: Option<Secret>) -> Vec<u8> {
    hello_of(resume, false)
}

/// The same, of a session that moves to a Unix socket.
pub fn hello_of(resume: Option<Secret>, moves: bool) -> Vec<u8> {
    encode(&Hello {
        magic: MAGIC.into(),
        oldest: VERSION,
        newest: VERSION,
        boot: BootId::from_bytes([7; 16]),
        resume,
        agent: "hostile".into(),
        moves,
        fabric: false,
    })
    .to_vec()
}

/// A request's bytes: built field by field, as a program of another make would. `null` stands for no fields.
pub fn request(id: u64, what: &str, fields: serde_json::Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    let request = match fields {
        serde_json::Value::Null => serde_json::json!([id, what]),
        fields => serde_json::json!([id, {what: fields}]),
    };
    ciborium::into_writer(&request, &mut bytes).expect("written to memory");
    bytes
}

/// A map's value.
pub fn field<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    let entries = value.as_map()?;
    let found = entries.iter().find(|(name, _)| name.as_text() == Some(key));
    found.map(|(_, value)| value)
}

/// Why an answer refuses, if it does.
pub fn refusal(answer: &Value) -> Option<&str> {
    field(field(answer, "refused")?, "reason")?.as_text()
}

/// The names of an answer's entries.
pub fn names(answer: &Value) -> Vec<String> {
    let entries = field(answer, "names").and_then(|names| field(names, "entries"));
    let entries = entries.and_then(Value::as_array);
    let names = entries.into_iter().flatten();
    names
        .filter_map(|entry| Some(field(entry, "name")?.as_text()?.to_owned()))
        .collect()
}
