//! A connection whose every byte is the caller's own, over a Unix socket, TCP or TLS.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ciborium::Value;
use egmem::exchange::protocol::{Hello, MAGIC, Secret, VERSION, encode};
use egmem::share::BootId;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

/// How long a hostile peer waits for anything.
const PATIENCE: Duration = Duration::from_secs(2);
/// The most bytes of an answer.
const LARGEST: usize = 16 << 20;

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// See the module.
pub struct Raw(Box<dyn Stream>);

impl Raw {
    pub fn unix(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(Box::new(stream)))
    }

    pub fn tcp(address: &str) -> io::Result<Self> {
        Ok(Self(Box::new(dial(address)?)))
    }

    pub fn tls(address: &str, config: &Arc<ClientConfig>) -> io::Result<Self> {
        let host = address.split(':').next().unwrap_or_default().to_owned();
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        let client = ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
        Ok(Self(Box::new(StreamOwned::new(client, dial(address)?))))
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)?;
        self.0.flush()
    }

    /// Sends bytes as a frame.
    pub fn frame(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.send(&framed(bytes))
    }

    /// The next frame.
    pub fn read(&mut self) -> io::Result<Value> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length)?;
        let length = u32::from_be_bytes(length) as usize;
        if length > LARGEST {
            return Err(io::Error::other("a frame that is too large"));
        }
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes)?;
        ciborium::from_reader(&bytes[..]).map_err(io::Error::other)
    }

    /// Says hello, as no session's successor, and returns the welcome.
    pub fn greet(&mut self) -> io::Result<Value> {
        self.frame(&hello(None, None))?;
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
        loop {
            let answer = self.read()?;
            if field(&answer, "id") == Some(&Value::from(id)) {
                return Ok(answer);
            }
        }
    }
}

fn dial(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Bytes with their length before them.
pub fn framed(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).expect("a short frame");
    [&length.to_be_bytes(), bytes].concat()
}

/// A hello's bytes.
pub fn hello(resume: Option<Secret>, held: Option<Vec<u64>>) -> Vec<u8> {
    encode(&Hello {
        magic: MAGIC.into(),
        oldest: VERSION,
        newest: VERSION,
        boot: BootId::from_bytes([7; 16]),
        fabric: true,
        resume,
        held,
        agent: "hostile".into(),
    })
    .to_vec()
}

/// A request's bytes: built field by field, as a program of another make would.
pub fn request(id: u64, what: &str, fields: serde_json::Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    let request = serde_json::json!({"id": id, what: fields});
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
