//! A hybrid range (a front in each GPU's memory, the rest on its host node) as a window of NCCL.
//!
//! ```text
//! cargo run --example nccl-window [libnccl.so.2]
//! ```
//! On all GPUs. Where there is no GPU or no NCCL of version 2.27 or newer, it allocates the ranges and says so.

use std::error::Error;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use egmem::driver::Location;
use egmem::shapes::{Stripes, stripes};
use egmem::{Buffer, Driver, Machine, Topology};
use libloading::{Library, Symbol};

const FRONT: u64 = 32 << 20;
const BYTES: u64 = 128 << 20;

type Handle = *mut c_void;
type InitAll = unsafe extern "C" fn(*mut Handle, c_int, *const c_int) -> c_int;
type Register = unsafe extern "C" fn(Handle, u64, usize, *mut Handle, c_int) -> c_int;
type Deregister = unsafe extern "C" fn(Handle, Handle) -> c_int;
type Simple = unsafe extern "C" fn() -> c_int;
type Destroy = unsafe extern "C" fn(Handle) -> c_int;

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::h200x8()))?;
    let topology = Topology::discover(&driver)?;
    let mut ranges: Vec<Buffer> = Vec::new();
    for gpu in topology.gpus() {
        let own = Location::Device(gpu.ordinal);
        let plan = Stripes::over([gpu.host_node()?]).front(own, FRONT);
        let options = plan.options(BYTES)?.access_by([own]).shareable();
        ranges.push(options.allocate(&driver)?);
    }
    println!("GPU 0: {:?}", stripes(&ranges[0]));
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here, so NCCL is not tried");
        return Ok(());
    }
    let name = std::env::args().nth(1);
    // SAFETY: NCCL's library runs no code when loaded that depends on this program.
    match unsafe { Library::new(name.as_deref().unwrap_or("libnccl.so.2")) } {
        Ok(nccl) => register(&nccl, &ranges),
        Err(error) => {
            println!("no NCCL here: {error}");
            Ok(())
        }
    }
}

fn register(nccl: &Library, ranges: &[Buffer]) -> Result<(), Box<dyn Error>> {
    let mut comms: Vec<Handle> = vec![null_mut(); ranges.len()];
    let mut windows = comms.clone();
    // SAFETY: the types are those of nccl.h from 2.27 on. The arrays have an element for each GPU, and the ranges
    // outlive the windows.
    unsafe {
        let init: Symbol<'_, InitAll> = nccl.get(b"ncclCommInitAll")?;
        let window: Symbol<'_, Register> = nccl.get(b"ncclCommWindowRegister")?;
        let close: Symbol<'_, Deregister> = nccl.get(b"ncclCommWindowDeregister")?;
        let [start, end]: [Symbol<'_, Simple>; 2] =
            [nccl.get(b"ncclGroupStart")?, nccl.get(b"ncclGroupEnd")?];
        let destroy: Symbol<'_, Destroy> = nccl.get(b"ncclCommDestroy")?;

        check(
            "ncclCommInitAll",
            init(comms.as_mut_ptr(), ranges.len() as c_int, std::ptr::null()),
        )?;
        for flags in [0, 1] {
            check("ncclGroupStart", start())?;
            for (rank, range) in ranges.iter().enumerate() {
                let (at, bytes) = (range.device_ptr().0, range.len() as usize);
                check(
                    "ncclCommWindowRegister",
                    window(comms[rank], at, bytes, &mut windows[rank], flags),
                )?;
            }
            check("ncclGroupEnd", end())?;
            println!("ncclCommWindowRegister, flags {flags}: accepted, windows {windows:?}");
            for (comm, window) in comms.iter().zip(&windows) {
                check("ncclCommWindowDeregister", close(*comm, *window))?;
            }
        }
        for comm in comms {
            check("ncclCommDestroy", destroy(comm))?;
        }
    }
    Ok(())
}

fn check(call: &str, code: c_int) -> Result<(), String> {
    match code {
        0 => Ok(()),
        code => Err(format!("{call} answered {code}; NCCL_DEBUG=INFO tells why")),
    }
}
