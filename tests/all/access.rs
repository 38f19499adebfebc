//! Access chunk by chunk, changed later: safe calls keep to it, and the driver enforces it. Child processes
//! show that the driver does: they write to read-only memory. A kernel ends its context, the CPU ends the process.

use std::os::unix::process::ExitStatusExt;

use egmem::driver::{Access, AccessDesc, Code, LaunchDims, Location, StreamHandle};
use egmem::kernels;
use egmem::proof::Prover;
use egmem::shapes::{Growable, Stripes};
use egmem::{Buffer, Driver, Error, Machine, Memory, Result, Stream};

use egmem_tests::drivers::{node, on_both};

const MIB: u64 = 1 << 20;
const CHUNK: u64 = 2 * MIB;
const GPU: Location = Location::Device(0);
const ROLE: &str = "EGMEM_ACCESS_CHILD";
/// The exit status of a child whose kernel ended with ILLEGAL_ADDRESS.
const ILLEGAL_ADDRESS: i32 = 7;

/// Memory of four chunks of which the third is read-only, by the type that each child names.
const SHAPES: [&str; 3] = ["buffer", "growable", "stripes"];

fn third_read_only(driver: &Driver, shape: &str, who: Location) -> Box<dyn Memory> {
    let reads = [AccessDesc::new(who, Access::Read)];
    let chunks = |mut buffer: Buffer| {
        buffer.set_access_at(2 * CHUNK, CHUNK, &reads).unwrap();
        Box::new(buffer)
    };
    match shape {
        "buffer" => {
            let options = Buffer::on(node(driver)).bytes(4 * CHUNK).chunk(CHUNK);
            chunks(options.allocate(driver).unwrap())
        }
        // All on one node: neighbours would be one stripe.
        "stripes" => {
            let plan = Stripes::over([node(driver)]).options(4 * CHUNK).unwrap();
            chunks(plan.chunk(CHUNK).allocate(driver).unwrap())
        }
        _ => {
            let options = Growable::<u64>::on(node(driver)).max_len(MIB as usize);
            let mut vector = options.step(CHUNK).create(driver).unwrap();
            let chunk = CHUNK as usize / 8;
            for _ in 0..4 {
                vector.extend_from_slice(&vec![0; chunk]).unwrap();
            }
            let range = vector.set_access_of(2 * chunk..2 * chunk + 1, &reads);
            assert_eq!(range, Ok(2 * chunk..3 * chunk));
            Box::new(vector)
        }
    }
}

/// Runs the crate's writing kernel on chunk `chunk`, without the checks of safe calls.
fn write_chunk(
    driver: &Driver,
    memory: &dyn Memory,
    chunk: u64,
    stream: StreamHandle,
) -> Result<()> {
    let dims = LaunchDims {
        blocks: 4,
        threads: 256,
    };
    let args = [memory.device_ptr().0 + chunk * CHUNK, CHUNK / 8, 9];
    // SAFETY: the text is PTX; the handles are live; the range is mapped while `memory` lives, and nothing else uses
    // it. A refused write ends this process's use of the GPU, as the test wants.
    unsafe {
        let module = driver.module_load(0, kernels::PTX)?;
        let function = driver.module_function(0, module, kernels::WRITE)?;
        driver.launch_kernel(function, dims, &args, stream)?;
        driver.stream_synchronize(stream)
    }
}

