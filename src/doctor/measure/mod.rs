//! Proofs and measurements of memory on host nodes, as the [`Survey`](crate::Survey) and the program egm-demo make them.
//!
//! Times on the simulator mean nothing; everything else is the same there.

mod memory;
mod rates;

use serde::{Deserialize, Serialize};

use crate::driver::NodeId;
use crate::{Error, Explained, Reason};

pub use memory::{Kind, Proofs};
pub use rates::Rates;

pub(crate) use memory::HostMemory;

/// What a measurement tells while it runs.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// What it does now.
    Doing(&'a str),
    /// One of its steps is done.
    Done,
    /// What it could not do, and why. It goes on without.
    Without(&'a str, &'a Error),
}

/// One proof: the CPU wrote memory on `node`, `gpu` checked and rewrote it, the CPU checked it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Proof {
    /// The host node.
    pub node: i32,
    /// The GPU's ordinal.
    pub gpu: i32,
    /// How the memory was allocated.
    pub path: Kind,
    /// Through which API: `driver` or `runtime`.
    pub api: String,
    /// Whether both saw the same bytes.
    pub verified: bool,
    /// The reason for a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Proof {
    /// A proof that held, or the reason why it did not.
    pub(super) fn new(
        node: NodeId,
        gpu: i32,
        (path, api): (Kind, &str),
        outcome: Result<(), Error>,
    ) -> Self {
        let error = outcome.err();
        Self {
            node: node.0,
            gpu,
            path,
            api: api.to_owned(),
            verified: error.is_none(),
            reason: error.as_ref().map(|error| Explained(error).message()),
            remedy: error.as_ref().map(|error| error.remedy().to_owned()),
        }
    }
}

/// A bandwidth matrix.
#[derive(Clone, Debug, Serialize)]
pub struct Bandwidth {
    /// 10⁹ bytes a second: `GB/s`.
    pub unit: &'static str,
    /// The bytes moved at a time.
    pub bytes: u64,
    /// The measurements behind each figure.
    pub repeats: u32,
    /// The least of VMM's, registered memory's and the pool's medians over cudaHostAlloc's.
    pub worst_ratio_to_cuda_host_alloc: Option<f64>,
    /// The figures.
    pub rows: Vec<BandwidthRow>,
}

/// One kind of memory on one node, used by one GPU. `None` where the GPU cannot do it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BandwidthRow<R = Rate> {
    /// The host node.
    pub node: i32,
    /// The GPU's ordinal.
    pub gpu: i32,
    /// How the memory was allocated.
    pub memory: Kind,
    /// A copy from the host to the GPU.
    pub copy_to_gpu: Option<R>,
    /// A copy from the GPU to the host.
    pub copy_to_host: Option<R>,
    /// A kernel that reads.
    pub kernel_read: Option<R>,
    /// A kernel that writes.
    pub kernel_write: Option<R>,
}

impl<R: Copy> BandwidthRow<R> {
    /// Returns whether it is the library's memory, whose figures are compared with cudaHostAlloc's.
    pub fn is_compared(&self) -> bool {
        matches!(self.memory, Kind::Vmm | Kind::Registered | Kind::Pool)
    }

    /// Returns cudaHostAlloc's row for the same node and GPU.
    pub fn beside<'a>(&self, rows: &'a [Self]) -> Option<&'a Self> {
        let wanted = (self.node, self.gpu, Kind::HostAlloc);
        rows.iter()
            .find(|row| (row.node, row.gpu, row.memory) == wanted)
    }

    /// Returns the four figures in the order of [`OPERATIONS`].
    pub fn rates(&self) -> [Option<R>; 4] {
        [
            self.copy_to_gpu,
            self.copy_to_host,
            self.kernel_read,
            self.kernel_write,
        ]
    }
}

impl<R> BandwidthRow<R> {
    /// Returns a row of a node, a GPU and a kind of memory, with the four figures in the order of [`OPERATIONS`].
    pub(crate) fn new((node, gpu, memory): (i32, i32, Kind), figures: [Option<R>; 4]) -> Self {
        let [copy_to_gpu, copy_to_host, kernel_read, kernel_write] = figures;
        Self {
            node,
            gpu,
            memory,
            copy_to_gpu,
            copy_to_host,
            kernel_read,
            kernel_write,
        }
    }
}

/// The names of the measurements, for people.
pub const OPERATIONS: [&str; 4] = [
    "copy host to GPU",
    "copy GPU to host",
    "kernel reads",
    "kernel writes",
];

/// Repeated measurements, of bandwidth in GB/s.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// The median.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
}

impl Rate {
    /// Returns the rates at which `bytes` took each of `milliseconds`; `None` for no measurement at all.
    pub fn of(bytes: u64, milliseconds: &[f32]) -> Option<Self> {
        let rate = |&ms: &f32| bytes as f64 / (f64::from(ms) * 1e6);
        Self::of_figures(milliseconds.iter().map(rate))
    }

