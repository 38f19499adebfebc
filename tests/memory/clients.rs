//! Many clients in one process.

use egmem::exchange::{Address, Client, Server};
use egmem::{Driver, Machine};

use crate::counting::live;
use crate::peer::PATIENCE;
use crate::runtime;
use egmem_tests::alone;

/// A client's share of 40 MiB for 1,000 clients, in which the server's end is counted too.
const CLIENT: usize = (40 << 20) / 1000;

/// Opens as many files as this process may; returns for how many clients there is room.
fn room() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).unwrap();
    // A server lets a peer have an eighth.
    let most = limit.maximum.unwrap_or(u64::MAX) / 8;
    usize::try_from(most).unwrap_or(usize::MAX).min(1000)
}

#[test]
fn a_thousand_clients_fit_in_forty_mebibytes() {
    let name = "a_thousand_clients_fit_in_forty_mebibytes";
    alone(module_path!(), name, a_thousand_clients);
}

fn a_thousand_clients() {
    let count = room();
    runtime().block_on(async {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let server = Server::options().listen(Address::loopback(0));
        let server = server.start().await.unwrap();
        let connect = || Client::options(server.addresses().remove(0)).connect(&driver);
        drop(connect().await.unwrap());
        let before = live();
        let mut clients = Vec::with_capacity(count);
        for _ in 0..count {
            clients.push(connect().await.unwrap());
        }
        let each = live().saturating_sub(before) / count;
        assert!(each <= CLIENT, "{each} bytes for each of {count} clients");
        drop(clients);
        server.close(PATIENCE).await.unwrap();
    });
}
