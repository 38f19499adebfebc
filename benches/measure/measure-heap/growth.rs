//! New memory: the heap's growth beside the bare calls and beside `cudaHostAlloc`.

use std::time::Instant;

use egmem::driver::{Access, AccessDesc, AllocationProps, DevicePtr, Location, PhysicalHandle};
use egmem::size::Bytes;
use egmem::{Error, Heap, Result};
use egmem_chart::{Chart, Line};
use serde::Serialize;

use crate::args::Args;
use crate::report::{About, Results};
use crate::{Place, median, plot};

const NAMES: [&str; 3] = ["egmem heap", "bare calls", "cudaHostAlloc"];

/// Touches and gives back as much memory as will be taken, and a quarter more: a virtual machine's
/// own memory may come only when it is touched, and would be measured otherwise.
///
/// # Errors
/// [`Error::System`] where there is not so much.
pub fn warm_up(bytes: u64) -> Result<()> {
    const PARTS: usize = 8;
    const PAGE: usize = 4096;
    let bytes = (bytes + bytes / 4) as usize;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no other memory.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if memory == libc::MAP_FAILED {
        let error = std::io::Error::last_os_error();
        return Err(Error::system("memory to warm up with", &error));
    }
    let (start, began) = (memory.expose_provenance(), Instant::now());
    std::thread::scope(|scope| {
        for part in 0..PARTS {
            scope.spawn(move || {
                for page in (part * PAGE..bytes).step_by(PARTS * PAGE) {
                    let byte: *mut u8 = std::ptr::with_exposed_provenance_mut(start + page);
                    // SAFETY: a byte of the mapping; each page is one thread's.
                    unsafe { byte.write_volatile(1) };
                }
            });
        }
    });
    // SAFETY: mapped above, and the threads have ended.
    unsafe { libc::munmap(memory, bytes) };
    println!(
        "{} touched in {:.1} s beforehand",
        Bytes(bytes as u64),
        began.elapsed().as_secs_f64()
    );
    Ok(())
}

/// How fast one contestant makes memory in chunks of one size.
#[derive(Debug, Serialize)]
pub struct Row {
    pub chunk: u64,
    pub contestant: &'static str,
    /// The median of the rounds, 10⁹ bytes per second.
    pub gb_per_second: f64,
    /// The least and the most of the rounds.
    pub least: f64,
    pub most: f64,
    /// The median of the rounds' ratios: how many times as fast the heap is in the same round.
    pub heap_by_this: f64,
}

/// All of them.
#[derive(Debug, Serialize)]
pub struct Growth {
    /// Bytes made by each in each round.
    bytes: u64,
    rows: Vec<Row>,
}

/// Measures all chunk sizes, the contestants in turns.
///
/// # Errors
/// The driver's; [`Error::NodeTooFull`].
pub fn measure(place: &Place, args: &Args) -> Result<Growth> {
    let mut rows = Vec::new();
    for &Bytes(chunk) in &args.chunk {
        let bytes = (args.growth.0 / chunk).max(1) * chunk;
        let mut rates = vec![Vec::new(); NAMES.len()];
        // The first round warms up.
        for round in 0..args.rounds as usize + 1 {
            for turn in 0..NAMES.len() {
                let which = (round + turn) % NAMES.len();
                let seconds = match which {
                    0 => by_heap(place, bytes, chunk)?,
                    1 => by_calls(place, bytes, chunk)?,
                    _ => by_host_alloc(place, bytes, chunk)?,
                };
                if round > 0 {
                    rates[which].push(bytes as f64 / seconds / 1e9);
                }
            }
        }
        for (contestant, own) in NAMES.into_iter().zip(&rates) {
            let ratios = rates[0].iter().zip(own).map(|(heap, own)| heap / own);
            rows.push(Row {
                chunk,
                contestant,
                gb_per_second: median(own),
                least: own.iter().copied().fold(f64::INFINITY, f64::min),
                most: own.iter().copied().fold(0.0, f64::max),
                heap_by_this: median(&ratios.collect::<Vec<_>>()),
            });
        }
    }
    Ok(Growth {
        bytes: args.growth.0,
        rows,
    })
}

