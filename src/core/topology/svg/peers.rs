//! Links between GPUs, as bars below them.

use super::{put, text};
use crate::topology::PeerLinkKind;
use crate::topology::peer_groups::PeerGroup;

/// The height of a bar with its text.
const LEVEL: f64 = 34.0;

/// Draws for each group a bar below `y` with a line up to each of its GPUs in this row, whose ordinals and middles
/// `gpus` has. Returns the height drawn.
pub(super) fn draw(out: &mut String, groups: &[PeerGroup], gpus: &[(i32, f64)], y: f64) -> f64 {
    let mut level = y;
    for group in groups {
        let here: Vec<f64> = gpus
            .iter()
            .filter(|(gpu, _)| group.gpus.contains(gpu))
            .map(|(_, middle)| *middle)
            .collect();
        let Some(left) = here.iter().copied().reduce(f64::min) else {
            continue;
        };
        level += LEVEL;
        let right = here.iter().copied().fold(left, f64::max);
        for x in &here {
            line(out, group.kind, (*x, y), (*x, level));
        }
        line(out, group.kind, (left, level), (right, level));
        for x in &here {
            let dot = format_args!("<circle cx=\"{x:.1}\" cy=\"{level:.1}\" r=\"4\"/>\n");
            put(out, dot);
        }
        text(
            out,
            left + 6.0,
            level - 6.0,
            "small soft",
            &label(group, here.len()),
        );
    }
    level - y
}

/// Names the group's links, and its GPUs where others are in another row.
fn label(group: &PeerGroup, here: usize) -> String {
    match here == group.gpus.len() {
        true => group.words.clone(),
        false => format!("{}: GPUs {}", group.words, group.list()),
    }
}

fn line(out: &mut String, kind: PeerLinkKind, from: (f64, f64), to: (f64, f64)) {
    let (class, rest) = match kind {
        PeerLinkKind::Nvlink => ("nvlink", "stroke-width=\"5\""),
        PeerLinkKind::Pcie => ("pcie", "stroke-width=\"3\""),
        PeerLinkKind::Unknown => ("pcie", "stroke-width=\"2\" stroke-dasharray=\"3 5\""),
    };
    put(
        out,
        format_args!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" class=\"{class}\" \
             stroke-linecap=\"round\" {rest}/>\n",
            from.0, from.1, to.0, to.1
        ),
    );
}
