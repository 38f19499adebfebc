//! Nodes that give at most their share.

use super::*;
use crate::error::NoRoom;

fn spread(shares: &[u64], plan: Plan) -> Plan {
    Plan {
        nodes: (0..).map(Location::HostNuma).take(shares.len()).collect(),
        shares: shares.iter().map(|mib| mib * MIB).collect(),
        ..plan
    }
}

fn on(backing: &Backing, node: i32) -> u64 {
    let chunks = backing.chunks();
    let there = chunks.filter(|chunk| chunk.location() == Location::HostNuma(node));
    there.map(Chunk::bytes).sum::<u64>() / MIB
}

#[test]
fn no_node_gives_more_than_its_share() {
    let driver = small(&[100, 100]);
    // One share is 8 MiB and less than 2 MiB more.
    for chunk in [2, 8, 64] {
        let plan = Plan {
            limit: None,
            ..spread(&[8, 56], plan(64, chunk))
        };
        let odd = Plan {
            shares: vec![9 * MIB, 57 * MIB],
            ..plan
        };
        let mut backing = Backing::new(&driver, &odd).unwrap();
        assert_eq!(backing.limit(), 64 * MIB);
        assert_eq!(grown(&mut backing, block(64 * MIB)), [0..64]);
        assert_eq!((on(&backing, 0), on(&backing, 1)), (8, 56), "by {chunk}");
    }
}

#[test]
fn a_limit_is_no_more_than_all_shares() {
    let driver = small(&[100, 100]);
    let limit = |mib| {
        let plan = spread(&[8, 16], plan(mib, 8));
        Backing::new(&driver, &plan).unwrap().limit() / MIB
    };
    assert_eq!([10, 24, 90].map(limit), [10, 24, 24]);
}

#[test]
fn what_is_given_back_or_did_not_come_about_counts_no_more() {
    let driver = small(&[100, 100]);
    let sim = driver.sim().unwrap();
    let mut backing = Backing::new(&driver, &spread(&[8, 56], plan(64, 8))).unwrap();
    // Created and given back, or left mapped for a while, on both nodes.
    for code in [Code::UNKNOWN, Code::NOT_PERMITTED] {
        sim.fail(Call::MemSetAccess, 1, Code::UNKNOWN);
        if code == Code::NOT_PERMITTED {
            sim.fail(Call::MemUnmap, 1, code);
        }
        sim.fail(Call::MemSetAccess, 2, Code::UNKNOWN);
        assert!(backing.grow(block(16 * MIB)).is_err());
        sim.cancel_all();
        assert!(backing.settled.sites.iter().all(|site| site.taken == 0));
    }
    for _ in 0..2 {
        assert_eq!(grown(&mut backing, block(64 * MIB)), [0..64]);
        assert_eq!((on(&backing, 0), on(&backing, 1)), (8, 56));
        assert_eq!(give_back(&mut backing, 0..64 * MIB).bytes(), 64 * MIB);
    }
    assert!(sim.held().mappings == 0);
}

#[test]
fn a_shareable_block_lies_where_the_share_has_room_for_it() {
    let driver = small(&[100, 100]);
    let fds = Plan {
        handle_types: HandleTypes::POSIX_FD,
        ..plan(64, 16)
    };
    let mut backing = Backing::new(&driver, &spread(&[8, 56], fds)).unwrap();
    for _ in 0..3 {
        backing.grow(block(10 * MIB)).unwrap();
    }
    assert_eq!((on(&backing, 0), on(&backing, 1)), (0, 48));
    let error = backing.grow(block(10 * MIB)).unwrap_err();
    let why = NoRoom::Share { most: 56 * MIB };
    let expected = matches!(error, Error::HeapFull { why: told, requested, .. } if told == why && requested == 10 * MIB);
    assert!(expected, "{error}");
    for _ in 0..2 {
        backing.grow(block(8 * MIB)).unwrap();
    }
    assert_eq!((on(&backing, 0), on(&backing, 1)), (8, 56));
}

#[test]
fn a_shortage_tells_what_is_free_of_the_shares() {
    let driver = small(&[100, 30]);
    let mut backing = Backing::new(&driver, &spread(&[8, 56], plan(64, 8))).unwrap();
    let error = backing.grow(block(40 * MIB)).unwrap_err();
    let expected = Error::NodesTooFull {
        nodes: vec![NodeId(0), NodeId(1)],
        requested: 40 * MIB,
        free: 38 * MIB,
    };
    assert_eq!(error, expected);
    assert_eq!(grown(&mut backing, block(38 * MIB)), [0..38]);
}
