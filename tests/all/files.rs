//! Files go straight into memory and come from it: by system calls, past the page cache, and by io_uring. DMA-BUFs of a
//! GPU's memory.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use egmem::driver::HandleTypes;
use egmem::driver::{Access, AccessDesc, Call, Code, Location};
use egmem::kernels::pattern;
use egmem::memory::CpuView;
use egmem::proof::Prover;
use egmem::{Backing, Buffer, Driver, Error, Machine, Topology};
use io_uring::{IoUring, opcode, types};
use tempfile::NamedTempFile;

use egmem_tests::drivers::on_both;

const MIB: u64 = 1 << 20;

/// A file of so many words of the pattern `seed`, and some bytes more. Not in memory, if the temporary folder is not.
fn file(seed: u64, words: u64, more: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    let words = (0..words).map(|index| pattern(seed, index));
    let bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
    file.write_all(&bytes).unwrap();
    file.write_all(more).unwrap();
    file.as_file().sync_all().unwrap();
    file
}

fn near(driver: &Driver, bytes: u64) -> Buffer {
    Buffer::near(driver, 0, bytes).unwrap()
}

/// Returns the driver's memory and all kinds of registered memory, near GPU 0.
fn of_each_kind(driver: &Driver, bytes: u64) -> Vec<Buffer> {
    let topology = Topology::discover(driver).unwrap();
    let node = topology.gpu(0).unwrap().host_node().unwrap();
    let kinds = [
        (Backing::Driver, HandleTypes::NONE),
        (Backing::Registered, HandleTypes::NONE),
        (Backing::Registered, HandleTypes::POSIX_FD),
        // Where it takes registered pages, a forked child shares them.
        (Backing::Auto, HandleTypes::NONE),
    ];
    let buffer = |(backing, types)| {
        let options = Buffer::on(node).bytes(bytes).backing(backing);
        options.handle_types(types).allocate(driver).unwrap()
    };
    kinds.map(buffer).into()
}

/// The buffer's words are those of the pattern, for a kernel too.
fn has_pattern(driver: &Driver, buffer: &Buffer, seed: u64) {
    egmem::proof::check_pattern(&buffer.cpu().unwrap(), seed).unwrap();
    Prover::new(driver, 0)
        .unwrap()
        .check_rewrite(buffer, seed, seed)
        .unwrap();
}

fn a_file_is_read_where_it_should_be(driver: &Driver) {
    let words = 2 * MIB / 8 + 3;
    let file = file(1, words, b"tail");
    let buffer = near(driver, words * 8);
    let view = buffer.cpu().unwrap();
    assert_eq!(view.read_from_file(0, words * 8, &file, 0), Ok(words * 8));
    has_pattern(driver, &buffer, 1);

    // Parts, at odd places, and beyond the file's end.
    buffer.fill(0xee).unwrap();
    assert_eq!(view.read_from_file(5, 11, &file, words * 8 - 3), Ok(7));
    let mut seen = [0_u8; 16];
    buffer.read_at(0, &mut seen).unwrap();
    let last = pattern(1, words - 1).to_ne_bytes();
    assert_eq!(seen[..5], [0xee; 5]);
    assert_eq!(seen[5..8], last[5..]);
    assert_eq!(seen[8..12], *b"tail");
    assert_eq!(seen[12..], [0xee; 4]);
    assert_eq!(view.read_from_file(0, 8, &file, 1 << 40), Ok(0));
    assert_eq!(view.read_from_file(0, 0, &file, 0), Ok(0));

    let out_of_range = view.read_from_file(1, words * 8, &file, 0).unwrap_err();
    assert!(
        matches!(out_of_range, Error::OutOfRange { .. }),
        "{out_of_range}"
    );
    let too_far = view.read_from_file(0, 8, &file, u64::MAX - 4).unwrap_err();
    assert!(
        matches!(too_far, Error::InvalidArgument { .. }),
        "{too_far}"
    );
    let writing = OpenOptions::new().write(true).open(file.path()).unwrap();
    let refused = view.read_from_file(0, 8, &writing, 0).unwrap_err();
    assert!(matches!(refused, Error::System { .. }), "{refused}");
}

fn memory_is_written_to_a_file(driver: &Driver) {
    let buffer = near(driver, 3 * MIB);
    Prover::new(driver, 0).unwrap().write(&buffer, 4).unwrap();
    let file = file(0, 0, b"head");
    let view = buffer.cpu().unwrap();
    assert_eq!(view.write_to_file(8, MIB, &file, 4), Ok(MIB));
    let mut seen = vec![0_u8; MIB as usize];
    file.as_file().read_exact_at(&mut seen, 4).unwrap();
    for (index, word) in (1..).zip(seen.chunks_exact(8)) {
        assert_eq!(word, pattern(4, index).to_ne_bytes());
    }
    assert!(view.write_to_file(8, 3 * MIB, &file, 0).is_err());
}

