//! Output of a size that is not known in advance: records of 16 bytes, on the GPU's host node, that a kernel makes of
//! 100 in 256 items. Milliseconds from the launch until the records are there, memory included.
//! - `appender, mapped`: an `Appender` that has all the memory before, with its cursor in the GPU's memory;
//! - `appender, growing`: one that begins with 16 MiB, and maps more while the kernel runs;
//! - `appender, cursor on host`: as `mapped`, with the cursor on the host node;
//! - `cursor`: a plain cursor in memory that was made large enough before: no growth, no check;
//! - `count first`: a kernel that counts, a buffer of that size, and the kernel with a plain cursor;
//! - `device malloc`, a part of its own: a piece from the device's heap for each warp's records, in a list. That heap
//!   has 8 MiB unless a program sets a limit, so it gets few items only.

use std::ffi::CStr;
use std::time::Instant;

use egmem::driver::{Location, NodeId};
use egmem::pinned::DeviceMemory;
use egmem::shapes::{Appender, device};
use egmem::size::Bytes;
use egmem::{Buffer, Driver, Error, Memory, Result, Topology};

use crate::gpu::{Kernels, median_and_p99};

const BESIDE: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("beside.ptx"), "\0").as_bytes()) {
        Ok(ptx) => ptx,
        Err(_) => panic!("beside.ptx holds a NUL"),
    };

type Record = [u64; 2];

/// Of 256 items, how many make a record.
const SHARE: u64 = 100;
const FEW: u64 = 1 << 18;
const MANY: u64 = 1 << 26;
/// How long a thread waits for memory, in nanoseconds.
const PATIENCE: u64 = 20_000_000_000;

struct Setting {
    driver: Driver,
    node: NodeId,
    ours: Kernels,
    beside: Kernels,
    /// Counters of the kernels beside.
    counters: DeviceMemory,
    grid: (u32, u32),
}

/// Milliseconds, and records.
type Measured = (f64, u64);

fn since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

impl Setting {
    /// Returns a counter after the kernels that are submitted.
    fn counter(&self, offset: u64) -> Result<u64> {
        let stream = &self.beside.stream;
        stream.copy(&self.beside.report, 0, &self.counters, offset, 8)?;
        self.beside.report.cpu().get(0)
    }

    fn appender(&self, items: u64, ahead: Option<usize>, cursor: Location) -> Result<Measured> {
        let options = Appender::<Record>::on(self.node).max_len(items as usize);
        let options = options.cursor_on(cursor).step(64 << 20);
        let mut appender = match ahead {
            Some(records) => options.ahead(records).create(&self.driver)?,
            None => options.create(&self.driver)?,
        };
        let args = [appender.device_ptr().0, items, SHARE, 0, PATIENCE];
        let start = Instant::now();
        // SAFETY: the appender's memory stays until the stream's work has ended.
        let came = unsafe {
            self.ours
                .start_bare(device::APPEND_ITEMS, self.grid, &args)?;
            appender.pump_while(&self.ours.stream)?;
            appender.collect()?
        };
        let time = since(start);
        match came.missed {
            0 => Ok((time, came.records.len() as u64)),
            missed => Err(Error::failed(
                "the appender",
                format!("{missed} records were missed"),
            )),
        }
    }

    fn buffer(&self, records: u64) -> Result<Buffer> {
        Buffer::on(self.node)
            .bytes(records * 16)
            .allocate(&self.driver)
    }

    /// Writes with a plain cursor.
    fn write(&self, items: u64, to: &Buffer) -> Result<u64> {
        let stream = &self.beside.stream;
        stream.fill(&self.counters, 0, 8, 0)?;
        let args = [
            items,
            SHARE,
            to.device_ptr().0,
            self.counters.device_ptr().0,
        ];
        // SAFETY: the buffer has room for all records, and lives until the counter was read.
        unsafe { self.beside.start_bare(c"beside_write", self.grid, &args)? };
        self.counter(0)
    }

    fn cursor(&self, items: u64) -> Result<Measured> {
        let buffer = self.buffer(items * SHARE / 200)?;
        let start = Instant::now();
        let records = self.write(items, &buffer)?;
        Ok((since(start), records))
    }

