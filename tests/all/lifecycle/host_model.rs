//! Host memory of every kind is a row of bytes for the CPU and each GPU.

use egmem::memory::CpuMemory;
use egmem::pinned::{ManagedMemory, PageSize, PinnedHost, RegisteredHost};
use egmem::{Buffer, Driver, Memory, Stream};
use proptest::prelude::*;

use crate::lifecycle::{grace, node, nothing_held};

const BYTES: u64 = 5000;

/// An operation on bytes: from an offset on, so many, at most to the end.
#[derive(Clone, Debug)]
enum Step {
    CpuWrites(u8),
    GpuFills(i32, u8),
    /// A copy by a GPU to other memory, and from there to the start.
    GpuMoves(i32),
}

fn step() -> impl Strategy<Value = (u64, u64, Step)> {
    let what = prop_oneof![
        any::<u8>().prop_map(Step::CpuWrites),
        (0..4, any::<u8>()).prop_map(|(gpu, byte)| Step::GpuFills(gpu, byte)),
        (0..4).prop_map(Step::GpuMoves),
    ];
    (0..BYTES, 1..BYTES, what)
}

fn check(driver: &Driver, memory: &(impl Memory + CpuMemory), steps: &[(u64, u64, Step)]) {
    let view = memory.cpu().unwrap();
    let other = PinnedHost::new(driver, 0, BYTES).unwrap();
    let mut model = vec![0; BYTES as usize];
    view.fill(0, BYTES, 0).unwrap();
    for &(from, len, ref what) in steps {
        let len = len.min(BYTES - from);
        let at = from as usize..(from + len) as usize;
        match *what {
            Step::CpuWrites(byte) => {
                let bytes: Vec<u8> = (0..len).map(|at| byte.wrapping_add(at as u8)).collect();
                view.write_at(from, &bytes).unwrap();
                model[at].copy_from_slice(&bytes);
            }
            Step::GpuFills(gpu, byte) => {
                let stream = Stream::new(driver, gpu).unwrap();
                stream.fill(memory, from, len, byte).unwrap();
                model[at].fill(byte);
            }
            Step::GpuMoves(gpu) => {
                let stream = Stream::new(driver, gpu).unwrap();
                stream.copy(&other, 0, memory, from, len).unwrap();
                stream.copy(memory, 0, &other, 0, len).unwrap();
                model.copy_within(at, 0);
            }
        }
        let mut seen = vec![0; BYTES as usize];
        view.read_at(0, &mut seen).unwrap();
        assert!(seen == model, "after {what:?} at {from}, {len} bytes");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn host_memory_of_each_kind_is_a_row_of_bytes(steps in prop::collection::vec(step(), 1..20)) {
        let driver = &grace();
        check(driver, &Buffer::on(node(driver, 0)).bytes(BYTES).allocate(driver).unwrap(), &steps);
        check(driver, &PinnedHost::new(driver, 0, BYTES).unwrap(), &steps);
        for size in [PageSize::Base, PageSize::Transparent] {
            check(driver, &RegisteredHost::new(driver, 0, BYTES, size).unwrap(), &steps);
        }
        check(driver, &ManagedMemory::new(driver, 0, BYTES).unwrap(), &steps);
        nothing_held(driver);
    }
}
