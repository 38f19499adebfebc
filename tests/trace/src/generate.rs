//! Making sequences from a seed.

use super::Sequence;
use super::model::Model;
use super::random::Random;

/// The size of generated sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How many operations: at least 1.
    pub len: usize,
    /// How many devices to use, at least 1: the machine must have as many.
    pub devices: i32,
}

/// A sequence of valid and invalid operations, the same for the same arguments on every machine.
///
/// It holds less than 1 GiB at any time. Invalid ids are ones that no machine has (device 99, node
/// 99), so that a sequence recorded on one GPU can be replayed on a machine with more.
pub fn generate(seed: u64, shape: &Shape) -> Sequence {
    let mut model = Model::new(Random::new(seed), shape.devices.max(1));
    while model.ops.len() < shape.len {
        model.next();
    }
    model.ops.truncate(shape.len);
    Sequence {
        seed,
        devices: shape.devices.max(1),
        ops: model.ops,
    }
}
