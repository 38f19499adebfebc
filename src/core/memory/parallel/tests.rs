//! Large copies by several threads are exact, whichever threads take part.

use std::collections::HashSet;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::memory::view::tests::view;
use crate::{Driver, Machine};

/// Enough for four threads.
const BYTES: usize = 4 * BYTES_PER_THREAD as usize + 1000;

fn four() -> ParallelCopy {
    ParallelCopy::new().threads(4)
}

/// Bytes that repeat at no multiple of a piece.
fn data(len: usize) -> Vec<u8> {
    let period: Vec<u8> = (0..251).collect();
    let mut data = period.repeat(len.div_ceil(period.len()));
    data.truncate(len);
    data
}

fn words(bytes: usize) -> Vec<u64> {
    vec![0; bytes.div_ceil(8)]
}

fn check(copy: &ParallelCopy, offset: usize) {
    let data = data(BYTES - 2 * offset);
    let mut memory = words(BYTES);
    let view = view(&mut memory, true);
    copy.write_at(view, offset as u64, &data).unwrap();
    let mut back = vec![0_u8; data.len()];
    copy.read_at(view, offset as u64, &mut back).unwrap();
    assert!(
        back == data,
        "what was read is not what was written at {offset}"
    );
    copy.fill(view, offset as u64 + 1, data.len() as u64 - 2, 9)
        .unwrap();
    let all: &[u8] = bytemuck::cast_slice(&memory);
    assert!(
        all[..offset]
            .iter()
            .chain(&all[BYTES - offset..])
            .all(|&byte| byte == 0)
    );
    let (first, rest) = all[offset..BYTES - offset].split_at(1);
    let (filled, last) = rest.split_at(rest.len() - 1);
    assert_eq!((first, last), (&data[..1], &data[data.len() - 1..]));
    assert!(
        filled == vec![9; filled.len()],
        "not all is filled at {offset}"
    );
}

#[test]
fn copies_by_several_threads_are_exact() {
    for offset in [0, 3, 8] {
        check(&four(), offset);
    }
}

#[test]
fn where_no_thread_can_be_started_the_caller_does_the_work() {
    let copy = ParallelCopy {
        stack: usize::MAX >> 2,
        ..four()
    };
    check(&copy, 3);
}

#[test]
fn several_threads_take_pieces() {
    let seen = Mutex::new(HashSet::<ThreadId>::new());
    // Each waits for the other at its piece, so that no thread can take both. Protects against a hang.
    let deadline = Instant::now() + Duration::from_secs(300);
    let work = |_| {
        lock(&seen).insert(thread::current().id());
        while lock(&seen).len() < 2 && Instant::now() < deadline {
            thread::yield_now();
        }
        Ok(())
    };
    ParallelCopy::new().run((2, 0..2), work).unwrap();
    assert_eq!(lock(&seen).len(), 2);
}

#[test]
fn a_failing_piece_is_told() {
    let work = |piece| match piece {
        5 => Err(Error::invalid("piece", "5")),
        _ => Ok(()),
    };
    let error = ParallelCopy::new().run((3, 0..9), work).unwrap_err();
    assert_eq!(error, Error::invalid("piece", "5"));
}

proptest! {
    #[test]
    fn pieces_split_no_word_and_leave_none_out(threads in 2_usize..100, len in 2..40 * BYTES_PER_THREAD, at in 0_u64..1 << 40) {
        let at = at + 1;
        let mut none = [];
        let mut range = view(&mut none, true);
        range.base = std::ptr::without_provenance_mut(at as usize);
        range.len = len + 2 * BYTES_PER_THREAD;
        let cut = ParallelCopy::new().threads(threads).cut(&range);
        let (used, pieces) = cut.unwrap();
        prop_assert!(used >= 2 && used <= threads);
        let pieces: Vec<_> = pieces.collect();
        prop_assert!(pieces.len() > used, "{pieces:?}");
        let mut end = 0;
        for piece in &pieces {
            prop_assert!(piece.start == end && piece.end > end, "{pieces:?}");
            prop_assert!(end == 0 || (at + end).is_multiple_of(LEAST_PIECE));
            end = piece.end;
        }
        prop_assert_eq!(end, range.len);
    }
}

#[test]
fn wrong_requests_change_nothing() {
    let mut memory = words(32);
    let view = view(&mut memory, true);
    let none = ParallelCopy::new().threads(0);
    let error = none.fill(view, 0, 8, 1).unwrap_err();
    assert!(
        matches!(
            error,
            Error::InvalidArgument {
                what: "threads",
                ..
            }
        ),
        "{error}"
    );
    let error = four().write_at(view, 30, &[1_u8; 3]).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
    let error = four().read_at(view, 30, &mut [1_u8; 3]).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
    let mut read_only = view;
    read_only.writable = false;
    let error = four().write_at(read_only, 0, &[1_u8]).unwrap_err();
    assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    assert!(memory.iter().all(|&word| word == 0));
}

#[test]
fn nodes_that_are_not_this_machines_bind_no_thread() {
    let topology = Topology::discover(&Driver::simulated(Machine::gh200()).unwrap()).unwrap();
    let copy = ParallelCopy::on(&topology, NodeId(0)).unwrap();
    assert!(
        copy.cpus.is_empty(),
        "a simulated node's CPUs are not this machine's"
    );
    assert!(copy.threads >= 1);
    let error = ParallelCopy::on(&topology, NodeId(77)).unwrap_err();
    assert!(matches!(error, Error::NoSuchNode { .. }), "{error}");
}

/// Also those that the calling thread takes: it touches memory first, too.
#[test]
fn all_pieces_are_copied_on_the_nodes_cpus_and_the_caller_is_bound_no_longer() {
    let topology = Topology::of_host();
    let usable = |node| topology.usable_cpus(node).unwrap();
    let mut nodes = topology.nodes().iter().map(|node| node.id);
    let Some(node) = nodes.find(|&node| !usable(node).is_empty()) else {
        return; // a system without /sys
    };
    let before = usable(node);
    let last: CpuSet = before.iter().last().into_iter().collect();
    let copy = ParallelCopy {
        cpus: last.clone(),
        ..four()
    };
    let seen = Mutex::new(Vec::new());
    let work = |_| {
        lock(&seen).push(usable(node));
        Ok(())
    };
    for threads in [2, 3] {
        copy.run((threads, 0..9), work).unwrap();
    }
    assert_eq!(*lock(&seen), vec![last; 18]);
    assert_eq!(usable(node), before);
}
