//! The cost of the types over the bare driver: the chain create → reserve → map → grant → release
//! through `Buffer`, by the driver trait's calls, and in C, in turns, in one process, on a GPU.
//!
//! ```sh
//! cc -O2 -shared -fPIC -o /tmp/libegmchain.so benches/c/chain.c -ldl
//! cargo run --release -p egmem-benches --bin measure-chain -- --c-lib /tmp/libegmchain.so
//! ```

use std::ffi::{c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use egmem::driver::{Access, AccessDesc, AllocationProps, Driver, Location};
use egmem::size::Bytes;
use egmem::{Buffer, Error, Explained, Result, Topology};
use serde::Serialize;

/// Measures the chain create, reserve, map, grant (host and one GPU), release.
#[derive(Debug, Parser)]
#[command(name = "measure-chain")]
struct Args {
    /// The shared library made of benches/c/chain.c; by default the one that the environment
    /// variable EGMEM_C_CHAIN names, else libegmchain.so where the loader finds it, else C is left
    /// out.
    #[arg(long, value_name = "PATH")]
    c_lib: Option<PathBuf>,

    /// Sizes, each rounded up to the granularity.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "2MiB,64MiB"
    )]
    size: Vec<Bytes>,

    /// Which GPU, by ordinal.
    #[arg(long, default_value_t = 0)]
    gpu: i32,

    /// Chains of each kind and size; large sizes get fewer.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(10..))]
    repeats: u32,

    /// Print JSON alone.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    // Times on the simulator mean nothing, so there is no choice of driver.
    let measured = match Driver::open() {
        Ok(driver) => measure(&args, &driver),
        Err(error) if std::env::var_os("EGMEM_REQUIRE_CUDA").is_some() => Err(error),
        Err(error) => {
            eprintln!("measure-chain: nothing to measure: {}", Explained(&error));
            return ExitCode::SUCCESS;
        }
    };
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("measure-chain: {}", Explained(&error));
            ExitCode::FAILURE
        }
    }
}

