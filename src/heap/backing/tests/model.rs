//! Compares random growth, use and trimming, with faults in between, with a naive model.

use egmem_core::Backing as Kind;
use proptest::prelude::*;

use super::ops::{CALLS, Fault, Op, op};
use super::*;

pub(super) const UNIT: u64 = 2 * MIB;
pub(super) const LIMIT: usize = 48;
const NODES: [u64; 2] = [44, 36];
/// One share is smaller than its node's memory, the other larger.
const SHARES: [u64; 2] = [24, 72];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    None,
    Free,
    Used,
}

struct Model {
    driver: Driver,
    backing: Backing,
    map: Vec<State>,
    held: Vec<Arc<PhysicalMemory>>,
}

impl Model {
    fn new(kind: Kind, is_shareable: bool, shares: bool) -> Self {
        let driver = small(&NODES);
        let plan = Plan {
            nodes: [0, 1].map(Location::HostNuma).to_vec(),
            backing: kind,
            handle_types: if is_shareable {
                HandleTypes::POSIX_FD
            } else {
                HandleTypes::NONE
            },
            shares: if shares {
                SHARES.map(|mib| mib * MIB).to_vec()
            } else {
                Vec::new()
            },
            ..plan(LIMIT as u64 * 2, 8)
        };
        let backing = Backing::new(&driver, &plan).unwrap();
        Self {
            driver,
            backing,
            map: vec![State::None; LIMIT],
            held: Vec::new(),
        }
    }

    fn is_registered(&self) -> bool {
        self.backing.chosen().backing == Kind::Registered
    }

    fn units(range: &Range<u64>) -> Range<usize> {
        assert!(range.start.is_multiple_of(UNIT) && range.end.is_multiple_of(UNIT));
        (range.start / UNIT) as usize..(range.end / UNIT) as usize
    }

    fn bytes_on(&self, node: i32) -> u64 {
        let chunks = self.backing.chunks();
        let there = chunks.filter(|chunk| chunk.location() == Location::HostNuma(node));
        there.map(Chunk::bytes).sum()
    }

    fn share(&self, node: i32) -> u64 {
        self.backing.settled.sites[node as usize].share
    }

    /// Returns the sum of the nodes' free bytes within their shares, and the largest of them.
    fn free(&self) -> (u64, u64) {
        let sim = self.driver.sim().unwrap();
        let free = [0, 1].map(|node| {
            let left = self.share(node) - self.bytes_on(node);
            sim.free_bytes(Location::HostNuma(node)).min(left)
        });
        (free[0] + free[1], free[0].max(free[1]))
    }

    /// Returns the starts where a block fits on unused units, and how many units each needs created.
    fn places(&self, units: usize, align: usize) -> Vec<(usize, usize)> {
        let base = (self.backing.start().0 / UNIT) as usize;
        let fits = |&at: &usize| {
            let gap = |unit: &usize| self.map[*unit] == State::None;
            let block = at..at + units;
            // Within one gap: growth does not look for blocks over several.
            let gaps = block
                .clone()
                .filter(|u| gap(u) && (*u == at || !gap(&(u - 1))))
                .count();
            (base + at).is_multiple_of(align)
                && block.clone().all(|unit| self.map[unit] != State::Used)
                && gaps == 1
                && (self.backing.joins() || block.clone().all(|unit| gap(&unit)))
        };
        (0..(LIMIT + 1).saturating_sub(units))
            .filter(fits)
            .map(|at| {
                (
                    at,
                    (at..at + units)
                        .filter(|&unit| self.map[unit] == State::None)
                        .count(),
                )
            })
            .collect()
    }

