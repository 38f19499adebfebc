//! A range in stripes is a row of bytes, each of which lies where its turn says.

use egmem::driver::{Access, AccessDesc, Location};
use egmem::shapes::{Stripes, stripes};
use egmem::{Buffer, Driver, Stream};
use proptest::prelude::*;

use crate::shapes::{MIB, grace, node, nothing_held};

const GRANULE: u64 = 2 * MIB;
const PLACES: [Location; 4] = [
    Location::HostNuma(0),
    Location::HostNuma(1),
    Location::Device(0),
    Location::Device(3),
];

/// An operation on bytes: from an offset on, so many, at most to the end.
#[derive(Clone, Debug)]
enum Step {
    Cpu(u8),
    Gpu(i32, u8),
    /// A copy by a GPU to other memory.
    Save(i32),
    /// A copy by a GPU from there.
    Load(i32),
}

fn step() -> impl Strategy<Value = (u64, u64, Step)> {
    let what = prop_oneof![
        any::<u8>().prop_map(Step::Cpu),
        (0..4, any::<u8>()).prop_map(|(gpu, byte)| Step::Gpu(gpu, byte)),
        (0..4).prop_map(Step::Save),
        (0..4).prop_map(Step::Load),
    ];
    (0..10 * MIB, 1..5 * MIB, what)
}

/// How a range is cut.
#[derive(Clone, Debug)]
struct Cut {
    turns: Vec<usize>,
    stripe: u64,
    front: Option<(usize, u64)>,
    bytes: u64,
}

fn cut() -> impl Strategy<Value = Cut> {
    let turns = prop::collection::vec(0..PLACES.len(), 1..5);
    let front = prop::option::of((0..PLACES.len(), 1..4_u64));
    (turns, 1..3_u64, front, 1..10 * MIB).prop_map(|(turns, stripe, front, bytes)| Cut {
        turns,
        stripe: stripe * GRANULE,
        front: front.map(|(place, granules)| (place, granules * GRANULE)),
        bytes,
    })
}

impl Cut {
    fn plan(&self) -> Stripes {
        let plan = Stripes::over(self.turns.iter().map(|&place| PLACES[place]));
        let plan = plan.stripe(self.stripe);
        match self.front {
            Some((place, bytes)) => plan.front(PLACES[place], bytes),
            None => plan,
        }
    }

    /// Returns where a byte is to lie.
    fn place_of(&self, byte: u64) -> Location {
        let front = self.front.map_or(0, |(_, bytes)| bytes);
        PLACES[match (self.front, byte.checked_sub(front)) {
            (Some((place, _)), None) => place,
            (_, rest) => {
                let turn = rest.unwrap_or(byte) / self.stripe;
                self.turns[turn as usize % self.turns.len()]
            }
        }]
    }
}

fn free(driver: &Driver) -> [u64; PLACES.len()] {
    PLACES.map(|place| driver.sim().unwrap().free_bytes(place))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn it_is_a_row_of_bytes(cut in cut(), steps in prop::collection::vec(step(), 1..12)) {
        let driver = grace();
        let before = free(&driver);
        let mut striped = cut.plan().allocate(&driver, cut.bytes).unwrap();
        // Each location has given the granules whose turn it was.
        let mut expected = before;
        for granule in 0..cut.bytes.div_ceil(GRANULE) {
            let place = cut.place_of(granule * GRANULE);
            expected[PLACES.iter().position(|&one| one == place).unwrap()] -= GRANULE;
        }
        prop_assert_eq!(free(&driver), expected);
        for stripe in stripes(&striped) {
            for byte in [stripe.bytes.start, stripe.bytes.end - 1] {
                prop_assert_eq!(stripe.location, cut.place_of(byte));
            }
            // On Grace the CPU reaches a GPU's memory, where it is granted.
            let (start, len) = (stripe.bytes.start, stripe.bytes.end - stripe.bytes.start);
            let host = [AccessDesc::new(Location::Host, Access::ReadWrite)];
            striped.set_access_at(start, len, &host).unwrap();
        }

        let other = Buffer::on(node(&driver)).bytes(cut.bytes).allocate(&driver).unwrap();
        let streams = [0, 1, 2, 3].map(|gpu| Stream::new(&driver, gpu).unwrap());
        let mut model = vec![0_u8; cut.bytes as usize];
        let mut saved = model.clone();
        for (offset, len, what) in steps {
            let offset = offset % cut.bytes;
            let len = len.min(cut.bytes - offset);
            let bytes = offset as usize..(offset + len) as usize;
            match what {
                Step::Cpu(byte) => {
                    striped.write_at(offset, &vec![byte; len as usize]).unwrap();
                    model[bytes].fill(byte);
                }
                Step::Gpu(gpu, byte) => {
                    streams[gpu as usize].fill(&striped, offset, len, byte).unwrap();
                    model[bytes].fill(byte);
                }
                Step::Save(gpu) => {
                    let stream = &streams[gpu as usize];
                    stream.copy(&other, offset, &striped, offset, len).unwrap();
                    saved[bytes.clone()].copy_from_slice(&model[bytes]);
                }
                Step::Load(gpu) => {
                    let stream = &streams[gpu as usize];
                    stream.copy(&striped, offset, &other, offset, len).unwrap();
                    model[bytes.clone()].copy_from_slice(&saved[bytes]);
                }
            }
        }
        let mut seen = vec![0_u8; cut.bytes as usize];
        striped.read_at(0, &mut seen).unwrap();
        prop_assert!(seen == model);
        drop((striped, other, streams));
        prop_assert_eq!(free(&driver), before);
        nothing_held(&driver);
    }
}
