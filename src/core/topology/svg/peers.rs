//! Links between GPUs, as bars below them.

use std::fmt::Write;

use super::drawing;
use crate::svg::Drawing;
use crate::topology::PeerLinkKind;
use crate::topology::peer_groups::PeerGroup;

/// The height of a bar with its text.
const LEVEL: f64 = 34.0;

/// Draws for each group a bar below `y` with a line up to each of its GPUs in this row, whose ordinals and middles
/// `gpus` has. Returns the height drawn.
pub(super) fn draw(out: &mut Drawing, groups: &[PeerGroup], gpus: &[(i32, f64)], y: f64) -> f64 {
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
            let _ = writeln!(out, r#"<circle cx="{x:.1}" cy="{level:.1}" r="4"/>"#);
        }
        let words = label(group, here.len());
        out.text((left + 6.0, level - 6.0), "small soft", &words);
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

fn line(out: &mut Drawing, kind: PeerLinkKind, from: (f64, f64), to: (f64, f64)) {
    let class = match kind {
        PeerLinkKind::Nvlink => r#""nvlink" stroke-linecap="round" stroke-width="5""#,
        PeerLinkKind::Pcie => r#""pcie" stroke-linecap="round" stroke-width="3""#,
        PeerLinkKind::Unknown => {
            r#""pcie" stroke-linecap="round" stroke-width="2" stroke-dasharray="3 5""#
        }
    };
    drawing::line(out, from, to, class);
}