    fn count_first(&self, items: u64) -> Result<Measured> {
        let start = Instant::now();
        self.beside.stream.fill(&self.counters, 0, 8, 0)?;
        let args = [items, SHARE, self.counters.device_ptr().0];
        // SAFETY: the counters live.
        unsafe { self.beside.start_bare(c"beside_count", self.grid, &args)? };
        let buffer = self.buffer(self.counter(0)?)?;
        let records = self.write(items, &buffer)?;
        Ok((since(start), records))
    }

    fn device_malloc(&self, items: u64) -> Result<Measured> {
        self.beside.stream.fill(&self.counters, 0, 16, 0)?;
        let list = self.counters.device_ptr();
        let args = [items, SHARE, list.0, list.add(8).0];
        let start = Instant::now();
        // SAFETY: the counters live.
        unsafe { self.beside.start_bare(c"beside_malloc", self.grid, &args)? };
        let missed = self.counter(8)?;
        let time = since(start);
        // SAFETY: as above; nothing else uses the list.
        unsafe {
            let args = [list.0, list.add(8).0];
            self.beside.start_bare(c"beside_free", (1, 1), &args)?;
        }
        match missed {
            0 => Ok((time, self.counter(8)?)),
            _ => Err(Error::failed(
                "the device's heap",
                format!("{missed} records had no room"),
            )),
        }
    }
}

/// Returns the objects for the measurements; `None` without a GPU.
fn setting(driver: &Driver) -> Result<Option<Setting>> {
    println!("records of 16 bytes of 100 in 256 items");
    if driver.is_simulated() {
        println!("no GPU: its kernels are not measured");
        return Ok(None);
    }
    Ok(Some(Setting {
        driver: driver.clone(),
        node: Topology::discover(driver)?.gpu(0)?.host_node()?,
        ours: Kernels::load(driver, device::PTX)?,
        beside: Kernels::load(driver, BESIDE)?,
        counters: DeviceMemory::new(driver, 0, 64)?,
        grid: (1056, 256),
    }))
}

type Way<'a> = (&'a str, Box<dyn Fn() -> Result<Measured> + 'a>);

/// Prints the tables.
pub fn run(driver: &Driver, rounds: usize) -> Result<()> {
    let Some(setting) = setting(driver)? else {
        return Ok(());
    };
    for items in [FEW, MANY] {
        table(&ways(&setting, items), items, rounds)?;
    }
    Ok(())
}

/// Prints the table of the device's heap.
pub fn run_device_malloc(driver: &Driver, rounds: usize) -> Result<()> {
    let Some(setting) = setting(driver)? else {
        return Ok(());
    };
    let way: Way<'_> = ("device malloc", Box::new(|| setting.device_malloc(FEW)));
    table(&[way], FEW, rounds)
}

fn ways(setting: &Setting, items: u64) -> Vec<Way<'_>> {
    let gpu = Location::Device(0);
    let all = Some((items * SHARE / 200) as usize);
    vec![
        (
            "appender, mapped",
            Box::new(move || setting.appender(items, all, gpu)),
        ),
        (
            "appender, growing",
            Box::new(move || setting.appender(items, None, gpu)),
        ),
        (
            "appender, cursor on host",
            Box::new(move || setting.appender(items, all, setting.node.into())),
        ),
        ("cursor", Box::new(move || setting.cursor(items))),
        ("count first", Box::new(move || setting.count_first(items))),
    ]
}

fn table(ways: &[Way<'_>], items: u64, rounds: usize) -> Result<()> {
    let mut times = vec![Vec::new(); ways.len()];
    let mut records = vec![0; ways.len()];
    for round in 0..=rounds {
        for turn in 0..ways.len() {
            let index = (turn + round) % ways.len();
            let (name, way) = &ways[index];
            match way() {
                Ok((time, found)) => {
                    records[index] = found;
                    times[index].extend((round > 0).then_some(time));
                }
                // The others are measured all the same.
                Err(error) => println!("{name}: {error}"),
            }
        }
    }
    let expected = records.iter().copied().max().unwrap_or(0);
    println!("{items} items, {} of records", Bytes(expected * 16));
    println!("{:<26} {:>10} {:>16}", "way", "ms", "M records per s");
    for (((name, _), times), found) in ways.iter().zip(times).zip(&records) {
        if times.len() < rounds {
            continue;
        }
        assert_eq!(*found, expected, "{name}");
        let (median, _) = median_and_p99(times);
        let rate = *found as f64 / median / 1e3;
        println!("{name:<26} {median:>10.3} {rate:>16.1}");
    }
    Ok(())
}
