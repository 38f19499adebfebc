//! How many bytes the protocol's messages have, so that others are measured with the same.

use egmem::driver::{Access, HandleType};
use egmem::exchange::Owner;
use egmem::exchange::protocol::{
    Answer, Ask, Fetch, FromServer, Granted, Handles, Request, Secret, encode,
};
use egmem::share::Description;

/// A request and its reply, in bytes of their frames without the length.
#[derive(Clone, Copy)]
pub struct Exchange {
    pub ask: usize,
    pub answer: usize,
}

/// The exchanges that are measured.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// A name for its description and its fabric handle.
    pub fetch: Exchange,
    /// The lease's end.
    pub release: Exchange,
}

/// A fetch of this name and its reply.
pub fn fetch(name: &str, memory: &Description) -> (Request, FromServer) {
    let fetch = Ask::Fetch(Fetch {
        name: name.to_string(),
        accept: vec![HandleType::Fabric, HandleType::PosixFd],
        access: Some(Access::ReadWrite),
        probe: false,
        instance: None,
        owner: None,
    });
    let handle = Secret::new(&[7; 64]).expect("64 bytes");
    let granted = Answer::Granted(Granted {
        lease: 1000,
        memory: memory.clone(),
        handles: Handles::Fabric(vec![handle]),
        probe: None,
        no_fabric: None,
        owner: Owner::Server,
    });
    pair(fetch, granted)
}

fn pair(ask: Ask, answer: Answer) -> (Request, FromServer) {
    let id = 1000; // of three bytes, like most
    ((id, ask), FromServer::Reply(id, answer))
}

fn sizes((request, reply): &(Request, FromServer)) -> Exchange {
    Exchange {
        ask: encode(request).len(),
        answer: encode(reply).len(),
    }
}

impl Sizes {
    /// Of memory like this, under a name like this.
    pub fn of(name: &str, memory: &Description) -> Self {
        let release = pair(Ask::Release { lease: 1000 }, Answer::Done);
        Self {
            fetch: sizes(&fetch(name, memory)),
            release: sizes(&release),
        }
    }
}
