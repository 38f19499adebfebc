//! What a child that was forked without `exec` has of its parent's memory.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use egmem::driver::*;

use super::pools::plain;
use crate::conformance::harness::Ctx;
use crate::conformance::raw::*;

/// Rows: what a forked child has of host memory, pinned memory and memory of a pool.
pub fn a_forked_child_shares_host_memory(ctx: &Ctx) {
    ctx.run_child("forks");
}

pub fn forks(ctx: &Ctx) {
    let props = AllocationProps::at(ctx.home()).handle_types(HandleTypes::POSIX_FD);
    let host = [read_write(Location::Host)];
    let memory = Mapped::new(ctx, props, MIB2, &host);
    let exported = ctx.mem_export(memory.handle, HandleType::PosixFd).unwrap();
    let imported = Mapped::of(ctx, ctx.mem_import(&exported).unwrap(), MIB2, &host);
    let pinned = ctx.mem_host_alloc(0, MIB2).unwrap();
    let calls = ctx.driver_pools();
    let pool = calls.pool_create(&plain(ctx.home())).unwrap();
    let stream = ctx.stream_create(0).unwrap();
    let pooled = calls.alloc_from_pool_async(pool, MIB2, stream).unwrap();
    ctx.stream_synchronize(stream).unwrap();
    for ptr in [memory.ptr, imported.ptr, pinned, pooled] {
        poke(ptr, 11);
        let child = in_a_child(|| {
            let found = peek(ptr);
            poke(ptr, 22);
            found
        });
        assert_eq!(child.code(), Some(11), "{ptr:?}: {child}");
        assert_eq!(peek(ptr), 22);
    }
}

/// Row: what a forked child has of managed memory.
pub fn a_forked_child_has_no_managed_memory(ctx: &Ctx) {
    ctx.run_child("forks_with_managed_memory");
}

pub fn forks_with_managed_memory(ctx: &Ctx) {
    let managed = ctx.mem_alloc_managed(0, MIB2).unwrap();
    poke(managed, 11);
    let read = in_a_child(|| peek(managed));
    assert_eq!(read.signal(), Some(libc::SIGSEGV), "{read}");
    let written = in_a_child(|| {
        poke(managed, 22);
        0
    });
    assert_eq!(written.signal(), Some(libc::SIGSEGV), "{written}");
    assert_eq!(peek(managed), 11);
}

/// Forks a child that ends with the status that `work` returns.
fn in_a_child(work: impl FnOnce() -> u64) -> ExitStatus {
    // SAFETY: the child touches memory and ends; it takes no lock and allocates nothing.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        let status = work();
        // SAFETY: ends this process, which has one thread.
        unsafe { libc::_exit(status as i32) }
    }
    let mut status = 0;
    // SAFETY: `status` is this function's own, and nothing else waits for the child.
    let found = unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(found, child);
    ExitStatus::from_raw(status)
}
