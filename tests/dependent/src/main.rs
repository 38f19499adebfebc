//! Allocates a buffer on the simulator, and uses cudarc with the CUDA version that the features choose.

use egmem::{Buffer, Driver, Machine};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let driver = Driver::simulated(Machine::gh200())?;
    let buffer = Buffer::near(&driver, 0, 2 << 20)?;
    buffer.write_at(8, &[7_u64, 8])?;
    let mut seen = [0_u64; 2];
    buffer.read_at(8, &mut seen)?;
    assert_eq!(seen, [7, 8]);

    #[cfg(any(feature = "cuda-12060", feature = "cuda-12080"))]
    expect_own_version();
    #[cfg(feature = "interop")]
    interop::run(&buffer)?;
    println!("a buffer of {} bytes holds what was written", buffer.len());
    Ok(())
}

/// Checks that cudarc's bindings are of the version that this crate's features name, and no other.
#[cfg(any(feature = "cuda-12060", feature = "cuda-12080"))]
fn expect_own_version() {
    use cudarc::driver::sys::CUDA_VERSION;

    let newer = cfg!(feature = "cuda-12080");
    let chosen = if newer { 12080 } else { 12060 };
    assert_eq!(CUDA_VERSION, chosen);
    println!("cudarc's bindings are for CUDA {CUDA_VERSION}");
}

#[cfg(feature = "interop")]
mod interop {
    use cudarc::driver::{CudaContext, DeviceRepr};
    use egmem::driver::DevicePtr;
    use egmem::interop::EgmSlice;
    use egmem::{Buffer, Driver};

    /// Gives `buffer` to cudarc: as a kernel argument and, where there is a GPU, as a source of copies.
    pub fn run(buffer: &Buffer) -> Result<(), Box<dyn std::error::Error>> {
        expect_kernel_argument(&buffer.device_ptr());
        // Asked first: cudarc panics where there is no libcuda.
        if Driver::open().is_err() {
            println!("no GPU: nothing copied by cudarc");
            return Ok(());
        }
        let stream = CudaContext::new(0)?.default_stream();
        let on_gpu = Buffer::near(&Driver::open()?, 0, 2 << 20)?;
        let mut copied = [1_u8; 16];
        let source = EgmSlice::<u8>::new(&on_gpu, &stream)?;
        stream.memcpy_dtoh(&source.slice(0..16)?, &mut copied)?;
        assert_eq!(copied, [0; 16]);
        Ok(())
    }

    fn expect_kernel_argument<T: DeviceRepr>(_: &T) {
        assert_eq!(size_of::<T>(), size_of::<DevicePtr>());
    }
}
