//! Access chunk by chunk is a table of chunks and locations, through all changes and additions.

use egmem::driver::{Access, AccessDesc, Location, NodeId};
use egmem::memory::{AccessChecks, CpuMemory, CpuView, Engine};
use egmem::shapes::{Growable, Stripes};
use egmem::{Error, Result};
use proptest::prelude::*;

use crate::shapes::{MIB, grace, nothing_held};

const CHUNK: u64 = 2 * MIB;
const MOST: usize = 6;
const WHO: [Location; 3] = [Location::Host, Location::Device(0), Location::Device(3)];

/// The access of each of `WHO` to each chunk, and to those that are added.
struct Table {
    chunks: Vec<[Access; WHO.len()]>,
    added: [Access; WHO.len()],
}

#[derive(Clone, Debug)]
enum Step {
    /// Chunks from one on, so many, for a location.
    Set(usize, usize, usize, Access),
    /// All of a growable's, and those that come.
    SetAll(usize, Access),
    Grow,
    Shrink,
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![
        Just(Access::None),
        Just(Access::Read),
        Just(Access::ReadWrite)
    ]
}

fn set() -> impl Strategy<Value = Step> {
    (0..MOST, 1..MOST, 0..WHO.len(), access())
        .prop_map(|(first, count, who, access)| Step::Set(first, count, who, access))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => set(),
        1 => (0..WHO.len(), access()).prop_map(|(who, access)| Step::SetAll(who, access)),
        2 => Just(Step::Grow),
        1 => Just(Step::Shrink),
    ]
}

impl Table {
    fn of(chunks: usize) -> Self {
        let added = [Access::ReadWrite; WHO.len()];
        Self {
            chunks: vec![added; chunks],
            added,
        }
    }

    /// Returns the access that a location has to all of a range.
    fn least(&self, who: usize, offset: u64, len: u64) -> Access {
        let chunks = offset / CHUNK..(offset + len).div_ceil(CHUNK);
        let each = chunks.map(|chunk| self.chunks[chunk as usize][who]);
        each.min().unwrap_or(Access::ReadWrite)
    }

    /// Compares with memory that has all chunks: each of them, their borders, and the whole.
    fn check<M: AccessChecks>(
        &self,
        memory: &M,
        cpu: impl Fn(u64, u64) -> Result<bool>,
    ) -> std::result::Result<(), TestCaseError> {
        let all = self.chunks.len() as u64 * CHUNK;
        let each = (0..all).step_by(CHUNK as usize);
        let mut ranges: Vec<(u64, u64)> = each.clone().map(|start| (start, CHUNK)).collect();
        ranges.extend(each.skip(1).map(|start| (start - 8, 16)));
        ranges.extend((all > 0).then_some((0, all)));
        for (offset, len) in ranges {
            for (at, who) in WHO.into_iter().enumerate() {
                let expected = self.least(at, offset, len);
                let found = match who {
                    Location::Device(gpu) => {
                        memory.gpu_access(gpu, Engine::Kernel, offset, len).unwrap()
                    }
                    _ => match cpu(offset, len) {
                        Ok(true) => Access::ReadWrite,
                        Ok(false) => Access::Read,
                        Err(Error::NotAccessible { .. }) => Access::None,
                        Err(error) => panic!("{error}"),
                    },
                };
                prop_assert_eq!(found, expected, "{:?}: {} bytes at {}", who, len, offset);
            }
        }
        Ok(())
    }
}

fn is_writable(view: CpuView<'_>) -> bool {
    view.is_writable()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn access_to_stripes_is_a_table(chunks in 1..=MOST, steps in prop::collection::vec(set(), 1..20)) {
        let driver = grace();
        let bytes = chunks as u64 * CHUNK;
        let options = Stripes::over([NodeId(0), NodeId(2)]).stripe(2 * CHUNK).options(bytes).unwrap();
        let mut striped = options.chunk(CHUNK).allocate(&driver).unwrap();
        let mut table = Table::of(chunks);
        for step in steps {
            if let Step::Set(first, count, who, access) = step {
                let first = first % chunks;
                let count = count.min(chunks - first);
                let (offset, len) = (first as u64 * CHUNK, count as u64 * CHUNK);
                striped.set_access_at(offset, len, &[AccessDesc::new(WHO[who], access)]).unwrap();
                table.chunks[first..first + count].iter_mut().for_each(|chunk| chunk[who] = access);
            }
            table.check(&striped, |offset, len| striped.cpu_at(offset, len).map(is_writable))?;
            for (chunk, mapping) in table.chunks.iter().zip(striped.mappings()) {
                prop_assert_eq!(WHO.map(|who| mapping.access(who).unwrap()), *chunk);
            }
        }
        drop(striped);
        nothing_held(&driver);
    }

    #[test]
    fn access_to_a_growing_vector_is_a_table(steps in prop::collection::vec(step(), 1..30)) {
        let driver = grace();
        let per_chunk = (CHUNK / 8) as usize;
        let options = Growable::<u64>::on(NodeId(1)).max_len(MOST * per_chunk);
        let mut vector = options.step(CHUNK).create(&driver).unwrap();
        let mut table = Table::of(0);
        for step in steps {
            let chunks = table.chunks.len();
            match step {
                Step::Set(first, count, who, access) if chunks > 0 => {
                    let first = first % chunks;
                    let end = (first + count).min(chunks);
                    // Any element of a chunk stands for all of it.
                    let inside = count - 1;
                    let elements = first * per_chunk + inside..end * per_chunk - inside;
                    let access = [AccessDesc::new(WHO[who], access)];
                    let changed = vector.set_access_of(elements, &access);
                    prop_assert_eq!(changed, Ok(first * per_chunk..end * per_chunk));
                    table.chunks[first..end].iter_mut().for_each(|chunk| chunk[who] = access[0].access);
                }
                Step::SetAll(who, access) => {
                    vector.set_access(&[AccessDesc::new(WHO[who], access)]).unwrap();
                    let all = table.chunks.iter_mut().chain([&mut table.added]);
                    all.for_each(|chunk| chunk[who] = access);
                }
                Step::Grow if chunks < MOST => {
                    vector.extend_unwritten(per_chunk).unwrap();
                    table.chunks.push(table.added);
                }
                Step::Shrink if chunks > 0 => {
                    vector.truncate((chunks - 1) * per_chunk);
                    prop_assert_eq!(vector.shrink_to_fit(), Ok(CHUNK));
                    table.chunks.pop();
                }
                _ => {}
            }
            prop_assert_eq!(vector.chunks(), table.chunks.len());
            let cpu = |offset: u64, len: u64| {
                // Elements are read and written one by one.
                let ends = [offset, offset + len - 8].map(|byte| (byte / 8) as usize);
                let inner = (offset..offset + len).step_by(CHUNK as usize).map(|byte| (byte / 8) as usize);
                let writable = ends.into_iter().chain(inner).map(|index| {
                    vector.get(index)?;
                    Ok(!vector.is_read_only_for_cpu(index as u64 * 8, 8))
                });
                writable.collect::<Result<Vec<bool>>>().map(|all| all.into_iter().all(|one| one))
            };
            table.check(&vector, cpu)?;
            let whole = CpuMemory::cpu(&vector).map(is_writable);
            let expected = table.least(0, 0, table.chunks.len() as u64 * CHUNK);
            prop_assert_eq!(whole.is_ok(), expected != Access::None);
            prop_assert_eq!(whole.unwrap_or(false), expected == Access::ReadWrite);
        }
        drop(vector);
        nothing_held(&driver);
    }
}
