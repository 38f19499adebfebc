//! Takes a snapshot of the ranges of a heap and their contents.

use std::ops::Range;

use super::inner::HeapInner;
use super::occupancy::{in_order, without};
use super::piece::Piece;
use super::{Chunk, Occupancy, backing};
use crate::driver::{Location, NodeId};
use crate::per_driver::lock;

impl HeapInner {
    /// Holds all locks at once, in their order, so that every block is in exactly one place. `deferred` comes
    /// first: no other code takes a lock while it holds `deferred`.
    pub(super) fn occupancy(&self) -> Occupancy {
        let deferred = self.deferral.deferred();
        let backing = self.supply.backing();
        let members = lock(&self.front.members);
        let mut held = members.hold_all();
        let quarantine = self.watch.as_ref().map(|watch| watch.quarantine());
        let deferred: Vec<Range<u64>> = deferred
            .iter()
            .flat_map(|deferred| deferred.payloads())
            .map(|piece| match &self.watch {
                Some(watch) => watch.outer(piece).range_taken(),
                None => piece.range_taken(),
            })
            .collect();
        // Blocks on their way to a shard, or from one to the core, arrive.
        held.iter_mut().for_each(|local| self.sort_leaving(local));
        held.iter_mut().for_each(|local| self.open_post(local));
        let mut core = self.core();
        self.open_posts(&mut core);
        // A thread that finds the depots empty allocates from the core.
        self.empty_depots(&mut core);
        let mut cached: Vec<Range<u64>> = Vec::new();
        for local in &mut held {
            self.take_leaving(&mut core, &mut local.medium);
            local.each(|offset, bytes| cached.push(offset..offset + bytes));
        }
        cached.extend(quarantine.iter().flatten().map(Piece::range_taken));
        let out: Vec<Range<u64>> = core.used_ranges().collect();
        let free: Vec<Range<u64>> = core.free_in_slabs().collect();
        drop(core);
        let (cached, deferred) = (in_order(&cached), in_order(&deferred));
        let free = in_order(&free);
        let used = [&free, &cached, &deferred]
            .into_iter()
            .fold(in_order(&out), |left, taken| without(&left, taken));
        Occupancy {
            limit: self.facts.limit,
            chunks: backing
                .iter()
                .flat_map(|backing| backing.chunks().map(drawn))
                .collect(),
            used,
            cached,
            deferred,
        }
    }
}

fn drawn(chunk: &backing::Chunk) -> Chunk {
    let node = match chunk.location() {
        Location::HostNuma(node) => NodeId(node),
        // Not a host node: a GPU's memory, or host memory at no particular node.
        _ => NodeId(-1),
    };
    Chunk {
        range: chunk.range(),
        node,
    }
}