/// The children's part.
#[test]
fn child_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let [backend, who, shape] = role.split('/').collect::<Vec<_>>()[..] else {
        panic!("{role}");
    };
    let driver = match backend {
        "cuda" => Driver::open().unwrap(),
        _ => Driver::simulated(Machine::h200x8()).unwrap(),
    };
    if who == "cpu" {
        let memory = third_read_only(&driver, shape, Location::Host);
        let start = memory.device_ptr().0 as *mut u64;
        for chunk in [0, 1, 3, 2] {
            // SAFETY: mapped while `memory` lives, and nothing else uses it. Writing to chunk 2 is to fault.
            unsafe { start.byte_add((chunk * CHUNK) as usize).write_volatile(1) };
            println!("wrote chunk {chunk}");
        }
        return;
    }
    let memory = third_read_only(&driver, shape, GPU);
    let stream = driver.stream_create(0).unwrap();
    for chunk in [0, 1, 3] {
        write_chunk(&driver, &*memory, chunk, stream).unwrap();
    }
    let error = write_chunk(&driver, &*memory, 2, stream).unwrap_err();
    println!("{error}");
    assert_eq!(error.code(), Some(Code::ILLEGAL_ADDRESS), "{error}");
    // Nothing can be given back any more.
    std::process::exit(ILLEGAL_ADDRESS);
}

fn child(backend: &str, who: &str, shape: &str) -> std::process::Output {
    let mut command = egmem_tests::child(module_path!(), "child_process");
    command.env(ROLE, format!("{backend}/{who}/{shape}"));
    // A fault must reach the system, not a sanitizer's report.
    for sanitizer in ["ASAN_OPTIONS", "TSAN_OPTIONS"] {
        let mut options = std::env::var(sanitizer).unwrap_or_default();
        options.push_str(":handle_segv=0:handle_sigbus=0:allow_user_segv_handler=1:detect_leaks=0");
        command.env(sanitizer, options);
    }
    command.output().unwrap()
}

fn the_driver_enforces_read_only(driver: &Driver) {
    let backend = match driver.is_simulated() {
        true => "sim",
        false => "cuda",
    };
    let own = Buffer::near(driver, 0, CHUNK).unwrap();
    let prover = Prover::new(driver, 0).unwrap();
    prover.write(&own, 1).unwrap();
    for shape in SHAPES {
        let ended = child(backend, "gpu", shape);
        assert_eq!(
            ended.status.code(),
            Some(ILLEGAL_ADDRESS),
            "{shape}: {ended:?}"
        );
        let ended = child(backend, "cpu", shape);
        assert_eq!(
            ended.status.signal(),
            Some(libc::SIGSEGV),
            "{shape}: {ended:?}"
        );
        let said = String::from_utf8_lossy(&ended.stdout);
        assert!(said.contains("wrote chunk 3"), "{shape}: {said}");
        // This process and its context go on.
        prover.check_rewrite(&own, 1, 1).unwrap();
    }
}

fn safe_calls_keep_to_the_access_of_chunks(driver: &Driver) {
    let stream = Stream::new(driver, 0).unwrap();
    for shape in SHAPES {
        let memory = third_read_only(driver, shape, GPU);
        let memory = &*memory;
        let who = GPU;
        let (have, need) = (Access::Read, Access::ReadWrite);
        let refused = Err(Error::NotAccessible { who, have, need });
        for (offset, len, expected) in [
            (0, 2 * CHUNK, Ok(())),
            (2 * CHUNK - 1, 2, refused.clone()),
            (2 * CHUNK, CHUNK, refused.clone()),
            (3 * CHUNK - 1, 2, refused.clone()),
            (3 * CHUNK, CHUNK, Ok(())),
        ] {
            let got = memory.gpu_access(0, egmem::memory::Engine::Copy, offset, len);
            assert_eq!(
                got == Ok(Access::ReadWrite),
                expected == Ok(()),
                "{shape} {offset}"
            );
            assert_eq!(
                fill(&stream, memory, offset, len),
                expected,
                "{shape} {offset}"
            );
        }
    }
}

