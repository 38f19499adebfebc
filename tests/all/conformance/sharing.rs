//! Export and import, within a process and across.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Stdio};
use std::time::Duration;

use egmem::driver::*;

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::raw::*;

fn shareable(ctx: &Ctx) -> AllocationProps {
    AllocationProps::at(ctx.home()).handle_types(HandleTypes::POSIX_FD)
}

fn exported_fd(ctx: &Ctx, handle: PhysicalHandle) -> OwnedFd {
    match ctx.mem_export(handle, HandleType::PosixFd).unwrap() {
        ShareableHandle::PosixFd(fd) => fd,
        ShareableHandle::Fabric(_) => panic!("an fd was asked for"),
    }
}

/// In a child process: the handle that the parent gave as standard input.
fn given(ctx: &Ctx) -> PhysicalHandle {
    let fd = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    ctx.mem_import(&ShareableHandle::PosixFd(fd)).unwrap()
}

fn everyone(ctx: &Ctx) -> Vec<AccessDesc> {
    let gpus = ctx.gpus().map(|gpu| read_write(Location::Device(gpu)));
    gpus.chain([read_write(Location::Host)]).collect()
}

/// Row: export of a handle made without that handle type.
pub fn export_without_the_handle_type_is_invalid(ctx: &Ctx) {
    let plain = ctx
        .mem_create(MIB2, &AllocationProps::at(ctx.home()))
        .unwrap();
    fails(
        ctx.mem_export(plain, HandleType::PosixFd),
        Code::INVALID_VALUE,
    );
    fails(
        ctx.mem_export(plain, HandleType::Fabric),
        Code::INVALID_VALUE,
    );
    ctx.release(plain).unwrap();
    let posix = ctx.mem_create(MIB2, &shareable(ctx)).unwrap();
    fails(
        ctx.mem_export(posix, HandleType::Fabric),
        Code::INVALID_VALUE,
    );
    ctx.release(posix).unwrap();
}

/// Row: import: garbage fd / garbage fabric handle.
pub fn import_of_garbage_is_refused(ctx: &Ctx) {
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    fails(
        ctx.mem_import(&ShareableHandle::PosixFd(null)),
        Code::UNKNOWN,
    );
    let garbage = ShareableHandle::Fabric(FabricHandle::from_bytes(&[0x5a; 64]));
    let result = ctx.mem_import(&garbage);
    if ctx.expect.imex {
        assert!(result.is_err());
    } else {
        fails(result, Code::NOT_SUPPORTED);
    }
}

/// An import in the exporting process shows the same bytes.
pub fn import_in_the_same_process_shows_the_same_bytes(ctx: &Ctx) {
    let props = shareable(ctx);
    let ours = Mapped::new(ctx, props, MIB2, &[read_write(Location::Host)]);
    let exported = ctx.mem_export(ours.handle, HandleType::PosixFd).unwrap();
    let imported = ctx.mem_import(&exported).unwrap();
    let theirs = Mapped::of(ctx, imported, MIB2, &everyone(ctx));
    cpu_write(ours.ptr, 512, 1);
    cpu_check(theirs.ptr, 512, 1);
    cpu_write(theirs.ptr, 512, 2);
    cpu_check(ours.ptr, 512, 2);
}

/// Row: import of a POSIX fd in a second process, map, grant host + device: each sees the other's
/// writes; the importer's properties say location HOST_NUMA 0 but handle types 0.
pub fn import_in_a_second_process_shares_the_bytes(ctx: &Ctx) {
    let memory = Mapped::new(ctx, shareable(ctx), MIB2, &everyone(ctx));
    cpu_write(memory.ptr, MIB2 / 8, 10);
    let output = ctx
        .child("importer")
        .stdin(Stdio::from(exported_fd(ctx, memory.handle)))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    cpu_check(memory.ptr, MIB2 / 8, 11);
}

pub fn importer(ctx: &Ctx) {
    let handle = given(ctx);
    let props = ctx.mem_properties(handle).unwrap();
    assert_eq!(props.location, ctx.home());
    if ctx.simulated() || ctx.expect.h200 {
        assert_eq!(props.handle_types, HandleTypes::NONE);
    }
    let memory = Mapped::of(ctx, handle, MIB2, &everyone(ctx));
    cpu_check(memory.ptr, MIB2 / 8, 10);
    cpu_write(memory.ptr, MIB2 / 8, 11);
}

/// Row (text): after the exporter is killed (SIGKILL) the importer's mapping lives on with its
/// bytes, for CPU and GPU.
pub fn an_import_outlives_its_killed_exporter(ctx: &Ctx) {
    let mut exporter = ctx
        .child("exporter")
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(exporter.stdout.take().unwrap());
    // The importer is the exporter's child, and shares its standard output.
    wait_for(&mut lines, "imported", &mut exporter);
    exporter.kill().unwrap();
    let status = exporter.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}");
    wait_for(&mut lines, "verified", &mut exporter);
    // The importer's end closes the pipe.
    lines.read_to_string(&mut String::new()).unwrap();
}

fn wait_for(lines: &mut BufReader<ChildStdout>, word: &str, child: &mut Child) {
    let mut seen = String::new();
    loop {
        let start = seen.len();
        if lines.read_line(&mut seen).unwrap() == 0 {
            panic!("no '{word}' from {:?}; it said:\n{seen}", child.try_wait());
        }
        if seen[start..].trim_end() == word {
            return;
        }
    }
}

pub fn exporter(ctx: &Ctx) {
    let memory = Mapped::new(ctx, shareable(ctx), MIB2, &everyone(ctx));
    cpu_write(memory.ptr, MIB2 / 8, 20);
    let mut importer = ctx
        .child("orphan")
        .env("EGMEM_CONFORMANCE_PARENT", std::process::id().to_string())
        .stdin(Stdio::from(exported_fd(ctx, memory.handle)))
        .spawn()
        .unwrap();
    // Killed in here.
    importer.wait().unwrap();
    panic!("the importer ended first");
}

pub fn orphan(ctx: &Ctx) {
    let memory = Mapped::of(ctx, given(ctx), MIB2, &everyone(ctx));
    println!("\nimported");
    let parent = std::env::var("EGMEM_CONFORMANCE_PARENT").unwrap();
    let parent: u32 = parent.parse().unwrap();
    while std::os::unix::process::parent_id() == parent {
        std::thread::sleep(Duration::from_millis(5));
    }
    cpu_check(memory.ptr, MIB2 / 8, 20);
    let stream = ctx.stream_create(0).unwrap();
    let back = ctx.mem_host_alloc(0, MIB2).unwrap();
    ctx.copy(back, memory.ptr, MIB2, stream).unwrap();
    ctx.stream_synchronize(stream).unwrap();
    cpu_check(back, MIB2 / 8, 20);
    println!("\nverified");
}