    fn grow(&mut self, op: &Op, faulty: bool) -> Result<(), TestCaseError> {
        let map = self.map.clone();
        let run = |units: &mut dyn Iterator<Item = usize>| {
            units.take_while(|&unit| map[unit] == State::Free).count() as u64 * UNIT
        };
        let beside = |gap: &Range<u64>| {
            let units = Self::units(gap);
            let before = run(&mut (0..units.start).rev());
            gap.start - before..gap.end + run(&mut (units.end..LIMIT))
        };
        let (want, units, align) = match *op {
            Op::Block { units, odd, shift } => {
                let want = Want::Block {
                    bytes: (units - 1) * UNIT + odd.max(1),
                    alignment: UNIT << shift,
                    with_free: &beside,
                };
                (want, units as usize, 1 << shift)
            }
            Op::More { units } => (
                Want::More {
                    bytes: units * UNIT,
                },
                units as usize,
                1,
            ),
            _ => return Ok(()),
        };
        let is_block = matches!(op, Op::Block { .. });
        let places = self.places(units, align);
        let has_room = is_block && self.backing.joins() && self.has_room(units, align);
        let (free, most) = self.free();
        let result = self.backing.grow(want);
        match result {
            Ok(grown) => {
                for grown in &grown {
                    for unit in Self::units(grown) {
                        prop_assert_eq!(self.map[unit], State::None);
                        self.map[unit] = State::Free;
                    }
                }
                let sum: u64 = grown.iter().map(|g| g.end - g.start).sum();
                if is_block {
                    prop_assert!(faulty || grown.is_empty() == has_room);
                    let at = self.room(units, align);
                    prop_assert!(at.is_some(), "no room after growth by {:?}", grown);
                    // At a place that needs the least memory, and to the end of its last chunk.
                    let least = places.iter().map(|place| place.1).min();
                    if !has_room && !faulty && self.backing.joins() {
                        prop_assert!(sum < (least.unwrap_or(0) as u64 + 4) * UNIT);
                    }
                    if let Some(at) = at {
                        self.map[at..at + units].fill(State::Used);
                    }
                } else {
                    // At the lowest place, as far as that goes.
                    let gap = map.iter().skip_while(|&&state| state != State::None);
                    let gap = gap.take_while(|&&state| state == State::None).count();
                    prop_assert!(
                        sum >= units.min(gap) as u64 * UNIT || !self.backing.dead.is_empty()
                    );
                }
            }
            Err(error) if faulty && error.driver_error().is_some() => {}
            Err(Error::HeapFull { .. }) => {
                let none = map.iter().filter(|&&state| state == State::None).count();
                // Addresses of a chunk that could not be unmapped are not available.
                if self.backing.dead.is_empty() {
                    let full = if is_block {
                        places.is_empty()
                    } else {
                        none == 0
                    };
                    prop_assert!(full);
                }
            }
            Err(error) => {
                prop_assert!(make::is_shortage(&error), "{}", error);
                let need = if is_block {
                    places.iter().map(|place| place.1).min().unwrap_or(0)
                } else {
                    units
                };
                let have = if is_block && !self.backing.joins() {
                    most
                } else {
                    free
                };
                prop_assert!(
                    faulty || need as u64 * UNIT > have,
                    "{}, but {} of {}",
                    error,
                    need,
                    have
                );
            }
        }
        Ok(())
    }

    fn room(&self, units: usize, align: usize) -> Option<usize> {
        let base = (self.backing.start().0 / UNIT) as usize;
        (0..(LIMIT + 1).saturating_sub(units)).find(|&at| {
            let offset = at as u64 * UNIT;
            let one_chunk = |chunk: &Chunk| chunk.range().end >= offset + units as u64 * UNIT;
            (base + at).is_multiple_of(align)
                && self.map[at..at + units]
                    .iter()
                    .all(|&state| state == State::Free)
                && (self.backing.joins() || self.backing.chunk_at(offset).is_some_and(one_chunk))
        })
    }

    /// Returns whether a block fits into free bytes beside a gap: growth is told about those alone.
    fn has_room(&self, units: usize, align: usize) -> bool {
        let base = (self.backing.start().0 / UNIT) as usize;
        let mut gaps = false;
        let mut found = false;
        let mut run = 0..0;
        for unit in 0..=LIMIT {
            let state = self.map.get(unit).copied();
            if state == Some(State::Free) {
                run.end = unit + 1;
                continue;
            }
            let beside = state == Some(State::None) || gaps;
            let fits = |at: usize| (base + at).is_multiple_of(align) && at + units <= run.end;
            found |= beside && run.clone().any(fits);
            gaps = state == Some(State::None);
            run = unit + 1..unit + 1;
        }
        found
    }

    fn trim(&mut self, from: usize, len: usize, faulty: bool) -> Result<(), TestCaseError> {
        // The first run of free units there.
        let end = (from + len).min(LIMIT);
        let Some(start) = (from..end).find(|&unit| self.map[unit] == State::Free) else {
            return Ok(());
        };
        let end = (start..end)
            .find(|&unit| self.map[unit] != State::Free)
            .unwrap_or(end);
        let range = start as u64 * UNIT..end as u64 * UNIT;
        let whole =
            |chunk: &&Chunk| chunk.range().start >= range.start && chunk.range().end <= range.end;
        let expected: Vec<_> = self
            .backing
            .chunks()
            .filter(whole)
            .filter(|chunk| {
                !self
                    .held
                    .iter()
                    .any(|held| Arc::ptr_eq(held, chunk.memory()))
            })
            .map(Chunk::range)
            .collect();
        let given = give_back(&mut self.backing, range.clone());
        prop_assert!(faulty || given.error.is_none());
        prop_assert!(faulty || given.gone == expected);
        prop_assert!(given.gone.iter().all(|gone| expected.contains(gone)));
        for gone in &given.gone {
            self.map[Self::units(gone)].fill(State::None);
        }
        Ok(())
    }

