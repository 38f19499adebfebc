//! How often one memory can be shared: exports, imports and CPU mappings count together.
//!
//! Cases that hold many fds run in a child process, so that they do not take them from others.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;

use egmem::driver::*;

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::raw::*;

/// The most references that were tried on the real driver.
const MANY: u64 = 400;
const SIZE: u64 = MIB2;

/// Mappings of one memory side by side.
struct Many<'a> {
    ctx: &'a Ctx,
    start: DevicePtr,
    mapped: u64,
    handles: Vec<PhysicalHandle>,
}

impl<'a> Many<'a> {
    fn new(ctx: &'a Ctx) -> Self {
        Self {
            ctx,
            start: ctx.mem_address_reserve(MANY * SIZE, 0, 0).unwrap(),
            mapped: 0,
            handles: Vec::new(),
        }
    }

    fn create(&mut self) -> PhysicalHandle {
        let props = AllocationProps::at(self.ctx.home()).handle_types(HandleTypes::POSIX_FD);
        let handle = self.ctx.mem_create(SIZE, &props).unwrap();
        self.handles.push(handle);
        handle
    }

    fn import(&mut self, fd: impl AsFd) -> PhysicalHandle {
        let fd = ShareableHandle::PosixFd(fd.as_fd().try_clone_to_owned().unwrap());
        let handle = self.ctx.mem_import(&fd).unwrap();
        self.handles.push(handle);
        handle
    }

    /// Maps `handle` once more and grants it.
    fn map(&mut self, handle: PhysicalHandle, who: Location) -> egmem::Result<()> {
        let at = self.start.add(self.mapped * SIZE);
        self.ctx.map(at, SIZE, 0, handle).unwrap();
        self.mapped += 1;
        self.ctx.set_access(at, SIZE, &[read_write(who)])
    }

    /// Maps the handles of `next` for the CPU: `expected` times, after which the driver must refuse; `None`: `MANY`
    /// times in all.
    #[track_caller]
    fn cpu_mappings(&mut self, expected: Option<u64>, next: impl Fn(&mut Self) -> PhysicalHandle) {
        for _ in 0..expected.unwrap_or(MANY - self.mapped) {
            let handle = next(self);
            self.map(handle, Location::Host).unwrap();
        }
        if expected.is_some() {
            let handle = next(self);
            fails(self.map(handle, Location::Host), Code::INVALID_VALUE);
        }
        let last = self.start.add((self.mapped - 1) * SIZE - 8);
        poke(last, 1);
    }
}

impl Drop for Many<'_> {
    fn drop(&mut self) {
        let size = MANY * SIZE;
        let unmapped = self.ctx.unmap(self.start, size);
        let released = self.handles.iter().map(|handle| self.ctx.release(*handle));
        let released: egmem::Result<()> = released.collect();
        let freed = self.ctx.address_free(self.start, size);
        if !std::thread::panicking() {
            unmapped.and(released).and(freed).unwrap();
        }
    }
}

fn export(ctx: &Ctx, handle: PhysicalHandle) -> OwnedFd {
    match ctx.mem_export(handle, HandleType::PosixFd).unwrap() {
        ShareableHandle::PosixFd(fd) => fd,
        ShareableHandle::Fabric(_) => panic!("an fd was asked for"),
    }
}

/// Row: mappings of one own handle.
pub fn one_handle_is_mapped_for_the_cpu_254_times(ctx: &Ctx) {
    if !ctx.knows_references() {
        return;
    }
    let mut many = Many::new(ctx);
    let handle = many.create();
    many.cpu_mappings(ctx.expect.references, |_| handle);
}

/// Row: mappings of one handle imported from another process.
pub fn an_imported_handle_is_mapped_for_the_cpu_252_times(ctx: &Ctx) {
    let mut many = Many::new(ctx);
    let handle = many.create();
    let fd = export(ctx, handle);
    let child = ctx.child("maps_an_import").stdin(Stdio::from(fd)).output();
    let child = child.unwrap();
    let errors = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{}\n{errors}", child.status);
}

pub fn maps_an_import(ctx: &Ctx) {
    if !ctx.knows_references() {
        return;
    }
    let mut many = Many::new(ctx);
    let handle = many.import(std::io::stdin());
    // The export and the import are two.
    many.cpu_mappings(ctx.expect.references.map(|all| all - 2), |_| handle);
}

/// Row: imports of the same fd, each mapped once.
pub fn imports_of_one_fd_are_mapped_for_the_cpu_126_times(ctx: &Ctx) {
    ctx.run_child("maps_imports");
}

pub fn maps_imports(ctx: &Ctx) {
    if !ctx.knows_references() {
        return;
    }
    let mut many = Many::new(ctx);
    let handle = many.create();
    let fd = export(ctx, handle);
    // Each is an import and a mapping, and there is the export.
    let expected = ctx.expect.references.map(|all| (all - 1) / 2);
    many.cpu_mappings(expected, |many| many.import(&fd));
}

/// Rows: imports of the same fd, not mapped; 400 imports mapped for a GPU alone.
pub fn a_gpu_is_granted_what_the_cpu_is_refused(ctx: &Ctx) {
    ctx.run_child("imports_for_a_gpu");
}

pub fn imports_for_a_gpu(ctx: &Ctx) {
    if !ctx.knows_references() {
        return;
    }
    let mut many = Many::new(ctx);
    let handle = many.create();
    let fd = export(ctx, handle);
    for _ in 0..MANY - 1 {
        let handle = many.import(&fd);
        many.map(handle, Location::Device(0)).unwrap();
    }
    let last = many.map(handle, Location::Host);
    match ctx.expect.references {
        Some(_) => fails(last, Code::INVALID_VALUE),
        None => last.unwrap(),
    }
}

/// Row: exports of one handle, each closed before the next.
pub fn exports_that_are_closed_do_not_count(ctx: &Ctx) {
    if !ctx.knows_references() {
        return;
    }
    let mut many = Many::new(ctx);
    let handle = many.create();
    let exports = || (0..MANY).for_each(|_| drop(export(ctx, handle)));
    exports();
    many.map(handle, Location::Host).unwrap();
    exports();
    many.cpu_mappings(ctx.expect.references.map(|all| all - 1), |_| handle);
}

/// Rows: separate exports of one handle, not closed; duplicates of one exported fd.
pub fn separate_exports_count_and_duplicates_do_not(ctx: &Ctx) {
    ctx.run_child("exports_and_duplicates");
}

pub fn exports_and_duplicates(ctx: &Ctx) {
    if !ctx.knows_references() {
        return;
    }
    let mut many = Many::new(ctx);
    let handle = many.create();
    let first = export(ctx, handle);
    let duplicates: Vec<_> = (0..MANY).map(|_| first.try_clone().unwrap()).collect();
    many.map(handle, Location::Host).unwrap();
    drop(duplicates);
    let mut exports: Vec<_> = (0..200).map(|_| export(ctx, handle)).collect();
    many.map(handle, Location::Host).unwrap();
    exports.extend((0..200).map(|_| export(ctx, handle)));
    let last = many.map(handle, Location::Host);
    match ctx.expect.references {
        Some(_) => fails(last, Code::INVALID_VALUE),
        None => last.unwrap(),
    }
}