/// `Stream::fill` takes types, not objects.
fn fill(stream: &Stream, memory: &dyn Memory, offset: u64, len: u64) -> Result<()> {
    struct Of<'a>(&'a dyn Memory);
    // SAFETY: the memory behind answers and lives as long.
    unsafe impl egmem::memory::AccessChecks for Of<'_> {
        fn gpu_access(
            &self,
            gpu: i32,
            engine: egmem::memory::Engine,
            offset: u64,
            len: u64,
        ) -> Result<Access> {
            self.0.gpu_access(gpu, engine, offset, len)
        }
    }
    impl Memory for Of<'_> {
        fn driver(&self) -> &Driver {
            self.0.driver()
        }
        fn device_ptr(&self) -> egmem::driver::DevicePtr {
            self.0.device_ptr()
        }
        fn len(&self) -> u64 {
            self.0.len()
        }
        fn location(&self) -> Location {
            self.0.location()
        }
    }
    stream.fill(&Of(memory), offset, len, 5)
}

fn a_range_of_whole_chunks_is_changed_and_no_other(driver: &Driver) {
    let options = Buffer::on(node(driver)).bytes(4 * CHUNK - 100).chunk(CHUNK);
    let mut buffer = options.allocate(driver).unwrap();
    assert_eq!((buffer.mappings().len(), buffer.padded()), (4, 4 * CHUNK));
    let to = |access| [AccessDesc::new(GPU, access)];
    let seen = |buffer: &Buffer| -> Vec<Access> {
        let mappings = buffer.mappings().iter();
        mappings
            .map(|mapping| mapping.access(GPU).unwrap())
            .collect()
    };
    let (rw, read, none) = (Access::ReadWrite, Access::Read, Access::None);
    buffer.set_access_at(CHUNK, 2 * CHUNK, &to(read)).unwrap();
    assert_eq!(seen(&buffer), [rw, read, read, rw]);
    // The last chunk, without its padding and with it.
    buffer
        .set_access_at(2 * CHUNK, 2 * CHUNK - 100, &to(none))
        .unwrap();
    assert_eq!(seen(&buffer), [rw, read, none, none]);
    buffer.set_access_at(3 * CHUNK, CHUNK, &to(read)).unwrap();
    assert_eq!(seen(&buffer), [rw, read, none, read]);
    assert_eq!(buffer.access(GPU), Ok(none));
    buffer.set_access_at(CHUNK, 0, &to(none)).unwrap();
    for (offset, len) in [(1, CHUNK), (0, CHUNK - 1), (CHUNK, CHUNK + 4096)] {
        let error = buffer.set_access_at(offset, len, &to(rw)).unwrap_err();
        let is_it = matches!(error, Error::InvalidArgument { what: "range", .. });
        assert!(
            is_it && error.to_string().contains("boundaries of parts"),
            "{error}"
        );
    }
    for (offset, len) in [(0, 5 * CHUNK), (5 * CHUNK, 0), (u64::MAX, CHUNK)] {
        let error = buffer.set_access_at(offset, len, &to(rw)).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
    }
    assert_eq!(seen(&buffer), [rw, read, none, read]);
    // The buffer reports the CPU's access for each part too.
    let host = [AccessDesc::new(Location::Host, Access::Read)];
    buffer.set_access_at(0, CHUNK, &host).unwrap();
    assert!(buffer.put(CHUNK - 1, 1_u8).is_err() && buffer.put(CHUNK - 1, 1_u16).is_err());
    buffer.put(CHUNK, 1_u8).unwrap();
    assert!(!buffer.cpu().unwrap().is_writable(), "of the whole buffer");
    buffer.cpu_at(CHUNK, CHUNK).unwrap().put(0, 1_u8).unwrap();
    for chunk in [0, MIB, CHUNK + 1] {
        let error = Buffer::on(node(driver)).bytes(CHUNK).chunk(chunk);
        let error = error.allocate(driver).unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { what: "chunk", .. }),
            "{error}"
        );
    }
}

on_both! {
    egmem::Machine::h200x8();
    the_driver_enforces_read_only,
    safe_calls_keep_to_the_access_of_chunks,
    a_range_of_whole_chunks_is_changed_and_no_other,
}
