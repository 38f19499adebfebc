//! A TCP proxy between clients and a service, which cuts all its connections on request.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

/// Forwards connections until [`cut`](Self::cut) closes them.
pub struct Proxy {
    pub address: String,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    /// Listens at `host` for connections to `target`, in a thread that ends with the program.
    pub fn start(host: std::net::Ipv4Addr, target: String) -> Self {
        let listener = TcpListener::bind((host, 0)).expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let open = Arc::new(Mutex::new(Vec::new()));
        let streams = Arc::clone(&open);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(&target) else {
                    continue;
                };
                pump(&client, &server);
                pump(&server, &client);
                let mut open = streams.lock().unwrap_or_else(PoisonError::into_inner);
                open.extend([client, server]);
            }
        });
        Self { address, open }
    }

    /// Cuts all connections; returns how many there were, those ended before too.
    pub fn cut(&self) -> usize {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        for stream in open.iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        open.drain(..).count() / 2
    }
}

fn pump(from: &TcpStream, to: &TcpStream) {
    let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else {
        return;
    };
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
}
