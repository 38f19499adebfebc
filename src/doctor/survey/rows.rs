//! The parts of a survey, in the form of their JSON.

use serde::{Deserialize, Serialize};

use crate::measure::{Kind, Rate};
use crate::{Error, Reason};

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
    pub(crate) fn new(node: Option<i32>, gpu: Option<i32>, what: &str, error: &Error) -> Self {
        Self {
            node,
            gpu,
            what: what.to_owned(),
            reason: error.into(),
        }
    }

    /// A problem of a whole part.
    pub(super) fn of_part(reason: Reason) -> Self {
        Self {
            node: None,
            gpu: None,
            what: String::new(),
            reason,
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
