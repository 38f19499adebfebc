//! Links between GPUs in groups, for texts and drawings.

use super::{PeerLink, PeerLinkKind, Topology};

/// GPUs that all have the same kind of link to each other.
#[derive(Debug, PartialEq)]
pub(super) struct PeerGroup {
    /// Ordinals, ascending: at least two.
    pub(super) gpus: Vec<i32>,
    pub(super) kind: PeerLinkKind,
    /// The kind and the abilities of the links.
    pub(super) words: String,
}

impl PeerGroup {
    fn new(gpus: Vec<i32>, link: &PeerLink) -> Self {
        Self {
            gpus,
            kind: link.kind,
            words: link.words(),
        }
    }

    /// Returns the ordinals as text.
    pub(super) fn list(&self) -> String {
        let gpus: Vec<String> = self.gpus.iter().map(i32::to_string).collect();
        gpus.join(", ")
    }
}

impl Topology {
    /// Groups the links by which memory can be accessed: GPUs that all have links of one kind to each other are a
    /// group, and so is each other pair. A link that differs by direction counts as the lower GPU's.
    pub(super) fn peer_groups(&self) -> Vec<PeerGroup> {
        let mut pairs: Vec<(i32, &PeerLink)> = Vec::new();
        for gpu in &self.gpus {
            let up = gpu.peer_links.iter();
            let up = up.filter(|link| link.access && link.gpu > gpu.ordinal);
            pairs.extend(up.map(|link| (gpu.ordinal, link)));
        }
        let mut groups = Vec::new();
        while let Some(&(_, first)) = pairs.first() {
            let like = |link: &PeerLink| link.words() == first.words();
            let (alike, others): (Vec<_>, Vec<_>) =
                pairs.into_iter().partition(|(_, link)| like(link));
            let gpus = connected(&alike);
            let (own, rest): (Vec<_>, Vec<_>) =
                alike.into_iter().partition(|(gpu, _)| gpus.contains(gpu));
            if own.len() == gpus.len() * (gpus.len() - 1) / 2 {
                groups.push(PeerGroup::new(gpus, first));
            } else {
                let pair =
                    |(gpu, link): (i32, &PeerLink)| PeerGroup::new(vec![gpu, link.gpu], link);
                groups.extend(own.into_iter().map(pair));
            }
            pairs = rest.into_iter().chain(others).collect();
        }
        groups
    }

    /// Returns whether no GPU of several can access another's memory.
    pub(super) fn has_no_peers(&self) -> bool {
        self.gpus.len() > 1 && self.gpus.iter().all(|gpu| gpu.peers.is_empty())
    }
}

/// Returns the GPUs that the links connect to the first pair's, over any number of links.
fn connected(pairs: &[(i32, &PeerLink)]) -> Vec<i32> {
    let mut found: Vec<i32> = pairs.first().map(|(gpu, _)| *gpu).into_iter().collect();
    let mut next = 0;
    while let Some(&at) = found.get(next) {
        next += 1;
        for (gpu, link) in pairs {
            let other = match at {
                _ if at == *gpu => link.gpu,
                _ if at == link.gpu => *gpu,
                _ => continue,
            };
            if !found.contains(&other) {
                found.push(other);
            }
        }
    }
    found.sort_unstable();
    found
}
