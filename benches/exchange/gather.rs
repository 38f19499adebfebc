//! All-gathers over plain TCP in the manner of the bootstraps of collective libraries: every rank brings some
//! bytes and ends with those of all; and barriers in the same manner. No authentication, no leases, no deadlines.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// How often a gather is tried where connections are reset, as the kernel does where many are made at
/// once.
const ATTEMPTS: usize = 5;

/// Runs a gather until it succeeds. Failed attempts are part of the measured time, so each is printed:
/// the figure is not one of an undisturbed run.
async fn complete(what: &str, gather: impl AsyncFn() -> io::Result<()>) {
    for attempt in 1.. {
        match gather().await {
            Ok(()) => return,
            Err(error) if attempt < ATTEMPTS => eprintln!("{what}: {error}: once more"),
            Err(error) => panic!("{what}: {error}, {ATTEMPTS} times in a row"),
        }
    }
}

/// Waits for all ranks. The first error ends the others.
async fn all(mut ranks: JoinSet<io::Result<()>>) -> io::Result<()> {
    while let Some(rank) = ranks.join_next().await {
        rank.expect("a rank without a panic")?;
    }
    Ok(())
}

async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok(stream)
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

/// Rank 0 collects the bytes of all ranks and sends them to each: 2 × (n − 1) messages.
pub async fn star(size: usize, length: usize) {
    complete("star", async || star_once(size, length).await).await;
}

async fn star_once(size: usize, length: usize) -> io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let mut ranks = JoinSet::new();
    ranks.spawn(async move {
        let mut all = vec![0; size * length];
        all[..length].copy_from_slice(&bytes(0, length));
        let mut streams = Vec::new();
        for _ in 1..size {
            let mut stream = accept(&listener).await?;
            let rank = stream.read_u32().await? as usize;
            stream
                .read_exact(&mut all[rank * length..][..length])
                .await?;
            streams.push(stream);
        }
        for stream in &mut streams {
            stream.write_all(&all).await?;
        }
        assert!(whole(&all, size, length));
        Ok(())
    });
    for rank in 1..size {
        ranks.spawn(async move {
            let mut stream = connect(address).await?;
            let mut message = (rank as u32).to_be_bytes().to_vec();
            message.extend(bytes(rank, length));
            stream.write_all(&message).await?;
            let mut all = vec![0; size * length];
            stream.read_exact(&mut all).await?;
            assert!(whole(&all, size, length));
            Ok(())
        });
    }
    all(ranks).await
}

/// Every rank, rank 0 too, sends a byte to a task on an open connection, which answers when all have. Does so
/// `times` times, and returns the duration.
pub async fn barriers(size: usize, times: u64) -> Duration {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("its number");
    let root = tokio::spawn(async move {
        let mut streams = Vec::new();
        for _ in 0..size {
            streams.push(accept(&listener).await?);
        }
        for _ in 0..times {
            for stream in &mut streams {
                stream.read_u8().await?;
            }
            for stream in &mut streams {
                stream.write_u8(1).await?;
            }
        }
        Ok::<_, io::Error>(())
    });
    let mut streams = Vec::new();
    for _ in 0..size {
        streams.push(connect(address).await.expect("a connection"));
    }
    let start = Instant::now();
    let mut ranks = JoinSet::new();
    for mut stream in streams {
        ranks.spawn(async move {
            for _ in 0..times {
                stream.write_u8(1).await?;
                stream.read_u8().await?;
            }
            Ok(())
        });
    }
    all(ranks).await.expect("barriers");
    let took = start.elapsed();
    root.await
        .expect("a task without a panic")
        .expect("barriers");
    took
}

/// Rank 0 tells each rank its neighbour's address, 2 × n messages; then the bytes of all go round
/// the ring, n × (n − 1) messages.
pub async fn ring(size: usize, length: usize) {
    complete("ring", async || ring_once(size, length).await).await;
}

async fn ring_once(size: usize, length: usize) -> io::Result<()> {
    let root = TcpListener::bind("127.0.0.1:0").await?;
    let address = root.local_addr()?;
    let mut ranks = JoinSet::new();
    ranks.spawn(async move {
        let mut streams = Vec::new();
        let mut ports = vec![0; size];
        for _ in 0..size {
            let mut stream = accept(&root).await?;
            let rank = stream.read_u32().await? as usize;
            ports[rank] = stream.read_u16().await?;
            streams.push((rank, stream));
        }
        for (rank, stream) in &mut streams {
            stream.write_u16(ports[(*rank + 1) % size]).await?;
        }
        Ok(())
    });
    for rank in 0..size {
        ranks.spawn(async move {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            let port = listener.local_addr()?.port();
            let mut root = connect(address).await?;
            let mut message = (rank as u32).to_be_bytes().to_vec();
            message.extend(port.to_be_bytes());
            root.write_all(&message).await?;
            let port = root.read_u16().await?;
            let mut next = connect((address.ip(), port).into()).await?;
            let mut before = accept(&listener).await?;
            let mut all = vec![0; size * length];
            all[rank * length..][..length].copy_from_slice(&bytes(rank, length));
            for step in 0..size - 1 {
                let sent = (rank + size - step) % size;
                next.write_all(&all[sent * length..][..length]).await?;
                let read = (sent + size - 1) % size;
                before
                    .read_exact(&mut all[read * length..][..length])
                    .await?;
            }
            assert!(whole(&all, size, length));
            Ok(())
        });
    }
    all(ranks).await
}
