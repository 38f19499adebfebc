//! What a rank decodes from another's contributions: a statement, handles, and whether it could map. The first byte says
//! whether they are sealed. The others are two contributions, each with its length in two bytes before it.
#![no_main]

use std::sync::LazyLock;

use egmem::driver::HandleType;
use egmem::exchange::Error;
use egmem::exchange::group::{AllGather, GatherOptions, GroupSecret, Sealed};
use egmem::{Driver, Machine};

static DRIVER: LazyLock<Driver> =
    LazyLock::new(|| Driver::simulated(Machine::gh200x4()).expect("a machine"));

/// Rank 0 of two, and what rank 1 contributes to each gather.
struct Two<'a> {
    /// Whether rank 1 sends rank 0's own bytes first: a number that it draws, or a contribution.
    echoes: bool,
    rest: &'a [u8],
}

impl AllGather for Two<'_> {
    fn rank(&self) -> u32 {
        0
    }

    fn size(&self) -> u32 {
        2
    }

    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        if self.echoes {
            return Ok(vec![own.to_vec(); 2]);
        }
        let other = match self.rest {
            [high, low, rest @ ..] => {
                let length = usize::from(u16::from_be_bytes([*high, *low]));
                let (other, rest) = rest.split_at(length.min(rest.len()));
                self.rest = rest;
                other
            }
            _ => &[],
        };
        Ok(vec![own.to_vec(), other.to_vec()])
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, rest)) = bytes.split_first() else {
        return;
    };
    // No fds: a statement could name any socket of this machine.
    let options = GatherOptions::new().via(HandleType::Fabric);
    let mut two = Two {
        echoes: kind & 2 != 0,
        rest,
    };
    if kind & 1 == 0 {
        let _ = options.gather(&mut two, None, &DRIVER);
        return;
    }
    let secret = GroupSecret::new(b"0123456789abcdef").expect("long enough");
    let drawn = [&[0, 32][..], &[7; 32], rest].concat();
    two.rest = &drawn;
    let sealed = Sealed::new(two, &secret);
    let mut sealed = sealed.expect("a number of each rank");
    let forged = sealed
        .all_gather(b"own")
        .expect_err("no contribution of rank 1");
    assert!(matches!(forged, Error::Forged { rank: 1 }), "{forged}");
});
