//! The crate's kernels on memory of each kind, from each GPU.

use egmem::driver::*;
use egmem::kernels::{CHECK_REWRITE, READ, WRITE, pattern};

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::raw::*;

/// More words than threads, and no multiple of them.
const WORDS: u64 = 10_007;

struct Report<'a> {
    ctx: &'a Ctx,
    ptr: DevicePtr,
}

impl<'a> Report<'a> {
    fn new(ctx: &'a Ctx) -> Self {
        let ptr = ctx.mem_host_alloc(0, 4096).unwrap();
        Self { ctx, ptr }
    }

    fn set(&self, words: [u64; 2]) -> u64 {
        poke(self.ptr, words[0]);
        poke(self.ptr.add(8), words[1]);
        self.ptr.0
    }

    fn get(&self) -> [u64; 2] {
        [peek(self.ptr), peek(self.ptr.add(8))]
    }
}

impl Drop for Report<'_> {
    fn drop(&mut self) {
        let freed = self.ctx.free_host(0, self.ptr);
        if !std::thread::panicking() {
            freed.unwrap();
        }
    }
}

fn prove(ctx: &Ctx, gpu: i32, ptr: DevicePtr, on_cpu: bool) {
    let stream = ctx.stream_create(gpu).unwrap();
    let kernels = Loaded::new(ctx, gpu);
    let report = Report::new(ctx);
    if on_cpu {
        cpu_write(ptr, WORDS, 1);
    } else {
        ctx.launch(&kernels, WRITE, &[ptr.0, WORDS, 1], stream)
            .unwrap();
    }
    // Right bytes, rewritten.
    let args = [ptr.0, WORDS, 1, 2, report.set([u64::MAX, 0])];
    ctx.launch(&kernels, CHECK_REWRITE, &args, stream).unwrap();
    assert_eq!(report.get(), [u64::MAX, 0]);
    if on_cpu {
        cpu_check(ptr, WORDS, 2);
    }
    // The sum of the words now.
    let args = [ptr.0, WORDS, report.set([0, 0])];
    ctx.launch(&kernels, READ, &args, stream).unwrap();
    let sum = (0..WORDS).fold(0, |sum, i| sum ^ pattern(2, i));
    assert_eq!(report.get()[0], sum);
    // Wrong bytes, counted and left alone.
    let args = [ptr.0, WORDS, 3, 4, report.set([u64::MAX, 0])];
    ctx.launch(&kernels, CHECK_REWRITE, &args, stream).unwrap();
    assert_eq!(report.get(), [0, WORDS]);
    ctx.destroy_stream(stream).unwrap();
}

/// CPU writes → each GPU checks and rewrites → CPU checks.
pub fn kernels_check_and_rewrite_host_memory_from_each_gpu(ctx: &Ctx) {
    for node in &ctx.expect.nodes {
        let mut access = vec![read_write(Location::Host)];
        access.extend(ctx.gpus().map(|gpu| read_write(Location::Device(gpu))));
        let props = AllocationProps::at(Location::HostNuma(*node));
        let memory = Mapped::new(ctx, props, MIB2, &access);
        ctx.gpus().for_each(|gpu| prove(ctx, gpu, memory.ptr, true));
    }
}

/// The same on each GPU's own memory.
pub fn kernels_check_and_rewrite_device_memory(ctx: &Ctx) {
    for gpu in ctx.gpus() {
        let own = Location::Device(gpu);
        let memory = Mapped::new(ctx, AllocationProps::at(own), MIB2, &[read_write(own)]);
        prove(ctx, gpu, memory.ptr, false);
    }
}

/// GPU 0's VMM memory, granted to each peer that can reach it, used by their kernels.
pub fn peers_reach_device_memory_that_is_granted_to_them(ctx: &Ctx) {
    let peers = ctx
        .gpus()
        .skip(1)
        .filter(|peer| ctx.device_can_access_peer(*peer, 0).unwrap());
    let peers: Vec<i32> = peers.collect();
    let mut access = vec![read_write(Location::Device(0))];
    access.extend(peers.iter().map(|peer| read_write(Location::Device(*peer))));
    let props = AllocationProps::at(Location::Device(0));
    let memory = Mapped::new(ctx, props, MIB2, &access);
    if peers.is_empty() {
        println!("no peer reaches GPU 0");
    }
    peers
        .iter()
        .for_each(|peer| prove(ctx, *peer, memory.ptr, false));
}

/// A single wrong word is found where it is.
pub fn a_wrong_word_is_named(ctx: &Ctx) {
    let memory = Mapped::shared(ctx, MIB2);
    let stream = ctx.stream_create(0).unwrap();
    let kernels = Loaded::new(ctx, 0);
    let report = Report::new(ctx);
    cpu_write(memory.ptr, WORDS, 1);
    for wrong in [WORDS - 1, 5000, 4999] {
        poke(memory.ptr.add(8 * wrong), 0);
    }
    let args = [memory.ptr.0, WORDS, 1, 2, report.set([u64::MAX, 0])];
    ctx.launch(&kernels, CHECK_REWRITE, &args, stream).unwrap();
    assert_eq!(report.get(), [4999, 3]);
    assert_eq!(peek(memory.ptr.add(8 * 5000)), 0, "left as it was");
    assert_eq!(peek(memory.ptr.add(8 * 5001)), pattern(2, 5001));
    drop((kernels, report));
    ctx.destroy_stream(stream).unwrap();
}

/// Launches that cannot be.
pub fn impossible_launches_are_refused(ctx: &Ctx) {
    let stream = ctx.stream_create(0).unwrap();
    let module = ctx.module_load(0, egmem::kernels::PTX).unwrap();
    fails(
        ctx.module_function(0, module, c"no_such_kernel"),
        Code::NOT_FOUND,
    );
    let function = ctx.module_function(0, module, WRITE).unwrap();
    for (blocks, threads) in [(0, 32), (1, 0), (1, 2048)] {
        let dims = LaunchDims { blocks, threads };
        // SAFETY: no word is written: the count is 0, and the launch is refused.
        let result = unsafe { ctx.launch_kernel(function, dims, &[0, 0, 0], stream) };
        fails(result, Code::INVALID_VALUE);
    }
    ctx.unload(0, module).unwrap();
    ctx.destroy_stream(stream).unwrap();
}