    fn step(&mut self, op: &Op, fault: Option<Fault>) -> Result<(), TestCaseError> {
        let sim = self.driver.sim().unwrap();
        if let Some((call, nth, twice, short)) = fault {
            let code = if short {
                Code::OUT_OF_MEMORY
            } else {
                Code(77_777)
            };
            let calls = &CALLS[usize::from(self.is_registered())];
            for _ in 0..=u8::from(twice) {
                sim.fail(calls[call], nth, code);
            }
        }
        let faulty = fault.is_some();
        match *op {
            Op::Block { .. } | Op::More { .. } => self.grow(op, faulty)?,
            Op::Free { from, len } => {
                let end = (from + len).min(LIMIT);
                for state in &mut self.map[from..end] {
                    if *state == State::Used {
                        *state = State::Free;
                    }
                }
            }
            Op::Trim { from, len } => self.trim(from, len, faulty)?,
            Op::Hold { unit } => {
                let chunk = self.backing.chunk_at(unit as u64 * UNIT);
                self.held
                    .extend(chunk.map(|chunk| Arc::clone(chunk.memory())));
            }
            Op::LetGo => self.held.clear(),
        }
        self.driver.sim().unwrap().cancel_all();
        self.check()
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let mut backed = vec![false; LIMIT];
        let mut bytes = 0;
        for chunk in self.backing.chunks() {
            for unit in Self::units(&chunk.range()) {
                prop_assert!(!backed[unit]);
                backed[unit] = true;
            }
            bytes += chunk.bytes();
            for location in [Location::Host, Location::Device(0), Location::Device(1)] {
                prop_assert_eq!(chunk.mapping().access(location), Ok(Access::ReadWrite));
            }
            let address = self.backing.start().0 + chunk.range().start;
            prop_assert_eq!(
                chunk.mapping().cpu().unwrap().as_ptr().addr() as u64,
                address
            );
        }
        let model: Vec<bool> = self.map.iter().map(|&state| state != State::None).collect();
        prop_assert_eq!(&backed, &model);
        prop_assert_eq!(self.backing.backed(), bytes);
        let held = self.driver.sim().unwrap().held();
        let dead: u64 = self.backing.dead.iter().map(Chunk::bytes).sum();
        let unreleased = self
            .backing
            .unreleased
            .iter()
            .map(|memory| memory.size().padded());
        let total = NODES.iter().sum::<u64>() * MIB;
        let sim = self.driver.sim().unwrap();
        let free: u64 = [0, 1]
            .map(|node| sim.free_bytes(Location::HostNuma(node)))
            .iter()
            .sum();
        prop_assert_eq!(total - free, bytes + dead + unreleased.sum::<u64>());
        for node in [0, 1] {
            prop_assert!(self.bytes_on(node) <= self.share(node));
            prop_assert_eq!(
                self.backing.settled.sites[node as usize].taken,
                self.bytes_on(node)
            );
        }
        let mapped = if self.is_registered() {
            held.registrations
        } else {
            held.mappings
        };
        prop_assert_eq!(mapped, self.backing.chunks.len() + self.backing.dead.len());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn growth_and_trimming_keep_to_the_model(
        registered in any::<bool>(),
        is_shareable in prop::bool::weighted(0.3),
        shares in any::<bool>(),
        steps in prop::collection::vec(
            (op(), prop::option::weighted(0.15, (0..CALLS[0].len(), 1_u64..6, any::<bool>(), any::<bool>()))),
            1..60,
        ),
    ) {
        let kind = if registered { Kind::Registered } else { Kind::Driver };
        let mut model = Model::new(kind, is_shareable, shares);
        for (op, fault) in &steps {
            model.step(op, *fault)?;
        }
        let Model { driver, backing, held, .. } = model;
        drop(backing);
        drop(held);
        let held = driver.sim().unwrap().held();
        prop_assert!(held.is_empty(), "still held: {}", held);
    }
}
