//! The demo's results, in the form of its JSON.

use egmem::{Error, Explained};
use serde::Serialize;

/// Everything. The fields' names are an interface: other programs read them.
#[derive(Debug, Serialize)]
pub struct Report {
    /// `cuda` or `simulated`.
    pub backend: &'static str,
    /// Why it simulates although the user did not ask for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_simulated: Option<String>,
    pub machine: Machine,
    /// The driver's CUDA version: `13.0`.
    pub driver_version: String,
    /// The bytes of each allocation.
    pub size: u64,
    /// Where the topology comes from.
    pub topology: String,
    pub nodes: Vec<Node>,
    pub gpus: Vec<Gpu>,
    pub proofs: Vec<Proof>,
    /// Whether plain `cudaMallocAsync` can draw from a host pool: an extra that many platforms
    /// refuse, so it does not count for the exit status. Only with a CUDA runtime library.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub malloc_async: Vec<Proof>,
    /// Why the runtime API's pools were not tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_missing: Option<String>,
    /// Only of GPUs: the simulator has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
}

/// The machine, real or simulated.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// The simulated machine's name; the CPU's model of a real one.
    pub name: String,
    /// The instruction set that this program was built for.
    pub arch: &'static str,
}

/// A host NUMA node.
#[derive(Debug, Serialize)]
pub struct Node {
    pub id: i32,
    pub cpus: String,
    pub memory_total: u64,
    pub memory_free: Option<u64>,
}

/// A GPU.
#[derive(Debug, Serialize)]
pub struct Gpu {
    /// The CUDA ordinal.
    pub ordinal: i32,
    pub name: String,
    pub pci_bus_id: String,
    pub memory: u64,
    /// Its host NUMA node; null if unknown.
    pub host_numa: Option<i32>,
    /// The NUMA node that its own memory forms, on coherent machines.
    pub memory_node: Option<i32>,
    pub coherent: bool,
    pub link: String,
}

/// How memory was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Path {
    Vmm,
    Registered,
    Pool,
}

/// One proof: the CPU wrote memory on `node`, `gpu` checked and rewrote it, the CPU checked it.
#[derive(Debug, Serialize)]
pub struct Proof {
    pub node: i32,
    pub gpu: i32,
    pub path: Path,
    /// Through which API: `driver` or `runtime`.
    pub api: &'static str,
    pub verified: bool,
    /// The reason for a failure, and its remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<&'static str>,
}

impl Proof {
    /// A proof that held, or the reason why it did not.
    pub fn new(
        node: i32,
        gpu: i32,
        path: Path,
        api: &'static str,
        outcome: Result<(), Error>,
    ) -> Self {
        let error = outcome.err();
        Self {
            node,
            gpu,
            path,
            api,
            verified: error.is_none(),
            reason: error.as_ref().map(reason),
            remedy: error.as_ref().map(Error::remedy),
        }
    }
}

/// The error with the driver call behind it, without the remedy.
fn reason(error: &Error) -> String {
    let explained = Explained(error).to_string();
    let remedy = format!("; {}", error.remedy());
    explained
        .strip_suffix(&remedy)
        .map_or_else(|| explained.clone(), str::to_owned)
}

/// The bandwidth matrix.
#[derive(Debug, Serialize)]
pub struct Bandwidth {
    /// 10⁹ bytes a second.
    pub unit: &'static str,
    /// Bytes moved at a time.
    pub bytes: u64,
    /// Measurements behind each figure.
    pub repeats: u32,
    /// The least of VMM's, registered memory's and the pool's medians over cudaHostAlloc's.
    pub worst_ratio_to_cuda_host_alloc: Option<f64>,
    pub rows: Vec<BandwidthRow>,
}

/// One kind of memory on one node, used by one GPU. Null where the GPU cannot do it.
#[derive(Debug, Serialize)]
pub struct BandwidthRow {
    pub node: i32,
    pub gpu: i32,
    /// `vmm`, `registered`, `pool`, `cudaHostAlloc` or `pageable`.
    pub memory: &'static str,
    pub copy_to_gpu: Option<Rate>,
    pub copy_to_host: Option<Rate>,
    pub kernel_read: Option<Rate>,
    pub kernel_write: Option<Rate>,
}

impl BandwidthRow {
    /// Whether it is the library's memory, whose figures are compared with cudaHostAlloc's.
    pub fn is_compared(&self) -> bool {
        matches!(self.memory, "vmm" | "registered" | "pool")
    }

    /// cudaHostAlloc's row for the same node and GPU.
    pub fn beside<'a>(&self, rows: &'a [Self]) -> Option<&'a Self> {
        rows.iter()
            .find(|row| (row.node, row.gpu, row.memory) == (self.node, self.gpu, "cudaHostAlloc"))
    }

    /// The four figures in the order of [`OPERATIONS`].
    pub fn rates(&self) -> [Option<Rate>; 4] {
        [
            self.copy_to_gpu,
            self.copy_to_host,
            self.kernel_read,
            self.kernel_write,
        ]
    }
}

/// The names of the measurements, for people.
pub const OPERATIONS: [&str; 4] = [
    "copy host to GPU",
    "copy GPU to host",
    "kernel reads",
    "kernel writes",
];

/// Repeated measurements in GB/s.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rate {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Rate {
    /// The rates at which `bytes` took each of `milliseconds`; `None` for no measurement at all.
    pub fn of(bytes: u64, milliseconds: &[f32]) -> Option<Self> {
        let mut rates: Vec<f64> = milliseconds
            .iter()
            .map(|&ms| bytes as f64 / (f64::from(ms) * 1e6))
            .collect();
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
