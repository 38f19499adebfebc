//! What memory on each host node is, if the decision is left to `Backing::Auto`.

use serde::Serialize;

use super::prober::{Prober, Tried};
use crate::backing::Chosen;
use crate::capability::Path;
use crate::driver::{HandleTypes, Location, NodeId};
use crate::topology::Topology;

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