/// Memory that the CPU may only read gets nothing from a file.
fn read_only_memory_gets_no_file(driver: &Driver) {
    let file = file(1, 8, b"");
    let mut buffer = near(driver, 64);
    buffer
        .set_access(&[AccessDesc::new(Location::Host, Access::Read)])
        .unwrap();
    let view = buffer.cpu().unwrap();
    let error = view.read_from_file(0, 64, &file, 0).unwrap_err();
    assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    assert_eq!(view.write_to_file(0, 64, &file, 0), Ok(64));
}

/// Opens a file past the page cache, if its file system can do that.
fn open_direct(file: &NamedTempFile) -> Option<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_DIRECT);
    options
        .open(file.path())
        .inspect_err(|error| println!("skipped: no O_DIRECT here: {error}"))
        .ok()
}

/// The device writes into the memory itself.
fn direct_io_reads_into_memory(driver: &Driver) {
    let words = 4 * MIB / 8;
    let made = file(6, words, b"the rest is no block");
    let Some(direct) = open_direct(&made) else {
        return;
    };
    let buffer = near(driver, 4 * MIB + 4096);
    let view = buffer.cpu().unwrap();
    let all = view.read_from_file(0, buffer.len(), &direct, 0);
    assert_eq!(all, Ok(4 * MIB + 20), "direct I/O cannot use this memory");
    assert_eq!(
        buffer.get::<[u8; 20]>(4 * MIB),
        Ok(*b"the rest is no block")
    );
    for (exact, seed) in of_each_kind(driver, 4 * MIB).iter().zip(6..) {
        let whole = exact.cpu().unwrap();
        assert_eq!(
            whole.read_from_file(0, 4 * MIB, &direct, 0),
            Ok(4 * MIB),
            "{}",
            exact.backing()
        );
        has_pattern(driver, exact, seed);
        // And back.
        let prover = Prover::new(driver, 0).unwrap();
        prover.write(exact, seed + 1).unwrap();
        assert_eq!(whole.write_to_file(0, 4 * MIB, &direct, 0), Ok(4 * MIB));
        buffer.fill(0).unwrap();
        assert_eq!(view.read_from_file(0, 4 * MIB, &made, 0), Ok(4 * MIB));
        let last = buffer.get::<u64>(4 * MIB - 8);
        assert_eq!(last, Ok(pattern(seed + 1, words - 1)));
    }
}

/// Returns an io_uring; `None`, with a line that says so, where the kernel allows none, as in many containers.
fn io_uring() -> Option<IoUring> {
    IoUring::new(8)
        .inspect_err(|error| println!("skipped: no io_uring here: {error}"))
        .ok()
}

/// Reads a file's first 4 MiB in four requests. `registered`: the ring has the view as its buffer 0.
fn read_in_pieces(ring: &mut IoUring, file: &File, view: &CpuView<'_>, registered: bool) {
    for piece in 0..4 {
        let (offset, bytes) = (piece * MIB, MIB as u32);
        let to = view.as_ptr().wrapping_add(offset as usize);
        let fd = types::Fd(file.as_raw_fd());
        let read = match registered {
            false => opcode::Read::new(fd, to, bytes).offset(offset).build(),
            true => opcode::ReadFixed::new(fd, to, bytes, 0)
                .offset(offset)
                .build(),
        };
        // SAFETY: file and memory outlive the requests, which are waited for below.
        unsafe { ring.submission().push(&read.user_data(piece)).unwrap() };
    }
    ring.submit_and_wait(4).unwrap();
    for done in ring.completion() {
        assert_eq!(done.result(), MIB as i32, "piece {}", done.user_data());
    }
}

fn io_uring_reads_into_memory(driver: &Driver) {
    let made = file(8, 4 * MIB / 8, b"");
    let direct = open_direct(&made);
    let Some(mut ring) = io_uring() else { return };
    for file in [Some(made.reopen().unwrap()), direct].iter().flatten() {
        for buffer in of_each_kind(driver, 4 * MIB) {
            read_in_pieces(&mut ring, file, &buffer.cpu().unwrap(), false);
            has_pattern(driver, &buffer, 8);
        }
    }
}

