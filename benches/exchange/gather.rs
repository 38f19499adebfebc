//! All-gathers over plain TCP in the manner of the bootstraps of collective libraries: every rank
//! brings some bytes and ends with everybody's. No authentication, no leases, no deadlines.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

async fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).await.expect("a connection");
    stream.set_nodelay(true).expect("no delay");
    stream
}

async fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().await.expect("a connection");
    stream.set_nodelay(true).expect("no delay");
    stream
}

/// A rank's bytes: its number, again and again.
fn bytes(rank: usize, length: usize) -> Vec<u8> {
    (rank as u32)
        .to_be_bytes()
        .into_iter()
        .cycle()
        .take(length)
        .collect()
}

/// Whether `all` has every rank's bytes, in order.
fn whole(all: &[u8], size: usize, length: usize) -> bool {
    all.len() == size * length
        && all
            .chunks(length)
            .enumerate()
            .all(|(rank, chunk)| chunk[..4] == (rank as u32).to_be_bytes())
}

/// Rank 0 collects everybody's bytes and sends each all of them: 2 × (n − 1) messages.
pub async fn star(size: usize, length: usize) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("its number");
    let mut ranks = JoinSet::new();
    ranks.spawn(async move {
        let mut all = vec![0; size * length];
        all[..length].copy_from_slice(&bytes(0, length));
        let mut streams = Vec::new();
        for _ in 1..size {
            let mut stream = accept(&listener).await;
            let rank = stream.read_u32().await.expect("a rank") as usize;
            stream
                .read_exact(&mut all[rank * length..][..length])
                .await
                .expect("its bytes");
            streams.push(stream);
        }
        for stream in &mut streams {
            stream.write_all(&all).await.expect("all sent");
        }
        assert!(whole(&all, size, length));
    });
    for rank in 1..size {
        ranks.spawn(async move {
            let mut stream = connect(address).await;
            let mut message = (rank as u32).to_be_bytes().to_vec();
            message.extend(bytes(rank, length));
            stream
                .write_all(&message)
                .await
                .expect("a rank's bytes sent");
            let mut all = vec![0; size * length];
            stream
                .read_exact(&mut all)
                .await
                .expect("everybody's bytes");
            assert!(whole(&all, size, length));
        });
    }
    ranks.join_all().await;
}

/// Rank 0 tells each rank its neighbour's address, 2 × n messages; then everybody's bytes go round
/// the ring, n × (n − 1) messages.
pub async fn ring(size: usize, length: usize) {
    let root = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = root.local_addr().expect("its number");
    let mut ranks = JoinSet::new();
    ranks.spawn(async move {
        let mut streams = Vec::new();
        let mut ports = vec![0; size];
        for _ in 0..size {
            let mut stream = accept(&root).await;
            let rank = stream.read_u32().await.expect("a rank") as usize;
            ports[rank] = stream.read_u16().await.expect("its port");
            streams.push((rank, stream));
        }
        for (rank, stream) in &mut streams {
            stream
                .write_u16(ports[(*rank + 1) % size])
                .await
                .expect("a neighbour's port sent");
        }
    });
    for rank in 0..size {
        ranks.spawn(async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let port = listener.local_addr().expect("its number").port();
            let mut root = connect(address).await;
            let mut message = (rank as u32).to_be_bytes().to_vec();
            message.extend(port.to_be_bytes());
            root.write_all(&message).await.expect("a port sent");
            let port = root.read_u16().await.expect("the neighbour's port");
            let mut next = connect((address.ip(), port).into()).await;
            let mut before = accept(&listener).await;
            let mut all = vec![0; size * length];
            all[rank * length..][..length].copy_from_slice(&bytes(rank, length));
            for step in 0..size - 1 {
                let sent = (rank + size - step) % size;
                next.write_all(&all[sent * length..][..length])
                    .await
                    .expect("a slice sent");
                let read = (sent + size - 1) % size;
                before
                    .read_exact(&mut all[read * length..][..length])
                    .await
                    .expect("a slice");
            }
            assert!(whole(&all, size, length));
        });
    }
    ranks.join_all().await;
}