fn by_heap(place: &Place, bytes: u64, chunk: u64) -> Result<f64> {
    let heap = Heap::on(place.node)
        .access_by([Location::Device(place.gpu)])
        .limit(bytes)
        .chunk(chunk)
        .build(&place.driver)?;
    let began = Instant::now();
    heap.reserve(bytes)?;
    let seconds = began.elapsed().as_secs_f64();
    if heap.backed() != bytes {
        return Err(Error::invalid("heap", "it has not grown as it was told"));
    }
    Ok(seconds)
}

fn by_calls(place: &Place, bytes: u64, chunk: u64) -> Result<f64> {
    let driver = &place.driver;
    let node = Location::from(place.node);
    let (props, access) = (
        AllocationProps::at(node),
        [node, Location::Device(place.gpu)].map(|location| AccessDesc {
            location,
            access: Access::ReadWrite,
        }),
    );
    let start = driver.mem_address_reserve(bytes, 0, 0)?;
    let mut handles: Vec<PhysicalHandle> = Vec::with_capacity((bytes / chunk) as usize);
    let began = Instant::now();
    for offset in (0..bytes).step_by(chunk as usize) {
        let handle = driver.mem_create(chunk, &props)?;
        handles.push(handle);
        // SAFETY: the range was just reserved and the memory just created, no other code has
        // either; a failure ends the program.
        unsafe {
            driver.mem_map(start.add(offset), chunk, 0, handle)?;
            driver.mem_set_access(start.add(offset), chunk, &access)?;
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    for (index, handle) in (0..).zip(handles) {
        // SAFETY: mapped above, and nobody uses it.
        unsafe {
            driver.mem_unmap(start.add(index * chunk), chunk)?;
            driver.mem_release(handle)?;
        }
    }
    // SAFETY: reserved above, and nothing is mapped there.
    unsafe { driver.mem_address_free(start, bytes)? };
    Ok(seconds)
}

fn by_host_alloc(place: &Place, bytes: u64, chunk: u64) -> Result<f64> {
    let mut made: Vec<DevicePtr> = Vec::with_capacity((bytes / chunk) as usize);
    let began = Instant::now();
    for _ in 0..bytes / chunk {
        made.push(place.driver.mem_host_alloc(place.gpu, chunk)?);
    }
    let seconds = began.elapsed().as_secs_f64();
    for ptr in made {
        // SAFETY: allocated above, and nobody uses it.
        unsafe { place.driver.mem_free_host(place.gpu, ptr)? };
    }
    Ok(seconds)
}

impl Results for Growth {
    fn title(&self) -> String {
        format!(
            "{} of new memory, granted to the host and the GPU, in chunks",
            Bytes(self.bytes)
        )
    }

    fn header(&self) -> Vec<&'static str> {
        vec![
            "contestant",
            "chunk",
            "GB/s",
            "least",
            "most",
            "heap by this",
        ]
    }

    fn facts(&self) -> usize {
        2
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let line = |row: &Row| {
            vec![
                row.contestant.to_string(),
                row.chunk.to_string(),
                format!("{:.3}", row.gb_per_second),
                format!("{:.3}", row.least),
                format!("{:.3}", row.most),
                format!("{:.4}", row.heap_by_this),
            ]
        };
        self.rows.iter().map(line).collect()
    }

    fn verdicts(&self) -> Vec<String> {
        let verdict = |row: &Row| {
            let target = match row.contestant {
                "bare calls" => 0.98,
                "cudaHostAlloc" => 1.8,
                _ => return None,
            };
            Some(format!(
                "chunks of {}: {:.3} times {} (target {target})",
                Bytes(row.chunk),
                row.heap_by_this,
                row.contestant
            ))
        };
        self.rows.iter().filter_map(verdict).collect()
    }

    fn draw(&self, about: &About) -> Option<String> {
        let line = |&name: &&str| Line {
            name: name.to_owned(),
            points: self
                .rows
                .iter()
                .filter(|row| row.contestant == name)
                .map(|row| (row.chunk as f64 / (1 << 20) as f64, row.gb_per_second))
                .collect(),
        };
        let chart = Chart::measured(
            format!("{} of new memory", Bytes(self.bytes)),
            ("MiB of a chunk", true),
            ("GB/s", false),
            NAMES.iter().map(line).collect(),
        );
        Some(plot::draw("Growth", &about.first_line(), &[chart]))
    }
}
