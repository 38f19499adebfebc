//! egmem's doctor for programs: trials in child processes, and the report as text.
//!
//! A [`Report`] has everything that `egmem doctor` shows: what works on this machine, why the rest does not, and what to do
//! about it. A [`Prober`] makes its trials: [`InProcess`] in this process; [`Children`] runs each batch in a child process,
//! which calls [`answer_trials`], because drivers have crashed inside such calls: then only the child ends. [`to_text`]
//! formats a report as `egmem doctor` shows it. [`Survey`] adds proofs and [measurements](measure).
//!
//! Programs depend on the crate `egmem`, which re-exports these items.
#![deny(missing_docs)]

mod advice;
mod child;
mod children;
pub mod host;
pub mod measure;
mod part;
pub mod survey;
mod text;

pub use advice::{Advice, Reason};
pub use children::{Children, answer_trials};
pub use host::Libraries;
pub use survey::Survey;
pub use text::to_text;

use egmem_core::error::Explained;
use egmem_core::pinned::{DeviceMemory, PinnedHost};
use egmem_core::proof::Prover;
use egmem_core::{
    Backing, Buffer, Driver, Error, Event, Memory, Pool, PoolBuffer, Result, Stream, Topology,
    backing, capability, driver, kernels, size, text as texts,
};
use serde::{Deserialize, Serialize};

use advice::advise;
use backing::{Chosen, choose::choose};
use capability::{Capabilities, HANDLE_TYPES, Hint, ImexChannel, Path, Support, Trial};
use driver::{CudaVersion, HandleTypes, Location, NodeId};
use host::HostFacts;

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

/// What `Backing::Auto` takes for memory on a host node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct AutoBacking {
    /// The node.
    pub node: NodeId,
    /// How the memory can be shared.
    pub handle_types: HandleTypes,
    /// The decision; `None` if there is none.
    pub chosen: Option<Chosen>,
    /// The reason, as text.
    pub reason: String,
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
        Self::of(prober, Driver::open, None)
    }

    /// Collects everything about a machine that is simulated. `prober` opens its driver first, as in
    /// [`gather`](Self::gather).
    #[cfg(feature = "simulator")]
    pub fn gather_simulated(prober: &mut dyn Prober, machine: &egmem_core::Machine) -> Self {
        let open = || Driver::simulated(machine.clone());
        Self::of(prober, open, Some((&machine.name, machine.imex_channel)))
    }

    /// Collects everything about a machine with the driver that `open` opens: this one, or a simulated one with a name, and
    /// with or without an IMEX channel.
    fn of(
        prober: &mut dyn Prober,
        open: impl FnOnce() -> Result<Driver>,
        simulated: Option<(&str, bool)>,
    ) -> Self {
        let opened = prober.open().and_then(|()| {
            let driver = open()?;
            Ok((Topology::discover(&driver)?, driver))
        });
        let (topology, driver, problem) = match opened {
            Ok((topology, driver)) => (topology, Some(driver), None),
            Err(problem) => (Topology::of_host(), None, Some(problem)),
        };
        // Before the trials, which take memory.
        let host = HostFacts::read();
        let capabilities = try_all(&topology, prober);
        let gpus = || topology.gpus().iter().map(|gpu| gpu.ordinal);
        let works = |tried: &Tried, gpu| tried.trial.gpu == gpu && tried.answer.is_yes();
        let working = gpus().filter(|&gpu| capabilities.iter().any(|tried| works(tried, gpu)));
        let working_gpus: Vec<i32> = working.collect();
        let hints = |driver: &Driver| {
            let of_gpu = |gpu| GpuHints {
                gpu,
                attributes: capability::hints(driver, gpu),
            };
            gpus().map(of_gpu).collect()
        };
        let mut report = Self {
            simulated: simulated.map(|(name, _)| name.to_owned()),
            works: !working_gpus.is_empty(),
            working_gpus,
            hints: driver.as_ref().map(hints).unwrap_or_default(),
            imex: match simulated {
                Some((_, present)) => ImexChannel::Simulated { present },
                None => ImexChannel::find(),
            },
            host,
            backings: choose_all(&topology, &capabilities, prober),
            driver: DriverFacts {
                backend: simulated.map_or("cuda", |_| "simulated"),
                cuda: driver.and_then(|driver| driver.driver_version().ok()),
                libraries: match (simulated, &problem) {
                    (Some(_), _) => Libraries::default(),
                    (None, Some(_)) => prober.libraries(),
                    (None, None) => Libraries::of_this_process(),
                },
                problem,
            },
            topology,
            capabilities,
            advice: Vec::new(),
        };
        report.advice = advise(&report);
        report
    }
}