#[derive(Debug, Serialize)]
struct Row {
    bytes: u64,
    repeats: usize,
    /// Microseconds.
    types: Times,
    calls: Times,
    c: Option<Times>,
    /// Medians: types over C, or null without C.
    types_over_c: Option<f64>,
    types_over_calls: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Times {
    median: f64,
    /// The quartiles.
    low: f64,
    high: f64,
}

fn measure(args: &Args, driver: &Driver) -> Result<()> {
    let topology = Topology::discover(driver)?;
    let node = topology.gpu(args.gpu)?.host_node()?;
    let named = args.c_lib.clone();
    let named = named.or_else(|| std::env::var_os("EGMEM_C_CHAIN").map(PathBuf::from));
    let c = match named {
        Some(path) => Some(CChain::load(&path)?),
        None => CChain::load(Path::new("libegmchain.so"))
            .map_err(|error| eprintln!("measure-chain: without C: {error}"))
            .ok(),
    };
    let granule = egmem::vmm::PhysicalMemory::options(node)
        .granularity_of(driver)?
        .bytes();

    let mut rows = Vec::new();
    for &Bytes(bytes) in &args.size {
        let bytes = bytes.max(1).next_multiple_of(granule);
        // The time goes with the size; each row gets about as long, but never fewer than 30.
        let repeats = u64::from(args.repeats) / (bytes / granule).max(1);
        let repeats = repeats.max(30.min(u64::from(args.repeats))) as usize;
        let by_types = || {
            Buffer::on(node)
                .access_by([Location::Device(args.gpu)])
                .bytes(bytes)
                .allocate(driver)
                .map(drop)
        };
        let by_calls = || chain_by_calls(driver, node.into(), args.gpu, bytes);
        let in_c = || match &c {
            Some(c) => c.run(node.0, args.gpu, bytes),
            None => Ok(()),
        };
        let variants: [&dyn Fn() -> Result<()>; 3] = [&by_types, &by_calls, &in_c];
        let mut times: [Vec<f64>; 3] = Default::default();
        // In turns, so that drift hits all alike, and each in each place, since the previous
        // variant may matter. The first rounds warm up and do not count.
        for round in 0..repeats + repeats / 10 + 3 {
            for place in 0..variants.len() {
                let which = (round + place) % variants.len();
                let start = Instant::now();
                variants[which]()?;
                let time = start.elapsed();
                if round >= repeats / 10 + 3 {
                    times[which].push(time.as_secs_f64() * 1e6);
                }
            }
        }
        let [types, calls, in_c] = times.map(Times::of);
        rows.push(Row {
            bytes,
            repeats,
            types,
            calls,
            c: c.is_some().then_some(in_c),
            types_over_c: c.is_some().then_some(types.median / in_c.median),
            types_over_calls: types.median / calls.median,
        });
    }

    if args.json {
        println!(
            "{}",
            serde_json::to_string_pretty(&rows).unwrap_or_default()
        );
    } else {
        println!("{}", table(&rows));
        println!("Medians in µs, quartiles in brackets. Types over C: the ratio of the medians.");
    }
    Ok(())
}

impl Times {
    fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |part: usize| times.get(times.len() * part / 4).copied().unwrap_or(0.0);
        Self {
            median: at(2),
            low: at(1),
            high: at(3),
        }
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header([
        "size",
        "repeats",
        "types",
        "calls",
        "C",
        "types / C",
        "types / calls",
    ]);
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let show = |t: Times| format!("{:.1} [{:.1}–{:.1}]", t.median, t.low, t.high);
    for row in rows {
        table.add_row([
            Bytes(row.bytes).to_string(),
            row.repeats.to_string(),
            show(row.types),
            show(row.calls),
            row.c.map_or("–".into(), show),
            row.types_over_c
                .map_or("–".into(), |ratio| format!("{ratio:.4}")),
            format!("{:.4}", row.types_over_calls),
        ]);
    }
    table
}

fn chain_by_calls(driver: &Driver, node: Location, gpu: i32, bytes: u64) -> Result<()> {
    let handle = driver.mem_create(bytes, &AllocationProps::at(node))?;
    let ptr = driver.mem_address_reserve(bytes, 0, 0)?;
    let access = [node, Location::Device(gpu)].map(|location| AccessDesc {
        location,
        access: Access::ReadWrite,
    });
    // SAFETY: the range was just reserved and the memory just created, nobody else knows of
    // either, and both are given back in order; a failure ends the program.
    unsafe {
        driver.mem_map(ptr, bytes, 0, handle)?;
        driver.mem_set_access(ptr, bytes, &access)?;
        driver.mem_unmap(ptr, bytes)?;
        driver.mem_address_free(ptr, bytes)?;
        driver.mem_release(handle)
    }
}

/// benches/c/chain.c, loaded.
struct CChain {
    run: unsafe extern "C" fn(c_int, *const c_int, usize, usize) -> c_int,
    // Keeps the code loaded.
    _library: libloading::Library,
}

impl CChain {
    fn load(path: &Path) -> Result<Self> {
        let refuse = |detail: String| Error::MissingLibrary {
            library: "the C chain (--c-lib)",
            detail,
        };
        // SAFETY: the file is benches/c/chain.c, which does nothing when loaded.
        let library =
            unsafe { libloading::Library::new(path) }.map_err(|error| refuse(error.to_string()))?;
        // SAFETY: the types are those of the functions' definitions in benches/c/chain.c; `run` is
        // kept no longer than the library.
        let (open, run) = unsafe {
            let open = library
                .get::<unsafe extern "C" fn(*const c_char) -> c_int>(b"egm_chain_open\0")
                .map(|symbol| *symbol);
            (open, library.get(b"egm_chain_c\0").map(|symbol| *symbol))
        };
        let open = open.map_err(|error| refuse(error.to_string()))?;
        let run = run.map_err(|error| refuse(error.to_string()))?;
        // SAFETY: a null name stands for libcuda.so.1.
        match unsafe { open(std::ptr::null()) } {
            0 => Ok(Self {
                run,
                _library: library,
            }),
            code => Err(refuse(format!("egm_chain_open answers {code}"))),
        }
    }

    fn run(&self, node: i32, gpu: i32, bytes: u64) -> Result<()> {
        // SAFETY: `gpu` is one ordinal, as the count says; opened by `load`.
        match unsafe { (self.run)(node, &gpu, 1, bytes as usize) } {
            0 => Ok(()),
            code => Err(Error::system(
                "the chain in C",
                &std::io::Error::other(format!("CUDA result {code}")),
            )),
        }
    }
}