/// The kernel pins the memory once, for all requests (`IORING_REGISTER_BUFFERS`).
fn io_uring_registers_memory(driver: &Driver) {
    let made = file(9, 4 * MIB / 8, b"");
    let direct = open_direct(&made);
    let Some(mut ring) = io_uring() else { return };
    let files = [Some(made.reopen().unwrap()), direct];
    let buffers = of_each_kind(driver, 4 * MIB);
    let each = files.iter().flatten();
    for (file, buffer) in each.flat_map(|file| buffers.iter().map(move |buffer| (file, buffer))) {
        buffer.fill(0).unwrap();
        let view = buffer.cpu().unwrap();
        let all = libc::iovec {
            iov_base: view.as_ptr().cast(),
            iov_len: view.len() as usize,
        };
        // SAFETY: the memory outlives its registration, which ends below; the test ends if that fails.
        match unsafe { ring.submitter().register_buffers(&[all]) } {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
                return println!("skipped: the limit on locked memory (ulimit -l): {error}");
            }
            Err(error) => panic!("the kernel refuses {}: {error}", buffer.backing()),
        }
        read_in_pieces(&mut ring, file, &view, true);
        has_pattern(driver, buffer, 9);
        // The same registration again, after the GPU has written.
        Prover::new(driver, 0).unwrap().write(buffer, 1).unwrap();
        read_in_pieces(&mut ring, file, &view, true);
        ring.submitter().unregister_buffers().unwrap();
        has_pattern(driver, buffer, 9);
    }
}

fn a_gpus_memory_is_exported_for_devices(driver: &Driver) {
    let mut buffer = Buffer::on(Location::Device(0))
        .bytes(4 * MIB)
        .allocate(driver)
        .unwrap();
    Prover::new(driver, 0).unwrap().write(&buffer, 9).unwrap();
    let exported = match buffer.dma_buf(MIB, 2 * MIB) {
        Err(error @ Error::PlatformUnsupported { .. }) => return println!("skipped: {error}"),
        exported => exported.unwrap(),
    };
    assert!(exported.as_raw_fd() >= 0);
    for (offset, len) in [(0, 0), (1, 4096), (0, 4095)] {
        let error = buffer.dma_buf(offset, len).unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { what: "range", .. }),
            "{error}"
        );
    }
    let error = buffer.dma_buf(4 * MIB, 4096).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
}

fn host_memory_has_no_dma_buf_and_says_so(driver: &Driver) {
    let node = egmem::Topology::discover(driver)
        .unwrap()
        .gpu(0)
        .unwrap()
        .host_node()
        .unwrap();
    let mut host = Buffer::on(node)
        .access_by([] as [Location; 0])
        .bytes(2 * MIB);
    let mut host = {
        host = host.label("host");
        host.allocate(driver).unwrap()
    };
    host.exclusive_slice().unwrap()[0] = 1;
    let error = host.dma_buf(0, 2 * MIB).unwrap_err();
    let is_it =
        matches!(error, Error::PlatformUnsupported { what, .. } if what.contains("DMA-BUF"));
    assert!(is_it, "{error}");
    // Something else might write it now, as far as this library knows.
    assert!(host.exclusive_slice().is_err());
    // A range with both kinds, too.
    let parts = [(Location::Device(0), 2 * MIB), (node.into(), 2 * MIB)];
    let mut both = Buffer::in_parts(parts).allocate(driver).unwrap();
    assert!(matches!(
        both.dma_buf(0, 4 * MIB),
        Err(Error::PlatformUnsupported { .. })
    ));
}

#[test]
fn a_driver_without_dma_bufs_is_named() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let mut buffer = Buffer::on(Location::Device(0))
        .bytes(2 * MIB)
        .allocate(&driver)
        .unwrap();
    for (code, is_typed) in [(Code::NOT_SUPPORTED, true), (Code::INVALID_VALUE, false)] {
        driver
            .sim()
            .unwrap()
            .fail(Call::MemGetHandleForAddressRange, 1, code);
        let error = buffer.dma_buf(0, 4096).unwrap_err();
        assert_eq!(
            matches!(error, Error::PlatformUnsupported { .. }),
            is_typed,
            "{error}"
        );
    }
    // The bytes are those of the memory.
    let exported = File::from(buffer.dma_buf(4096, 4096).unwrap());
    assert!(exported.metadata().is_ok());
}

on_both! {
    egmem::Machine::h200x8();
    a_file_is_read_where_it_should_be,
    memory_is_written_to_a_file,
    read_only_memory_gets_no_file,
    direct_io_reads_into_memory,
    io_uring_reads_into_memory,
    io_uring_registers_memory,
    a_gpus_memory_is_exported_for_devices,
    host_memory_has_no_dma_buf_and_says_so,
}
