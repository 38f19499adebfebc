//! Reports what works on this machine, why the rest does not, and what to do about it.
//!
//! [`Report::gather`] collects everything that `egmem doctor` shows. A [`Prober`] runs the trials:
//! [`InProcess`] runs them in this process; the command line runs them in child processes, because drivers
//! have crashed inside such calls.

mod advice;
mod libraries;
mod prober;
mod reason;
mod traps;

use serde::Serialize;

pub use advice::Advice;
pub use libraries::Libraries;
pub use prober::{Answer, AutoBacking, InProcess, Prober, Tried};
pub use reason::Reason;

use crate::capability::{self, HANDLE_TYPES, Hint, ImexChannel, Path, Trial};
use crate::driver::{CudaVersion, Location};
use crate::host::HostFacts;
use crate::{Driver, Result, Topology};

/// Everything that `egmem doctor` shows.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The simulated machine's name. The fields below then say nothing about this machine's GPUs.
    pub simulated: Option<String>,
    /// Whether host-NUMA memory works, for the CPU and at least one GPU, by VMM or by pool.
    pub works: bool,
    /// The ordinals of the GPUs for which it does.
    pub working_gpus: Vec<i32>,
    /// The driver.
    pub driver: DriverFacts,
    /// GPUs and nodes; only the nodes if no driver can be opened.
    pub topology: Topology,
    /// The claims of the driver's attributes, for each GPU.
    pub hints: Vec<GpuHints>,
    /// The IMEX channel; without one there are no fabric handles.
    pub imex: ImexChannel,
    /// Facts about this machine, container and process, also if the driver is simulated.
    pub host: HostFacts,
    /// The results of all trials: every node, GPU, path and set of handle types.
    pub capabilities: Vec<Tried>,
    /// What `Backing::Auto` takes on each host node.
    pub backings: Vec<AutoBacking>,
    /// Settings that should change, and what to do.
    pub advice: Vec<Advice>,
}

/// Facts about the driver.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct DriverFacts {
    /// `"cuda"` or `"simulated"`.
    pub backend: &'static str,
    /// The newest CUDA version that the driver supports.
    pub cuda: Option<CudaVersion>,
    /// The libraries of the process that opened it, also if it cannot be used.
    #[serde(flatten)]
    pub libraries: Libraries,
    /// The reason why it cannot be used.
    pub problem: Option<Reason>,
}

/// The claims of the attributes of a GPU.
#[derive(Clone, Debug, Serialize)]
pub struct GpuHints {
    /// The GPU's ordinal.
    pub gpu: i32,
    /// Its attributes.
    pub attributes: Vec<Hint>,
}

impl Report {
    /// Collects everything about this machine. `prober` opens the driver before this process does, so that a
    /// crash of the driver ends only the prober's process.
    pub fn gather(prober: &mut dyn Prober) -> Self {
        let mut report = Self::without_advice(prober, Driver::open);
        report.advice = advice::advise(&report);
        report
    }

    fn without_advice(prober: &mut dyn Prober, open: impl FnOnce() -> Result<Driver>) -> Self {
        let driver = prober.open().and_then(|()| {
            let driver = open()?;
            Ok((Topology::discover(&driver)?, driver))
        });
        let host = HostFacts::read();
        match driver {
            Ok((topology, driver)) => Self::with_driver(&driver, topology, host, prober),
            Err(problem) => Self::without_driver(problem, host, prober.libraries()),
        }
    }

    fn with_driver(
        driver: &Driver,
        topology: Topology,
        host: HostFacts,
        prober: &mut dyn Prober,
    ) -> Self {
        let capabilities = try_all(&topology, prober);
        let backings = prober::choose_all(&topology, &capabilities, prober);
        let working_gpus: Vec<i32> = topology
            .gpus()
            .iter()
            .map(|gpu| gpu.ordinal)
            .filter(|&gpu| {
                capabilities
                    .iter()
                    .any(|tried| tried.trial.gpu == gpu && tried.answer.is_yes())
            })
            .collect();
        Self {
            works: !working_gpus.is_empty(),
            working_gpus,
            driver: DriverFacts {
                cuda: driver.driver_version().ok(),
                ..DriverFacts::of_this_machine(driver.is_simulated())
            },
            hints: topology
                .gpus()
                .iter()
                .map(|gpu| GpuHints {
                    gpu: gpu.ordinal,
                    attributes: capability::hints(driver, gpu.ordinal),
                })
                .collect(),
            imex: ImexChannel::of(driver),
            simulated: None,
            topology,
            host,
            capabilities,
            backings,
            advice: Vec::new(),
        }
    }

    fn without_driver(problem: Reason, host: HostFacts, libraries: Libraries) -> Self {
        Self {
            simulated: None,
            works: false,
            working_gpus: Vec::new(),
            driver: DriverFacts {
                problem: Some(problem),
                libraries,
                ..DriverFacts::of_this_machine(false)
            },
            topology: Topology::of_host(),
            hints: Vec::new(),
            imex: ImexChannel::find(),
            host,
            capabilities: Vec::new(),
            backings: Vec::new(),
            advice: Vec::new(),
        }
    }
}

impl DriverFacts {
    fn of_this_machine(simulated: bool) -> Self {
        Self {
            backend: if simulated { "simulated" } else { "cuda" },
            cuda: None,
            libraries: if simulated {
                Libraries::default()
            } else {
                Libraries::of_this_process()
            },
            problem: None,
        }
    }
}

/// Tries every host node with every GPU: one batch for each node and path.
fn try_all(topology: &Topology, prober: &mut dyn Prober) -> Vec<Tried> {
    let mut all = Vec::new();
    for node in topology.nodes() {
        for path in Path::ALL {
            let batch: Vec<Trial> = topology
                .gpus()
                .iter()
                .flat_map(|gpu| {
                    HANDLE_TYPES.map(|handle_types| Trial {
                        location: Location::from(node),
                        gpu: gpu.ordinal,
                        path,
                        handle_types,
                    })
                })
                .collect();
            if batch.is_empty() {
                continue;
            }
            let answers = prober.try_all(&batch);
            all.extend(
                batch
                    .into_iter()
                    .zip(answers)
                    .map(|(trial, answer)| Tried { trial, answer }),
            );
        }
    }
    all
}

#[cfg(feature = "simulator")]
impl Report {
    /// Collects everything about a machine that is simulated. `prober` opens its driver first, as in
    /// [`gather`](Self::gather).
    pub fn gather_simulated(prober: &mut dyn Prober, machine: &crate::Machine) -> Self {
        let mut report = Self::without_advice(prober, || Driver::simulated(machine.clone()));
        report.simulated = Some(machine.name.clone());
        // As far as they are known without a driver.
        report.imex = ImexChannel::Simulated {
            present: machine.imex_channel,
        };
        report.driver = DriverFacts {
            cuda: report.driver.cuda,
            problem: report.driver.problem,
            ..DriverFacts::of_this_machine(true)
        };
        report.advice = advice::advise(&report);
        report
    }
}
