//! Random operations on a heap's memory.

use proptest::prelude::*;

use super::model::{LIMIT, UNIT};
use crate::driver::Call;

#[derive(Clone, Debug)]
pub(super) enum Op {
    Block {
        units: u64,
        odd: u64,
        shift: u32,
    },
    More {
        units: u64,
    },
    /// Frees the used units in a range.
    Free {
        from: usize,
        len: usize,
    },
    /// Gives back the free units in a range.
    Trim {
        from: usize,
        len: usize,
    },
    /// Holds the memory of a chunk, or drops all holds.
    Hold {
        unit: usize,
    },
    LetGo,
}

/// Which call, which use of it, whether twice, whether as a shortage of memory.
pub(super) type Fault = (usize, u64, bool, bool);

/// The calls for chunks that the driver creates, and for registered ones.
pub(super) const CALLS: [[Call; 5]; 2] = [DRIVER, REGISTERED];

const DRIVER: [Call; 5] = [
    Call::MemCreate,
    Call::MemMap,
    Call::MemSetAccess,
    Call::MemUnmap,
    Call::MemRelease,
];

const REGISTERED: [Call; 5] = [
    Call::MemHostRegister,
    Call::MemHostGetDevicePointer,
    Call::MemHostUnregister,
    Call::MemHostRegister,
    Call::MemHostUnregister,
];

pub(super) fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1_u64..14, 0_u64..UNIT, 0_u32..4).prop_map(|(units, odd, shift)| Op::Block { units, odd, shift }),
        1 => (1_u64..14).prop_map(|units| Op::More { units }),
        3 => (0..LIMIT, 1..20_usize).prop_map(|(from, len)| Op::Free { from, len }),
        3 => (0..LIMIT, 1..20_usize).prop_map(|(from, len)| Op::Trim { from, len }),
        1 => (0..LIMIT).prop_map(|unit| Op::Hold { unit }),
        1 => Just(Op::LetGo),
    ]
}
