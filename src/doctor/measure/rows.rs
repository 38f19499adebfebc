//! Results, in the form of their JSON.

use serde::{Deserialize, Serialize};

use super::Kind;
use crate::driver::NodeId;
use crate::{Error, Explained};

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
    /// Returns the same row with other figures, made of these.
    pub(crate) fn map<S>(self, figure: impl Fn(R) -> S) -> BandwidthRow<S> {
        BandwidthRow {
            node: self.node,
            gpu: self.gpu,
            memory: self.memory,
            copy_to_gpu: self.copy_to_gpu.map(&figure),
            copy_to_host: self.copy_to_host.map(&figure),
            kernel_read: self.kernel_read.map(&figure),
            kernel_write: self.kernel_write.map(&figure),
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