    /// Returns the median and the range of figures.
    pub(crate) fn of_figures(figures: impl Iterator<Item = f64>) -> Option<Self> {
        let mut rates: Vec<f64> = figures.collect();
        rates.sort_by(f64::total_cmp);
        let (&min, &max) = (rates.first()?, rates.last()?);
        let half = rates.len() / 2;
        let median = if rates.len() % 2 == 1 {
            rates[half]
        } else {
            (rates[half - 1] + rates[half]) / 2.0
        };
        Some(Self { median, min, max })
    }
}

/// A part of a survey, made in a process of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Proofs that the CPU and each GPU see the same bytes on each node.
    Proofs,
    /// Bandwidth.
    Bandwidth,
    /// Latency.
    Latency,
    /// How long memory takes to pin.
    Pinning,
    /// On which node memory lies.
    Placement,
    /// Fabric handles.
    Fabric,
}

egmem_core::driver::display_texts! {
    Part {
        Self::Proofs => "proofs",
        Self::Bandwidth => "bandwidth",
        Self::Latency => "latency",
        Self::Pinning => "pinning",
        Self::Placement => "placement",
        Self::Fabric => "fabric handles",
    }
}

/// What a part found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Section<R> {
    /// How long it took, in seconds.
    pub seconds: Figure<f64>,
    /// What was found, up to the part's end or its time limit.
    pub rows: Vec<R>,
    /// What could not be found, and why.
    pub problems: Vec<Problem>,
}

/// A measured figure. The simulator has none.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure<R = Rate> {
    /// Nothing: the machine is simulated.
    Simulated,
    /// The figure.
    #[serde(untagged)]
    Measured(R),
}

/// Something that could not be found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Problem {
    /// The host node, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<i32>,
    /// The GPU's ordinal, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<i32>,
    /// What is missing, such as a kind of memory; empty: all of it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub what: String,
    /// The reason, and what to do.
    pub reason: Reason,
}

impl Problem {
    pub(crate) fn new(
        (node, gpu): (Option<i32>, Option<i32>),
        what: &str,
        reason: impl Into<Reason>,
    ) -> Self {
        Self {
            node,
            gpu,
            what: what.to_owned(),
            reason: reason.into(),
        }
    }
}

/// How long memory took, from the request until the CPU and the GPUs can use it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pinned {
    /// The host node.
    pub node: i32,
    /// The driver's memory (`vmm`) or registered pages.
    pub backing: Kind,
    /// Its size.
    pub bytes: u64,
    /// The seconds until it could be used.
    pub allocate_s: Figure<f64>,
    /// The seconds until it was given back.
    pub release_s: Figure<f64>,
}

/// Where memory lies, by the fall of each node's free memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// The host node that was asked for.
    pub node: i32,
    /// The driver's memory (`vmm`) or registered pages.
    pub backing: Kind,
    /// Its size.
    pub bytes: u64,
    /// Whether the memory came from the node. `None`: other programs took or freed too much to tell.
    pub on_node: Option<bool>,
    /// By how much each node's free memory fell, in bytes.
    pub taken: Vec<Taken>,
}

/// By how much the free memory of a node fell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// The node: one of the host, or a GPU's memory.
    pub node: i32,
    /// The bytes.
    pub bytes: u64,
}

impl Placed {
    /// Judges by a quarter: other programs allocate and free meanwhile.
    pub(crate) fn new(node: i32, backing: Kind, bytes: u64, taken: Vec<Taken>) -> Self {
        let here = |of: &&Taken| of.node == node;
        let own = taken.iter().filter(here).map(|of| of.bytes).sum::<u64>();
        let others = taken.iter().filter(|of| !here(of)).map(|of| of.bytes);
        let other = others.max().unwrap_or(0);
        let (little, most) = (bytes / 4, bytes / 4 * 3);
        Self {
            node,
            backing,
            bytes,
            on_node: match (own, other) {
                _ if own >= most && other <= little => Some(true),
                _ if own <= little && other >= most => Some(false),
                _ => None,
            },
            taken,
        }
    }
}

/// Memory whose fabric handle was exported and imported on this machine, and proved by this GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fabric {
    /// The host node.
    pub node: i32,
    /// The GPU's ordinal.
    pub gpu: i32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_on_the_node_whose_free_memory_fell() {
        let judge = |taken: [(i32, u64); 2]| {
            let taken = taken.map(|(node, bytes)| Taken { node, bytes });
            Placed::new(1, Kind::Vmm, 1000, taken.into()).on_node
        };
        assert_eq!(judge([(0, 0), (1, 1000)]), Some(true));
        assert_eq!(judge([(0, 200), (1, 800)]), Some(true));
        assert_eq!(judge([(0, 1000), (1, 0)]), Some(false));
        assert_eq!(judge([(0, 500), (1, 500)]), None);
        assert_eq!(judge([(0, 0), (1, 0)]), None);
        assert_eq!(judge([(0, 900), (1, 900)]), None);
    }

    #[test]
    fn figures_of_the_simulator_are_a_word() {
        for (figure, json) in [
            (Figure::Simulated, r#""simulated""#),
            (Figure::Measured(1.5), "1.5"),
        ] {
            assert_eq!(serde_json::to_string(&figure).unwrap(), json);
            assert_eq!(serde_json::from_str::<Figure<f64>>(json).unwrap(), figure);
        }
    }
}
