//! The gain from a warm reserve: gigabytes taken from a running `egmem serve`, made anew, and from
//! cudaHostAlloc, in turns, in one run. The service is a child process, reached over a Unix socket.
//!
//! ```sh
//! cargo build --release -p egmem-cli
//! cargo run --release -p egmem-benches --bin warm-fetch
//! ```
//!
//! Each way ends with the memory mapped and granted to the host and one GPU. At most three times the
//! size is pinned at once. On the simulator (`--sim gh200`) it runs the same, smaller, without times.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::Parser;
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use egmem::driver::{Driver, Location, NodeId};
use egmem::exchange::{Address, Client, CreateOptions, Error, RemoteBuffer, Result};
use egmem::pinned::PinnedHost;
use egmem::proof::Prover;
use egmem::size::Bytes;
use egmem::{Buffer, Explained, Machine, Topology};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

/// How long the service may take for anything: 16 GiB are made in 4 s, zeroed in less.
const PATIENCE: Duration = Duration::from_secs(300);

/// Measures memory taken from a running service, made anew, and by cudaHostAlloc.
#[derive(Debug, Parser)]
#[command(name = "warm-fetch")]
struct Args {
    /// How much memory; 16GiB, on the simulator 64MiB.
    #[arg(long)]
    size: Option<Bytes>,

    /// The pieces of the service's reserve.
    #[arg(long)]
    chunk: Option<Bytes>,

    /// Rounds; the table shows medians.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// Which GPU, by ordinal; the memory is on its host node.
    #[arg(long, default_value_t = 0)]
    gpu: i32,

    /// The program egmem; by default the one that EGMEM_TEST_PROGRAM names, else the one that was built
    /// beside this example.
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,

    /// Simulate a machine instead: nothing is timed.
    #[arg(long, value_name = "PRESET")]
    sim: Option<String>,

    /// Print JSON after the table.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let driver = match &args.sim {
        Some(preset) => Machine::preset(preset).and_then(Driver::simulated),
        None => match Driver::open() {
            Err(error) if std::env::var_os("EGMEM_REQUIRE_CUDA").is_none() => {
                eprintln!("warm-fetch: nothing to measure: {}", Explained(&error));
                return ExitCode::SUCCESS;
            }
            opened => opened,
        },
    };
    match driver
        .map_err(Error::from)
        .and_then(|driver| run(&args, &driver))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("warm-fetch: {}", Explained(&error));
            ExitCode::FAILURE
        }
    }
}

/// The ways, as the table shows them.
const WAYS: [&str; 4] = [
    "created and fetched from the service's reserve",
    "fetched once more, a name that is there",
    "made anew: cuMemCreate, map, grant",
    "cudaHostAlloc",
];

fn run(args: &Args, driver: &Driver) -> Result<()> {
    let simulated = driver.is_simulated();
    let size = args
        .size
        .map_or(if simulated { 64 << 20 } else { 16 << 30 }, |size| size.0);
    let chunk = args
        .chunk
        .map_or((512 << 20).min(size / 4), |chunk| chunk.0);
    let chunk = chunk.next_multiple_of(2 << 20).max(2 << 20);
    let node = Topology::discover(driver)?.gpu(args.gpu)?.host_node()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Error::system("cannot start a runtime", &error))?;
    let prover = Prover::new(driver, args.gpu)?;
    // Everything that is made once is made before the first time is taken.
    drop(PinnedHost::new(driver, args.gpu, 2 << 20)?);

    let service = Service::start(args, node, size, chunk)?;
    let client =
        runtime.block_on(Client::options(Address::Unix(service.socket.clone())).connect(driver))?;
    let mut times = vec![Vec::new(); WAYS.len()];
    let mut parts = 0;
    for round in 0..args.rounds {
        let name = format!("{}/warm-fetch/{round}", client.name());
        let begun = Instant::now();
        let memory = runtime.block_on(async {
            let ask = CreateOptions::new(name.as_str(), size).node(node);
            client.create(ask).await?;
            fetch(&client, &name, args.gpu).await
        })?;
        times[0].push(begun.elapsed());
        parts = memory.description().parts.len();
        use_it(&prover, &memory, round.into())?;
        runtime.block_on(memory.release())?;

        let begun = Instant::now();
        let memory = runtime.block_on(fetch(&client, &name, args.gpu))?;
        times[1].push(begun.elapsed());
        // The first user's bytes are still there.
        expect_word(memory.get(0)?, round.into())?;
        runtime.block_on(async {
            memory.release().await?;
            client.delete(name.as_str(), PATIENCE).await
        })?;
        service.wait_until_clean()?;

        let begun = Instant::now();
        let memory = Buffer::on(node)
            .access_by([Location::Device(args.gpu)])
            .bytes(size)
            .shareable()
            .allocate(driver)?;
        times[2].push(begun.elapsed());
        memory.put(size - 8, 1_u64)?;
        drop(memory);

        let begun = Instant::now();
        let memory = PinnedHost::new(driver, args.gpu, size)?;
        times[3].push(begun.elapsed());
        memory.cpu().put(size - 8, 1_u64)?;
        drop(memory);
    }
    runtime.block_on(client.close());
    service.end()?;
    report(args, driver, size, chunk, parts, times);
    Ok(())
}

