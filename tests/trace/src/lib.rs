//! Random sequences of driver calls, recorded on one machine and replayed on another.
//!
//! [`generate`] makes a [`Sequence`] of valid and invalid calls from a seed, [`run`] runs it on a
//! driver and records every answer, [`compare`] finds where two records of it differ. Recorded on
//! a real GPU and replayed on the simulator, they show where the two behave differently; the
//! program `record-trace` does the recording.
//!
//! No operation of a sequence faults, for any answer of the driver: the runner knows the memory that it mapped and
//! granted, and leaves out operations that would touch other memory. Calls that CUDA leaves undefined (a
//! destroyed pool, stream or event used again) are never made.
//!
//! ```
//! use egmem_trace::{Shape, compare, generate, run};
//!
//! let driver = egmem::Driver::simulated(egmem::Machine::h200x8())?;
//! let sequence = generate(1, &Shape { len: 64, devices: 1 });
//! let (once, again) = (run(&driver, &sequence), run(&driver, &sequence));
//! assert!(compare(&sequence, &once, &again).is_empty());
//! # Ok::<(), egmem::Error>(())
//! ```

mod addr;
mod compare;
mod generate;
mod make_pool;
mod make_vmm;
mod make_work;
mod model;
mod op;
mod pools;
mod random;
mod run;
mod slots;
mod state;
mod vmm;
mod work;

use serde::{Deserialize, Serialize};

pub use addr::{Addr, Memory, Slot};
pub use compare::{Difference, Report, compare, history};
pub use generate::{Shape, generate};
pub use op::{Op, Query, Source};
pub use run::{Runner, run};
pub use slots::SlotRef;

/// Operations to run one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sequence {
    /// The seed that it was generated from.
    pub seed: u64,
    /// How many devices it uses: ordinals 0 to `devices` − 1.
    pub devices: i32,
    /// The operations.
    pub ops: Vec<Op>,
}

/// A driver's answers to a [`Sequence`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The answer to each operation.
    pub outcomes: Vec<Outcome>,
    /// The objects that could not be given back at the end, with the code: should be empty.
    pub left: Vec<String>,
}

/// The answer to one operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Outcome {
    /// Success, with the outputs that do not depend on addresses and handles.
    Done(Vec<Value>),
    /// The driver's code.
    Failed(i32),
    /// An error without a code: its name.
    Refused(String),
    /// Not called: a slot is empty, or the call could fault.
    Skipped,
}

/// One output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// A number.
    Number(u64),
    /// An address as an [`Addr`], a slot, a location.
    Text(String),
}

/// A line of a trace file, which is JSON Lines: the header, then sequences.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// Where and when: the first line.
    Header(Header),
    /// A sequence with its answers.
    Sequence(Recorded),
    /// A sequence in which the process died.
    Crash(Crash),
}

/// Where and when a trace was recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The format's version: 1.
    pub format: u32,
    /// The day, `2026-11-21`.
    pub date: String,
    /// `cuda` or `simulated`.
    pub backend: String,
    /// GPU 0's name.
    pub gpu: String,
    /// How many GPUs the machine has.
    pub gpus: i32,
    /// The kernel driver's version, where it is known.
    pub driver: String,
    /// The driver's CUDA version.
    pub cuda: egmem::driver::CudaVersion,
    /// The version of this crate.
    pub crate_version: String,
    /// The seed of the first sequence; each next one's is one more.
    pub seed: u64,
    /// Operations per sequence.
    pub len: usize,
    /// How many devices the sequences use.
    pub devices: i32,
}

/// A sequence with its answers, as one line of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// The seed.
    pub seed: u64,
    /// How many devices it uses.
    pub devices: i32,
    /// Operation and answer.
    pub steps: Vec<(Op, Outcome)>,
    /// The objects that could not be given back at the end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left: Vec<String>,
}

/// A process that died in a sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Crash {
    /// The sequence.
    pub sequence: Sequence,
    /// The operation under way, counted from 0; the last one also while all was given back.
    pub op: usize,
    /// How it died.
    pub how: String,
}

impl Recorded {
    /// Puts a sequence and its answers together.
    pub fn new(sequence: Sequence, record: Record) -> Self {
        Self {
            seed: sequence.seed,
            devices: sequence.devices,
            steps: sequence.ops.into_iter().zip(record.outcomes).collect(),
            left: record.left,
        }
    }

    /// Takes them apart again.
    pub fn split(self) -> (Sequence, Record) {
        let (ops, outcomes) = self.steps.into_iter().unzip();
        let sequence = Sequence {
            seed: self.seed,
            devices: self.devices,
            ops,
        };
        let record = Record {
            outcomes,
            left: self.left,
        };
        (sequence, record)
    }
}

impl Outcome {
    /// The code, 0 for success; `None` where nothing was called or there is none.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Done(_) => Some(0),
            Self::Failed(code) => Some(*code),
            Self::Refused(_) | Self::Skipped => None,
        }
    }

    /// Whether the call succeeded.
    pub fn is_done(&self) -> bool {
        matches!(self, Self::Done(_))
    }

    /// Whether the code says that the GPU's context is lost to the process.
    pub fn loses_context(&self) -> bool {
        matches!(self, Self::Failed(700 | 702 | 714..=719))
    }
}
