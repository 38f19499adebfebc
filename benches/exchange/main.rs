//! The exchange beside its alternatives, over the loopback device of this machine: a
//! bare mutual-TLS ping-pong of the same bytes and etcd. The network path
//! is real. The memory is simulated, also where there is a GPU: the protocol is measured.

mod bare;
mod certificates;
#[cfg(feature = "etcd")]
mod etcd;
mod ours;
mod report;
mod sizes;

use std::hint::black_box;
use std::time::{Duration, Instant};

use bare::Client;
use certificates::Certificates;
use criterion::Criterion;
use egmem::driver::{Access, HandleType};
use egmem::exchange::protocol::{FromServer, Request, decode, encode};
use egmem::share::Shared;
use egmem::{Buffer, Driver, Machine};
use ours::Exporter;
use report::{Group, measure};
use sizes::Sizes;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

/// The name under which the memory is published.
const NAME: &str = "kv/node-0/gpu-0";
/// How many clients are connected at once.
const CLIENTS: usize = 1000;
/// The certificates and the simulated memory that the exchange's server and the baselines share.
struct Setting {
    certificates: Certificates,
    memory: Shared,
    importer: Driver,
    sizes: Sizes,
}

/// A granule of a simulated machine's memory, which can be shared by fd and by fabric handle.
fn memory(driver: &Driver) -> egmem::Result<Shared> {
    let node = egmem::Topology::discover(driver)?.gpu(0)?.host_node()?;
    let buffer = Buffer::on(node)
        .shareable()
        .bytes(2 << 20)
        .allocate(driver)?;
    Ok(buffer.into())
}

impl Setting {
    fn create() -> egmem::Result<Self> {
        let memory = memory(&Driver::simulated(Machine::gb200())?)?;
        let sizes = Sizes::of(NAME, &memory.describe(Access::ReadWrite)?);
        let importer = Driver::simulated(Machine::gb200())?;
        let certificates = Certificates::create();
        Ok(Self {
            certificates,
            memory,
            importer,
            sizes,
        })
    }
}

/// The time that `work` takes so many times, one after another.
async fn repeat(times: u64, mut work: impl AsyncFnMut()) -> Duration {
    let start = Instant::now();
    for _ in 0..times {
        work().await;
    }
    start.elapsed()
}

/// A server's runtime, which runs in the background.
fn server_runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime")
}

/// A client's runtime. Each end has one thread, as two processes with little to do would.
fn client_runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().expect("a runtime")
}

/// Measures encoding and decoding of a fetch's messages, at both ends together.
fn codec(criterion: &mut Criterion, setting: &Setting) {
    const GROUP: Group = ("messages of a fetch", 40);
    let mut group = criterion.benchmark_group(GROUP.0);
    let memory = setting
        .memory
        .describe(Access::ReadWrite)
        .expect("a description");
    let (request, reply) = sizes::fetch(NAME, &memory);
    measure(&mut group, GROUP, "encoded and decoded", |times| {
        let start = Instant::now();
        for _ in 0..times {
            decode::<Request>(&encode(black_box(&request))).expect("a request");
            decode::<FromServer>(&encode(black_box(&reply))).expect("a reply");
        }
        start.elapsed()
    });
    group.finish();
}

/// One client on an open connection, which fetches and releases.
fn one_client(criterion: &mut Criterion, setting: &Setting) {
    const GROUP: Group = ("fetch and release, one client", 40);
    let mut group = criterion.benchmark_group(GROUP.0);
    let (servers, clients) = (server_runtime(), client_runtime());
    let Sizes { fetch, release, .. } = setting.sizes;
    let address = servers.block_on(bare::serve(&setting.certificates));
    let mut client = clients.block_on(Client::connect(address, &setting.certificates));
    measure(&mut group, GROUP, "bare TLS", |times| {
        clients.block_on(repeat(times, async || {
            client.ping(fetch).await;
            client.ping(release).await;
        }))
    });
    let server = servers.block_on(Exporter::start(setting));
    let client = clients.block_on(ours::connect(&server, setting));
    measure(&mut group, GROUP, "handles", |times| {
        clients.block_on(repeat(times, async || ours::handles(&client).await))
    });
    measure(&mut group, GROUP, "handles and import", |times| {
        clients.block_on(repeat(times, async || {
            ours::import(&client, HandleType::Fabric).await
        }))
    });
    measure(&mut group, GROUP, "POSIX fds and import", |times| {
        clients.block_on(repeat(times, async || {
            ours::import(&client, HandleType::PosixFd).await
        }))
    });
    let held = clients.block_on(async { client.fetch(NAME).via(HandleType::Fabric).await });
    let held = held.expect("memory");
    measure(&mut group, GROUP, "handles, imported before", |times| {
        clients.block_on(repeat(times, async || {
            ours::import(&client, HandleType::Fabric).await
        }))
    });
    clients.block_on(async {
        held.release().await.expect("a release");
        client.close().await;
    });
    servers.block_on(server.close());
    group.finish();
}