async fn fetch(client: &Client, name: &str, gpu: i32) -> Result<RemoteBuffer> {
    client
        .fetch(name)
        .access_by([Location::Device(gpu)])
        .go()
        .await
}

/// The CPU writes the first and the last word, and the GPU reads all: zeroes but for those two.
fn use_it(prover: &Prover, memory: &RemoteBuffer, word: u64) -> Result<()> {
    let last = memory.len() - 8;
    memory.put(0, word)?;
    memory.put(last, u64::MAX)?;
    expect_word(prover.read(memory)?, word ^ u64::MAX)
}

fn expect_word(found: u64, expected: u64) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(Error::Share(egmem::share::Error::Memory(
            egmem::Error::WrongBytes {
                by: Location::Host,
                offset: 0,
                expected,
                found,
            },
        ))),
    }
}

/// A running `egmem serve`, killed when dropped.
struct Service {
    child: Child,
    socket: PathBuf,
    metrics: String,
    folder: PathBuf,
}

impl Service {
    fn start(args: &Args, node: NodeId, size: u64, chunk: u64) -> Result<Self> {
        let fail = |what: &str| {
            let what = format!("warm-fetch: {what}");
            move |error: std::io::Error| Error::system(what, &error)
        };
        let folder = std::env::temp_dir().join(format!("egmem-warm-fetch-{}", std::process::id()));
        std::fs::create_dir(&folder).map_err(fail("a folder for the socket"))?;
        let socket = folder.join("egmem.sock");
        let config = folder.join("egmem.toml");
        // Nothing is made beyond the reserve: deleted memory comes back to this user, zeroed.
        let text = format!(
            "listen = [\"unix:{}\"]\n\
             [create]\nwho = [\"*\"]\npeer_bytes = \"{size}\"\n\
             [[reserve]]\nnode = {node}\nbytes = \"{size}\"\nchunk = \"{chunk}\"\nmin_chunk = \"2MiB\"\n\
             [node]\nmax_bytes = \"{size}\"\nheadroom = \"0\"\n\
             [reuse]\nkeep = \"{size}\"\nthreads = 16\n\
             [metrics]\naddress = \"127.0.0.1:0\"\n",
            socket.display(),
        );
        std::fs::write(&config, text).map_err(fail("the configuration"))?;
        let mut command = Command::new(program(args));
        command
            .args(["serve".as_ref(), "--config".as_ref(), config.as_os_str()])
            .stdout(Stdio::piped());
        if let Some(sim) = &args.sim {
            command.args(["--sim", sim]);
        }
        let mut child = command.spawn().map_err(fail("cannot start egmem serve"))?;
        let stdout = child.stdout.take();
        let mut service = Self {
            child,
            socket,
            metrics: String::new(),
            folder,
        };
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout
                .into_iter()
                .flat_map(|out| BufReader::new(out).lines())
            {
                let _ = tell.send(line.unwrap_or_default());
            }
        });
        loop {
            let line = told.recv_timeout(PATIENCE).map_err(|_| {
                Error::Share(egmem::share::Error::PeerLost {
                    peer: "egmem serve".into(),
                    why: "it does not get ready; see above".into(),
                })
            })?;
            if let Some(address) = line.strip_prefix("metrics at http://") {
                service.metrics = address.trim_end_matches("/metrics").into();
            }
            if line.starts_with("ready") {
                return Ok(service);
            }
        }
    }

    /// Waits until deleted memory is zeroed and ready again.
    fn wait_until_clean(&self) -> Result<()> {
        let fail = |error: std::io::Error| Error::system("asking for metrics", &error);
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            let mut stream = TcpStream::connect(&self.metrics).map_err(fail)?;
            let request = format!("GET /metrics HTTP/1.1\r\nHost: {}\r\n\r\n", self.metrics);
            stream.write_all(request.as_bytes()).map_err(fail)?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).map_err(fail)?;
            let mut dirty = answer
                .lines()
                .filter(|line| line.starts_with("egmem_dirty_bytes{"));
            if dirty.all(|line| line.ends_with(" 0")) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err(Error::Share(egmem::share::Error::TimedOut {
            what: "zeroing".into(),
            after: PATIENCE,
        }))
    }

    /// Ends it, and says how that went.
    fn end(mut self) -> Result<()> {
        let fail = |error: std::io::Error| Error::system("ending egmem serve", &error);
        kill_process(Pid::from_child(&self.child), Signal::TERM)
            .map_err(|error| fail(error.into()))?;
        let status = self.child.wait().map_err(fail)?;
        match status.success() {
            true => Ok(()),
            false => Err(Error::Share(egmem::share::Error::PeerLost {
                peer: "egmem serve".into(),
                why: status.to_string(),
            })),
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn program(args: &Args) -> PathBuf {
    if let Some(program) = &args.program {
        return program.clone();
    }
    if let Some(program) = std::env::var_os("EGMEM_TEST_PROGRAM") {
        return program.into();
    }
    // Beside this program.
    std::env::current_exe()
        .unwrap_or_default()
        .with_file_name("egmem")
}

fn report(
    args: &Args,
    driver: &Driver,
    size: u64,
    chunk: u64,
    parts: usize,
    times: Vec<Vec<Duration>>,
) {
    let rounds = args.rounds;
    let shown = Bytes(size);
    if driver.is_simulated() {
        println!("SIMULATED: {shown} in {parts} parts, each way {rounds} times; nothing is timed.");
        return;
    }
    let medians: Vec<f64> = times.into_iter().map(median).collect();
    println!(
        "{shown} in {parts} parts of {}, medians of {rounds}:",
        Bytes(chunk)
    );
    let mut table = Table::new();
    table
        .load_preset(UTF8_FULL_CONDENSED)
        .set_header(["way", "ms", "GB/s", "times as long"]);
    for (way, median) in WAYS.iter().zip(&medians) {
        table.add_row([
            (*way).to_owned(),
            format!("{:.1}", median * 1e3),
            format!("{:.2}", size as f64 / median / 1e9),
            format!("{:.2}", median / medians[0]),
        ]);
    }
    for column in 1..4 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    println!("{table}");
    if args.json {
        let ways: Vec<_> = WAYS
            .iter()
            .zip(&medians)
            .map(|(way, median)| json!({"way": way, "median_ms": median * 1e3}))
            .collect();
        println!(
            "{}",
            json!({
                "gpu": driver.device_name(args.gpu).unwrap_or_default(),
                "bytes": size,
                "chunk_bytes": chunk,
                "parts": parts,
                "rounds": rounds,
                "ways": ways,
                "anew_over_service": medians[2] / medians[0],
                "cuda_host_alloc_over_service": medians[3] / medians[0],
            })
        );
    }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    let middle = times.len() / 2;
    match times.len() % 2 {
        1 => times[middle].as_secs_f64(),
        _ => (times[middle - 1] + times[middle]).as_secs_f64() / 2.0,
    }
}
