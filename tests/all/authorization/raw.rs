//! A client that keeps the bytes of the answers.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use egmem::exchange::protocol::{
    Answer, Ask, Event, FromServer, Greeting, Hello, MAGIC, Secret, VERSION, Welcome, decode,
    encode,
};
use egmem::share::BootId;
use egmem_tests::{Connection, ms};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use rustls::ClientConfig;

/// The number of every request, so that answers to the same question have the same bytes.
const ID: u64 = 7;

pub struct Raw {
    connection: Connection,
    /// Events that came between answers.
    pub events: Vec<Event>,
}

fn patience() -> Duration {
    ms(120_000)
}

impl Raw {
    /// Connects over TLS; the handshake takes place with the first byte.
    pub fn tls(address: &str, config: Arc<ClientConfig>) -> Self {
        Self::over(Connection::tls(address, "127.0.0.1", config, patience()).unwrap())
    }

    /// Connects to a Unix socket, where file descriptors that come are closed.
    pub fn unix(path: &Path) -> io::Result<Self> {
        Connection::unix(path, patience()).map(Self::over)
    }

    /// Connects to a Unix socket as another user; `None` where this process may not become another one.
    pub fn unix_as(user: u32, path: &Path) -> Option<io::Result<Self>> {
        let connect = || {
            let user = Uid::from_raw(user);
            // On Linux this changes the calling thread alone.
            set_thread_res_uid(user, user, user).ok()?;
            Some(Self::unix(path))
        };
        std::thread::scope(|scope| scope.spawn(connect).join().unwrap())
    }

    fn over(connection: Connection) -> Self {
        Self {
            connection,
            events: Vec::new(),
        }
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.connection.frame(bytes)
    }

    pub fn read(&mut self) -> io::Result<Vec<u8>> {
        self.connection.read_frame()
    }

    /// Says hello, of this machine.
    pub fn hello(&mut self, resume: Option<Secret>) -> io::Result<Greeting> {
        self.greet(resume, false)
    }

    /// Says hello, for a session that moves to this socket.
    pub fn moves(&mut self, resume: Option<Secret>) -> io::Result<Greeting> {
        self.greet(resume, true)
    }

    fn greet(&mut self, resume: Option<Secret>, moves: bool) -> io::Result<Greeting> {
        let hello = Hello {
            magic: MAGIC.into(),
            oldest: VERSION,
            newest: VERSION,
            boot: BootId::current().unwrap(),
            resume,
            agent: String::new(),
            moves,
            fabric: false,
        };
        self.write(&encode(&hello))?;
        decode(&self.read()?).map_err(io::Error::other)
    }

    /// Says hello, and is let in.
    #[track_caller]
    pub fn welcome(&mut self, resume: Option<Secret>) -> Welcome {
        match self.hello(resume).unwrap() {
            Greeting::Welcome(welcome) => welcome,
            other => panic!("{other:?}"),
        }
    }

    /// Sends a request, if the connection goes on.
    pub fn try_send(&mut self, ask: Ask) -> io::Result<()> {
        self.write(&encode(&(ID, ask)))
    }

    /// Sends a request.
    #[track_caller]
    pub fn send(&mut self, ask: Ask) {
        self.try_send(ask).unwrap();
    }

    /// The bytes of the answer to the request before, unless the connection ends first.
    pub fn try_answer_bytes(&mut self) -> io::Result<Vec<u8>> {
        loop {
            let bytes = self.read()?;
            match decode(&bytes).unwrap() {
                FromServer::Event(event) => self.events.push(event),
                FromServer::Reply(id, _) => {
                    assert_eq!(id, ID);
                    return Ok(bytes);
                }
            }
        }
    }

    /// The bytes of the answer to the request before.
    #[track_caller]
    pub fn answer_bytes(&mut self) -> Vec<u8> {
        self.try_answer_bytes().unwrap()
    }

    /// Asks; the answer's bytes.
    #[track_caller]
    pub fn ask_bytes(&mut self, ask: Ask) -> Vec<u8> {
        self.send(ask);
        self.answer_bytes()
    }

    /// Asks; the answer.
    #[track_caller]
    pub fn ask(&mut self, ask: Ask) -> Answer {
        answer(&self.ask_bytes(ask))
    }

    #[track_caller]
    pub fn ping(&mut self) {
        assert_eq!(self.ask(Ask::Ping), Answer::Done);
    }
}

/// The answer that a reply's bytes hold.
#[track_caller]
pub fn answer(bytes: &[u8]) -> Answer {
    match decode(bytes).unwrap() {
        FromServer::Reply(_, answer) => answer,
        other => panic!("{other:?}"),
    }
}

/// The word of a refusal.
#[track_caller]
pub fn refusal(bytes: &[u8]) -> String {
    match answer(bytes) {
        Answer::Refused(refused) => refused.reason,
        other => panic!("{other:?}"),
    }
}