/// Tries every host node with every GPU: one batch for each node and path.
fn try_all(topology: &Topology, prober: &mut dyn Prober) -> Vec<Tried> {
    let mut all = Vec::new();
    for node in topology.nodes() {
        for path in Path::ALL {
            let on_gpu = |gpu| {
                HANDLE_TYPES.map(|handle_types| Trial {
                    location: Location::from(node),
                    gpu,
                    path,
                    handle_types,
                })
            };
            let gpus = topology.gpus().iter().map(|gpu| gpu.ordinal);
            let batch: Vec<Trial> = gpus.flat_map(on_gpu).collect();
            if !batch.is_empty() {
                let answers = prober.try_all(&batch);
                let tried = batch.into_iter().zip(answers);
                all.extend(tried.map(|(trial, answer)| Tried { trial, answer }));
            }
        }
    }
    all
}

/// Decides for memory on each host node: private, shared by POSIX fds and, where they work, by fabric handles too.
fn choose_all(topology: &Topology, tried: &[Tried], prober: &mut dyn Prober) -> Vec<AutoBacking> {
    if topology.gpus().is_empty() {
        return Vec::new();
    }
    let mut all = Vec::new();
    for node in topology.nodes() {
        let location = Location::from(node);
        let fabric = HandleTypes::FABRIC | HandleTypes::POSIX_FD;
        let is_fabric = tried.iter().any(|Tried { trial, answer }| {
            (trial.location, trial.path) == (location, Path::Vmm)
                && trial.handle_types == fabric
                && answer.is_yes()
        });
        let types = [HandleTypes::NONE, HandleTypes::POSIX_FD].into_iter();
        let sites: Vec<_> = types
            .chain(is_fabric.then_some(fabric))
            .map(|types| (location, types))
            .collect();
        let answers = prober.choose_all(&sites);
        all.extend(sites.iter().zip(answers).map(|(site, answer)| AutoBacking {
            node: node.id,
            handle_types: site.1,
            reason: match &answer {
                Ok(chosen) => chosen.why.to_string(),
                Err(reason) => reason.to_string(),
            },
            chosen: answer.ok(),
        }));
    }
    all
}

/// The result of a trial, as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// It works.
    Yes,
    /// It does not.
    No {
        /// The reason, and what to do.
        reason: Reason,
    },
    /// The trial was inconclusive.
    Unknown {
        /// The reason, and what to do.
        reason: Reason,
    },
}

impl Answer {
    /// Returns whether it works.
    pub const fn is_yes(&self) -> bool {
        matches!(self, Self::Yes)
    }

    /// Returns the reason why it does not work or why that is unknown.
    pub const fn reason(&self) -> Option<&Reason> {
        match self {
            Self::Yes => None,
            Self::No { reason } | Self::Unknown { reason } => Some(reason),
        }
    }
}

impl From<Support> for Answer {
    fn from(support: Support) -> Self {
        match support {
            Support::Yes => Self::Yes,
            Support::No(error) => Self::No {
                reason: error.into(),
            },
            Support::Unknown(error) => Self::Unknown {
                reason: error.into(),
            },
        }
    }
}

/// Runs trials, in this process or in others, to survive a driver that crashes.
pub trait Prober {
    /// Opens the driver once, as a trial would, to check that the process survives it.
    ///
    /// # Errors
    /// As text, those of [`Driver::open`], and [`Error::ProbeDied`].
    fn open(&mut self) -> Result<(), Reason>;

    /// Returns the libraries of the process that [`open`](Self::open) opened the driver in, as far as they are known.
    fn libraries(&self) -> Libraries {
        Libraries::of_this_process()
    }

    /// Runs all of `trials`, which share one location and path. Returns one answer each, in order.
    fn try_all(&mut self, trials: &[Trial]) -> Vec<Answer>;

    /// Decides for [`Backing::Auto`] at each location with these handle types, for memory that is open to the CPU and all
    /// GPUs. Returns one decision each, in order, or why there is none.
    fn choose_all(&mut self, sites: &[(Location, HandleTypes)]) -> Vec<Result<Chosen, Reason>>;
}

/// Runs trials in this process: a crash ends the process.
#[derive(Clone, Debug)]
pub struct InProcess(pub Capabilities);

impl Prober for InProcess {
    fn open(&mut self) -> Result<(), Reason> {
        Ok(())
    }

    fn try_all(&mut self, trials: &[Trial]) -> Vec<Answer> {
        let answer = |&trial| self.0.trial(trial).into();
        trials.iter().map(answer).collect()
    }

    fn choose_all(&mut self, sites: &[(Location, HandleTypes)]) -> Vec<Result<Chosen, Reason>> {
        let choose = |&site| choose(self.0.driver(), Backing::Auto, site, &[]);
        let chosen = sites.iter().map(choose);
        chosen.map(|chosen| chosen.map_err(Reason::from)).collect()
    }
}

/// One trial with its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    /// The trial.
    #[serde(flatten)]
    pub trial: Trial,
    /// Its result.
    #[serde(flatten)]
    pub answer: Answer,
}
