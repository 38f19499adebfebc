//! Calls of processes.

use fastrand::Rng;

use super::world::{World, key};
use crate::Key;
use crate::header;
use crate::page::Direction;
use crate::words::Words;

/// Keys that random calls use.
const KEYS: u64 = 30;

/// A call.
#[derive(Clone, Debug)]
pub enum Op {
    Reserve(Vec<Key>),
    /// The store with this number, modulo how many there are.
    Commit(usize),
    Abort(usize),
    Pin(Vec<Key>),
    /// A copy of pages of any process's store or pins.
    Copy(usize, usize, Direction),
    Unpin(usize, bool),
    Touch(Vec<Key>),
    Remove(Vec<Key>),
    Sweep,
    Repair,
    /// Another process comes, or this one goes.
    Join,
    Leave,
}

impl Op {
    pub fn random(world: &World, random: &mut Rng) -> Self {
        let any = random.usize(0..4);
        let groups = world.geometry.groups.len() as u8;
        let mut keys = || -> Vec<Key> {
            let count = random.usize(0..6);
            let keys = (0..count).map(|_| {
                let number = random.u64(0..KEYS);
                key(number).in_group(random.u8(0..groups))
            });
            keys.collect()
        };
        let keys = keys();
        match random.u32(0..24) {
            0..6 => Self::Reserve(keys),
            6..10 => Self::Commit(any),
            10 => Self::Abort(any),
            11..13 => Self::Pin(keys.into_iter().take(2).collect()),
            13..15 => Self::Copy(any, random.usize(0..4), Direction::Load),
            15 => Self::Copy(any, random.usize(0..4), Direction::Store),
            16..19 => Self::Unpin(any, random.u32(0..8) == 0),
            19 => Self::Touch(keys),
            20 => Self::Remove(keys),
            21 => Self::Sweep,
            22 if random.bool() => Self::Repair,
            22 => Self::Leave,
            _ => Self::Join,
        }
    }
}

/// Takes an item of a list by a number, modulo its length.
fn take<T>(list: &mut Vec<T>, at: usize) -> Option<T> {
    (!list.is_empty()).then(|| list.swap_remove(at % list.len()))
}

impl World {
    /// A process makes a call.
    pub fn step(&mut self, who: usize, op: &Op) {
        match op {
            Op::Reserve(keys) => {
                if let Ok(reserved) = self.with(who, |table| table.reserve(keys)) {
                    self.write(keys, &reserved);
                    let pages = reserved.placed.iter().map(|&(_, page)| page).collect();
                    self.processes[who].stores.push(pages);
                }
            }
            Op::Commit(at) => {
                if let Some(pages) = take(&mut self.processes[who].stores, *at)
                    && self.with(who, |table| table.commit(&pages)).is_err()
                {
                    self.processes[who].stores.push(pages);
                }
            }
            Op::Abort(at) => {
                if let Some(pages) = take(&mut self.processes[who].stores, *at) {
                    self.with(who, |table| table.abort(&pages));
                }
            }
            Op::Pin(keys) => {
                if let Ok(pages) = self.with(who, |table| table.pin(keys)) {
                    self.processes[who].pins.push(pages);
                }
            }
            Op::Copy(of, at, direction) => {
                let of = &self.processes[of % self.processes.len()];
                let mut lists = match direction {
                    Direction::Load => of.pins.clone(),
                    Direction::Store => of.stores.clone(),
                };
                if let Some(pages) = take(&mut lists, *at)
                    && self
                        .with(who, |table| table.begin_copy(&pages, *direction))
                        .is_ok()
                {
                    self.processes[who].pins.push(pages);
                }
            }
            Op::Unpin(at, fails) => {
                if let Some(pages) = take(&mut self.processes[who].pins, *at) {
                    self.with(who, |table| {
                        if *fails {
                            table.fail(&pages);
                        }
                        table.unpin(&pages);
                    });
                }
            }
            Op::Touch(keys) => self.with(who, |table| table.touch(keys)),
            Op::Remove(keys) => drop(self.with(who, |table| table.remove(keys))),
            Op::Sweep => self.sweep(who),
            Op::Join | Op::Leave if self.is_hostile => self.with(who, |table| {
                let keys = table.keys().unwrap();
                assert!(keys.iter().all(|&(_, page)| table.geometry.has(page)));
                table.stats();
            }),
            Op::Repair if self.is_hostile => self.with(who, |table| {
                let alive = table.words.get(header::CLOCK) | table.own.bit();
                table.repair(alive).unwrap();
            }),
            Op::Repair => self.with(who, |table| table.take_over().unwrap()),
            Op::Join if self.processes.len() < 5 => self.join(self.geometry.pages),
            Op::Join => {}
            Op::Leave if self.processes.len() > 1 => {
                // The ends of its stores and loads come before that of its tier.
                let (stores, pins) = (&self.processes[who].stores, &self.processes[who].pins);
                let (stores, pins) = (stores.concat(), pins.clone());
                self.with(who, |table| {
                    table.abort(&stores);
                    pins.iter().for_each(|pages| table.unpin(pages));
                });
                let own = self.processes[who].own;
                Words::over(&self.memory).release_member(own);
                self.processes.remove(who);
            }
            Op::Leave => {}
        }
    }
}
