//! Memory of this crate in a program that uses cudarc: launched on, copied from, copied to.
//!
//! ```text
//! cargo run -p egmem-cudarc --bin cudarc-interop
//! ```
//! Without a GPU it says so.

use std::process::ExitCode;

use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use egmem::interop::{EgmSlice, EgmSliceMut};
use egmem::{Buffer, Driver, Explained, kernels};

const BYTES: u64 = 64 << 20;
const WORDS: usize = BYTES as usize / 8;
const SEED: u64 = 2026;

fn main() -> ExitCode {
    // First, since cudarc panics where there is no libcuda.
    let driver = match Driver::open() {
        Ok(driver) => driver,
        Err(error) => {
            println!("no GPU to show this on: {}", Explained(&error));
            return ExitCode::SUCCESS;
        }
    };
    match run(&driver) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(driver: &Driver) -> Result<(), Box<dyn std::error::Error>> {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let mut buffer = Buffer::near(driver, 0, BYTES)?;
    println!(
        "{} at {:?}",
        buffer.physical()[0].location(),
        buffer.device_ptr()
    );

    // A kernel, launched by cudarc, writes the memory; the CPU reads it in place.
    let module = context.load_module(Ptx::from_src(kernels::PTX.to_str()?))?;
    let write = module.load_function(kernels::WRITE.to_str()?)?;
    let (ptr, words) = (buffer.device_ptr(), WORDS as u64);
    let mut launch = stream.launch_builder(&write);
    launch.arg(&ptr).arg(&words).arg(&SEED);
    // SAFETY: the arguments are the kernel's, the buffer holds that many words, and the stream is
    // synchronised before it is used again.
    unsafe { launch.launch(LaunchConfig::for_num_elems(1 << 18))? };
    stream.synchronize()?;
    let mut seen = vec![0_u64; WORDS];
    buffer.read_at(0, &mut seen)?;
    expect("the CPU reads what a kernel wrote", &seen, kernels::pattern)?;

    // cudarc copies from it: to the GPU's own memory, and to the host.
    let source = EgmSlice::<u64>::new(&buffer, &stream)?;
    let mut on_device = stream.alloc_zeros::<u64>(WORDS)?;
    stream.memcpy_dtod(&source, &mut on_device)?;
    expect(
        "a copy in GPU memory",
        &stream.clone_dtoh(&on_device)?,
        kernels::pattern,
    )?;
    let mut copied = vec![0_u64; WORDS];
    stream.memcpy_dtoh(&source, &mut copied)?;
    expect("a copy in host memory", &copied, kernels::pattern)?;

    // And to it: the upper half from the host, the lower half from the GPU's memory.
    let fresh: Vec<u64> = (0..WORDS).map(|i| i as u64).collect();
    stream.memcpy_htod(&fresh, &mut on_device)?;
    let mut target = EgmSliceMut::<u64>::new(&mut buffer, &stream)?;
    let half = WORDS / 2;
    stream.memcpy_htod(&fresh[half..], &mut target.slice_mut(half..WORDS)?)?;
    stream.memcpy_dtod(&on_device.slice(..half), &mut target.slice_mut(0..half)?)?;
    buffer.read_at(0, &mut seen)?;
    expect("the CPU reads what cudarc copied", &seen, |_, i| i)?;
    Ok(())
}

/// Checks every word.
fn expect(what: &str, words: &[u64], right: impl Fn(u64, u64) -> u64) -> Result<(), String> {
    match (0..).zip(words).find(|&(i, &word)| word != right(SEED, i)) {
        None => {
            println!("{what}: right");
            Ok(())
        }
        Some((i, word)) => Err(format!("{what}: word {i} is {word:#x}")),
    }
}
