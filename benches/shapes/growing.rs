//! A growable vector beside its alternatives: growing by 2 MiB up to a size, in one table of medians. `copies` takes
//! time with the square of the size: 64 MiB take seconds, 1 GiB many minutes.
//! - `growable`: `Growable::reserve` of the next 2 MiB;
//! - `calls`: the driver's calls alone, `cuMemCreate`, `cuMemMap` and `cuMemSetAccess` in reserved addresses;
//! - `copies`: a larger buffer, a copy of everything by one CPU (by the GPU where the memory is its own), and the end
//!   of the old one, whenever 2 MiB are missing;
//! - `doubling`: the same with twice the size, as `Vec` grows.

use std::time::Instant;

use egmem::driver::{Access, AccessDesc, AllocationProps, Location, PhysicalHandle};
use egmem::shapes::Growable;
use egmem::size::Bytes;
use egmem::{Buffer, Driver, Result, Stream, Topology};

const STEP: u64 = 2 << 20;

/// Where memory is put, and its users.
struct Setting {
    driver: Driver,
    location: Location,
    access: Vec<AccessDesc>,
    size: u64,
    /// The GPU that copies, where the memory is a GPU's.
    stream: Option<Stream>,
}

/// Seconds, and bytes copied.
type Measured = (f64, u64);

fn growable(setting: &Setting) -> Result<Measured> {
    let options = Growable::<u8>::on(setting.location)
        .max_len(setting.size as usize)
        .step(STEP);
    let mut vector = options
        .access_by([Location::Device(0)])
        .create(&setting.driver)?;
    let start = Instant::now();
    for _ in 0..setting.size / STEP {
        vector.extend_unwritten(STEP as usize)?;
    }
    Ok((start.elapsed().as_secs_f64(), 0))
}

fn calls(setting: &Setting) -> Result<Measured> {
    let driver = &setting.driver;
    let props = AllocationProps::at(setting.location);
    let base = driver.mem_address_reserve(setting.size, 0, 0)?;
    let mut handles: Vec<PhysicalHandle> = Vec::new();
    let start = Instant::now();
    for offset in (0..setting.size).step_by(STEP as usize) {
        let handle = driver.mem_create(STEP, &props)?;
        // SAFETY: the addresses are reserved and unmapped, the handle is new, and nothing uses the memory.
        unsafe {
            driver.mem_map(base.add(offset), STEP, 0, handle)?;
            driver.mem_set_access(base.add(offset), STEP, &setting.access)?;
        }
        handles.push(handle);
    }
    let seconds = start.elapsed().as_secs_f64();
    for (offset, handle) in (0..).step_by(STEP as usize).zip(handles) {
        // SAFETY: mapped above, and nothing uses the memory.
        unsafe {
            driver.mem_unmap(base.add(offset), STEP)?;
            driver.mem_release(handle)?;
        }
    }
    // SAFETY: all of it is unmapped.
    unsafe { driver.mem_address_free(base, setting.size)? };
    Ok((seconds, 0))
}

/// Buffers of growing size, each of which gets the bytes of the one before it.
fn copies(setting: &Setting, next: impl Fn(u64) -> u64) -> Result<Measured> {
    let allocate = |bytes| {
        let options = Buffer::on(setting.location).bytes(bytes);
        options
            .access_by([Location::Device(0)])
            .allocate(&setting.driver)
    };
    let mut copied = 0;
    let start = Instant::now();
    let mut buffer = allocate(STEP)?;
    for len in (STEP..=setting.size).step_by(STEP as usize) {
        if len > buffer.len() {
            let larger = allocate(next(buffer.len()))?;
            match &setting.stream {
                Some(stream) => stream.copy(&larger, 0, &buffer, 0, buffer.len())?,
                None => {
                    let from = buffer.cpu()?;
                    let (start, len) = (from.as_ptr(), from.len() as usize);
                    // SAFETY: nothing writes the old buffer meanwhile.
                    let bytes = unsafe { std::slice::from_raw_parts(start, len) };
                    larger.write_at(0, bytes)?;
                }
            }
            copied += buffer.len();
            buffer = larger;
        }
    }
    Ok((start.elapsed().as_secs_f64(), copied))
}

fn medians(setting: &Setting, rounds: usize) -> Result<Vec<(&'static str, f64, u64)>> {
    type Way = fn(&Setting) -> Result<Measured>;
    let ways: [(&str, Way); 4] = [
        ("growable", growable),
        ("calls", calls),
        ("copies", |setting| copies(setting, |len| len + STEP)),
        ("doubling", |setting| copies(setting, |len| len * 2)),
    ];
    let mut all = vec![Vec::new(); ways.len()];
    let mut copied = vec![0; ways.len()];
    for round in 0..rounds {
        for turn in 0..ways.len() {
            let index = (turn + round) % ways.len();
            let (seconds, bytes) = ways[index].1(setting)?;
            all[index].push(seconds);
            copied[index] = bytes;
        }
    }
    Ok(ways
        .iter()
        .zip(all)
        .zip(copied)
        .map(|((&(name, _), mut seconds), copied)| {
            seconds.sort_by(f64::total_cmp);
            (name, seconds[seconds.len() / 2], copied)
        })
        .collect())
}

/// Prints the table.
pub fn run(driver: &Driver, size: u64, rounds: usize, on_gpu: bool) -> Result<()> {
    let gpu = Location::Device(0);
    let node = Topology::discover(driver)?.gpu(0)?.host_node()?;
    let (location, stream, granted) = match on_gpu {
        true => (gpu, Some(Stream::new(driver, 0)?), vec![gpu]),
        false => (node.into(), None, vec![Location::Host, gpu]),
    };
    let access = granted
        .into_iter()
        .map(|who| AccessDesc::new(who, Access::ReadWrite));
    let setting = Setting {
        driver: driver.clone(),
        location,
        access: access.collect(),
        size: size.max(STEP) / STEP * STEP,
        stream,
    };
    let medians = medians(&setting, rounds)?;
    let steps = (setting.size / STEP) as f64;
    let beside = medians[1].1;
    println!("growing to {} by 2 MiB on {location}", Bytes(setting.size));
    println!(
        "{:<9} {:>12} {:>10} {:>14}",
        "way", "us per step", "/ calls", "bytes copied"
    );
    for (name, seconds, copied) in medians {
        let (time, ratio) = match driver.is_simulated() {
            false => (
                format!("{:.1}", seconds / steps * 1e6),
                format!("{:.3}", seconds / beside),
            ),
            true => ("simulated".into(), "-".into()),
        };
        println!("{name:<9} {time:>12} {ratio:>10} {copied:>14}");
    }
    Ok(())
}
