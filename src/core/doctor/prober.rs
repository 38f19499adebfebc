//! Runs trials and returns their answers.

use serde::{Deserialize, Serialize};

use super::{Libraries, Reason};
use crate::backing::choose::choose;
use crate::backing::{Backing, Chosen};
use crate::capability::{Capabilities, Path, Support, Trial};
use crate::driver::{HandleTypes, Location, NodeId};
use crate::topology::Topology;

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
    /// As text, those of [`Driver::open`](crate::Driver::open), and
    /// [`Error::ProbeDied`](crate::Error::ProbeDied).
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
        trials
            .iter()
            .map(|&trial| self.0.trial(trial).into())
            .collect()
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

/// Decides for memory on each host node: private, shared by POSIX fds and, where they work, by fabric handles too.
pub(super) fn choose_all(
    topology: &Topology,
    tried: &[Tried],
    prober: &mut dyn Prober,
) -> Vec<AutoBacking> {
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