/// All clients at once, each on an open connection of its own.
fn all_clients(criterion: &mut Criterion, setting: &Setting) {
    const GROUP: Group = ("fetch and release, 1 000 clients at once", 40);
    let mut group = criterion.benchmark_group(GROUP.0);
    let (servers, clients) = (server_runtime(), client_runtime());
    let Sizes { fetch, release, .. } = setting.sizes;
    let address = servers.block_on(bare::serve(&setting.certificates));
    let mut connected = clients.block_on(async {
        let mut connected = Vec::new();
        for _ in 0..CLIENTS {
            connected.push(Client::connect(address, &setting.certificates).await);
        }
        connected
    });
    measure(&mut group, GROUP, "bare TLS", |times| {
        clients.block_on(repeat(times, async || {
            let mut tasks = JoinSet::new();
            for mut client in connected.drain(..) {
                tasks.spawn(async move {
                    client.ping(fetch).await;
                    client.ping(release).await;
                    client
                });
            }
            connected = tasks.join_all().await;
        }))
    });
    drop(connected);
    let server = servers.block_on(Exporter::start(setting));
    let connected = clients.block_on(async {
        let mut connected = Vec::new();
        for _ in 0..CLIENTS {
            connected.push(ours::connect(&server, setting).await);
        }
        connected
    });
    measure(&mut group, GROUP, "handles", |times| {
        clients.block_on(repeat(times, async || {
            let mut tasks = JoinSet::new();
            for client in &connected {
                let client = client.clone();
                tasks.spawn(async move { ours::handles(&client).await });
            }
            tasks.join_all().await;
        }))
    });
    clients.block_on(async {
        for client in connected {
            client.close().await;
        }
    });
    servers.block_on(server.close());
    group.finish();
}

/// The same bytes put into etcd and got from there, by one client on an open connection.
#[cfg(feature = "etcd")]
fn through_etcd(criterion: &mut Criterion, setting: &Setting) {
    const GROUP: Group = ("through etcd, one client", 40);
    let Some(etcd) = etcd::Etcd::start(&setting.certificates) else {
        return;
    };
    let mut group = criterion.benchmark_group(GROUP.0);
    let clients = client_runtime();
    let mut client = clients.block_on(etcd.connect(&setting.certificates));
    let value = vec![7; setting.sizes.fetch.answer];
    measure(&mut group, GROUP, "get", |times| {
        let mut kv = client.kv_client();
        clients.block_on(async {
            client
                .put("name", value.clone(), None)
                .await
                .expect("a put");
            repeat(times, async || {
                let got = kv.get("name", None).await.expect("a get");
                assert_eq!(got.kvs()[0].value(), value);
            })
            .await
        })
    });
    measure(
        &mut group,
        GROUP,
        "put, which waits for the disk",
        |times| {
            clients.block_on(repeat(times, async || {
                client
                    .put("name", value.clone(), None)
                    .await
                    .expect("a put");
            }))
        },
    );
    group.finish();
}

/// 1 000 connections are as many files at each end.
fn allow_many_files() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel may write to `limit`, and the limit that is set is the one that was read.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
}

fn main() {
    allow_many_files();
    let mut criterion = Criterion::default().configure_from_args();
    let setting = Setting::create().expect("a simulated machine");
    let Sizes { fetch, release } = setting.sizes;
    println!(
        "a fetch: {} bytes, its reply: {}; a release: {}, {}",
        fetch.ask, fetch.answer, release.ask, release.answer
    );
    codec(&mut criterion, &setting);
    one_client(&mut criterion, &setting);
    all_clients(&mut criterion, &setting);
    #[cfg(feature = "etcd")]
    through_etcd(&mut criterion, &setting);
    criterion.final_summary();
    report::print();
}
