//! Requests that are refused although blocks outside the core could come back.

use super::*;

/// The blocks that threads keep, about which [`Core::rules_out`] is asked between steps.
#[derive(Default)]
struct Kept {
    ranges: Vec<(Extent, u64)>,
    small: Vec<(u64, Class)>,
    ruled_out: u64,
}

impl Kept {
    fn outside(&self, class: Option<Class>) -> CachedBound {
        let ranges: u64 = self.ranges.iter().map(|(_, size)| size).sum();
        let small: u64 = self.small.iter().map(|(_, class)| class.bytes()).sum();
        CachedBound {
            bytes: ranges + small,
            larger: ranges > 0,
            of_class: self.small.iter().any(|&(_, other)| Some(other) == class),
        }
    }

    /// A user frees a block, and a thread keeps it.
    fn keep(&mut self, both: &mut Both, which: usize) {
        if which.is_multiple_of(2) && !both.ranges.is_empty() {
            let at = which / 2 % both.ranges.len();
            self.ranges.push(both.ranges.swap_remove(at));
        } else if !both.small.is_empty() {
            let at = which / 2 % both.small.len();
            self.small.push(both.small.swap_remove(at));
        }
    }

    fn give_all(&mut self, core: &mut Core) {
        for (extent, _) in self.ranges.drain(..) {
            assert!(core.free(extent.node()));
        }
        for (offset, _) in self.small.drain(..) {
            assert_eq!(core.give(&[offset], 1), 0);
        }
        core.release_empty_slabs();
    }

    /// Asks as the heap does. A request that is ruled out must still fail once the core has all blocks.
    fn ask(&mut self, core: &mut Core, bytes: u64, align: u64) {
        let request = Request::new(bytes, align);
        let met = |core: &mut Core| match Class::of(bytes, align) {
            Some(class) => {
                let mut out = [0];
                let filled =
                    core.exhaustively(|core| core.fill(&OwnStripe::default(), class, &mut out));
                (filled == 1)
                    .then(|| assert_eq!(core.give(&out, 1), 0))
                    .is_some()
            }
            None => {
                let found = core.exhaustively(|core| core.allocate(bytes, align));
                found
                    .inspect(|found| assert!(core.free(found.node())))
                    .is_some()
            }
        };
        if met(core) {
            return;
        }
        let outside = self.outside(request.class);
        let ruled_out = rules_out(core, &request, outside)
            || request.class.is_none() && slabs_cannot_serve(core, &request, outside);
        self.ruled_out += u64::from(ruled_out);
        self.give_all(core);
        let found = met(core);
        assert!(!(ruled_out && found), "{bytes} bytes at {align} were there");
        if !found {
            core.remember_refusal(&request);
        }
    }
}

fn rules_out(core: &mut Core, request: &Request, outside: CachedBound) -> bool {
    let slabs = Arc::clone(core.slabs());
    core.rules_out(request, outside, &slabs.hold())
}

fn slabs_cannot_serve(core: &Core, request: &Request, outside: CachedBound) -> bool {
    core.slabs_cannot_serve(request, outside, &core.slabs().hold())
}

#[derive(Clone, Debug)]
enum Turn {
    Step(Step),
    Keep(usize),
    Ask(u64, u32),
}

fn turn() -> impl Strategy<Value = Turn> {
    let bytes = prop_oneof![1_u64..2048, 2048_u64..100_000, 1_u64..6_000_000];
    prop_oneof![
        4 => step().prop_map(Turn::Step),
        3 => any::<usize>().prop_map(Turn::Keep),
        3 => (bytes, prop_oneof![3 => Just(0_u32), 1 => 0_u32..20]).prop_map(|(bytes, log)| Turn::Ask(bytes, log)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]
    #[test]
    fn nothing_is_ruled_out_that_could_be_had(
        turns in proptest::collection::vec(turn(), 1..600),
        joins in any::<bool>(),
    ) {
        let mut both = Both::new(5 * PAGE, joins);
        let mut kept = Kept::default();
        // A heap nearly full of blocks of many sizes.
        both.add(0);
        both.add(1);
        let mut numbers = Numbers(turns.len() as u64 + 1);
        for _ in 0..150 {
            both.fill(Class::from_index(numbers.below(CLASSES as u64) as usize), 20);
            both.allocate(1 + numbers.below(60_000), 1);
        }
        for turn in turns {
            match turn {
                // The model counts blocks that threads keep as used.
                Turn::Step(Step::Remove(_)) => {}
                Turn::Step(step) => both.run(step),
                Turn::Keep(which) => kept.keep(&mut both, which),
                Turn::Ask(bytes, log) => {
                    let gone: Vec<u64> = kept.ranges.iter().map(|(extent, _)| extent.offset)
                        .chain(kept.small.iter().map(|&(offset, _)| offset)).collect();
                    kept.ask(&mut both.core, bytes, 1 << log);
                    if kept.ranges.is_empty() && kept.small.is_empty() {
                        for offset in gone {
                            both.model.used.remove(&offset);
                        }
                    }
                }
            }
        }
    }
}

/// Every second of many blocks is free, and threads keep some small ones.
#[test]
fn a_refusal_for_fragments_holds_until_enough_comes_free() {
    let mut core = Core::new(0, 1 << 30).unwrap();
    core.add(0..CHUNK, true);
    let blocks: Vec<Extent> = std::iter::from_fn(|| core.allocate(65_536, 1)).collect();
    for block in blocks.iter().step_by(2) {
        core.free(block.node());
    }
    let request = Request::new(65_537, 1);
    let outside = |bytes| CachedBound {
        bytes,
        larger: true,
        of_class: false,
    };
    assert!(
        !rules_out(&mut core, &request, outside(0)),
        "nobody has looked"
    );
    core.remember_refusal(&request);
    let larger = Request::new(100_000, 4096);
    for request in [request, larger] {
        assert!(rules_out(&mut core, &request, outside(60_000)));
        assert!(!rules_out(&mut core, &request, outside(65_536)));
    }
    // A smaller request, a small block, and requests after memory was added.
    assert!(!rules_out(&mut core, &Request::new(65_000, 1), outside(0)));
    assert!(!rules_out(&mut core, &Request::new(1, 1), outside(0)));
    core.free(blocks[1].node());
    assert!(!rules_out(&mut core, &request, outside(0)));
    assert!(core.allocate(65_537, 1).is_some());
    core.add(CHUNK..2 * CHUNK, true);
    assert!(!rules_out(&mut core, &larger, outside(0)));
    // A request beyond all memory needs no search.
    assert!(rules_out(
        &mut core,
        &Request::new(4 * CHUNK, 1),
        outside(60_000)
    ));
}

/// A slab between free ranges, one of whose blocks is in use or in a cache.
#[test]
fn a_request_that_an_emptied_slab_could_serve_is_not_ruled_out() {
    const SIZE: u64 = 65_536;
    let mut core = Core::new(0, 1 << 30).unwrap();
    core.add(0..CHUNK, true);
    let class = Class::of(500, 1).unwrap();
    let before = core.allocate(SIZE, 1).unwrap();
    let mut cached = [0];
    assert_eq!(core.fill(&OwnStripe::default(), class, &mut cached), 1);
    let after: Vec<Extent> = std::iter::from_fn(|| core.allocate(SIZE, 1)).collect();
    while core.allocate(PAGE, 1).is_some() {}
    core.free(before.node());
    core.free(after[0].node());
    let outside = |bytes, larger| CachedBound {
        bytes,
        larger,
        of_class: false,
    };
    let rules_out = |core: &mut Core, bytes, outside| {
        let request = Request::new(bytes, 1);
        crate::ranges::tests::refusals::rules_out(core, &request, outside)
            || slabs_cannot_serve(core, &request, outside)
    };
    assert!(core.allocate(2 * SIZE, 1).is_none());
    // The slab has a page.
    assert!(!rules_out(&mut core, 2 * SIZE + PAGE, outside(512, false)));
    assert!(rules_out(&mut core, 2 * SIZE + PAGE, outside(511, false)));
    assert!(rules_out(
        &mut core,
        2 * SIZE + PAGE + 1,
        outside(512, false)
    ));
    // Blocks above the small ones may lie anywhere.
    let two_pages = 2 * SIZE + 2 * PAGE;
    assert!(rules_out(&mut core, two_pages, outside(2 * PAGE, false)));
    assert!(!rules_out(&mut core, two_pages, outside(2 * PAGE, true)));
    assert_eq!(core.give(&cached, 1), 0);
    core.release_empty_slabs();
    assert!(core.allocate(2 * SIZE + PAGE, 1).is_some());
}

/// Nothing free begins at a multiple of the alignment; then something does.
#[test]
fn an_aligned_request_is_searched_for_again_once_a_range_is_free() {
    let mut core = Core::new(0, 1 << 30).unwrap();
    core.add(0..CHUNK, true);
    let blocks: Vec<Extent> = std::iter::from_fn(|| core.allocate(PAGE, 1)).collect();
    core.free(blocks[1].node());
    for _ in 0..3 {
        assert!(core.allocate(PAGE, 2 * PAGE).is_none());
    }
    core.free(blocks[4].node());
    let found = core.allocate(PAGE, 2 * PAGE).unwrap();
    assert_eq!(found.offset, 4 * PAGE);
}

/// Holes as large as the request, none of which has room at a multiple of its alignment.
#[test]
fn a_refusal_for_the_alignment_holds_until_enough_comes_free() {
    const SIZE: u64 = 16 << 10;
    let mut core = Core::new(5 * PAGE, 1 << 30).unwrap();
    core.add(0..CHUNK, true);
    let blocks: Vec<Extent> = std::iter::from_fn(|| core.allocate(SIZE, 1)).collect();
    for block in blocks.iter().step_by(2) {
        core.free(block.node());
    }
    let request = Request::new(SIZE, 2 * SIZE);
    assert!(core.allocate(SIZE, 2 * SIZE).is_none());
    core.remember_refusal(&request);
    let outside = |bytes| CachedBound {
        bytes,
        larger: true,
        of_class: false,
    };
    assert!(rules_out(&mut core, &request, outside(SIZE - 1)));
    assert!(!rules_out(&mut core, &request, outside(SIZE)));
    core.free(blocks[1].node());
    assert!(!rules_out(&mut core, &request, outside(0)));
    assert!(core.allocate(SIZE, 2 * SIZE).is_some());
}

/// A small piece beside a large one, which do not join: a request that fits into each needs no place made.
#[test]
fn idle_pieces_may_make_place_only_for_requests_that_do_not_fit_into_the_smallest() {
    let mut core = Core::new(0, 1 << 30).unwrap();
    core.add(0..CHUNK, false);
    core.add(CHUNK..CHUNK + CHUNK / 4, false);
    let all: Vec<Extent> = std::iter::from_fn(|| core.allocate(65_536, 1)).collect();
    for block in all.iter().step_by(2) {
        core.free(block.node());
    }
    let small = CachedBound {
        bytes: 512,
        ..CachedBound::default()
    };
    let cannot = |core: &Core, bytes| slabs_cannot_serve(core, &Request::new(bytes, 1), small);
    let within = CHUNK / 4 - GRANULE;
    assert!(cannot(&core, within) && !cannot(&core, within + 1));
    for block in all.iter().skip(1).step_by(2) {
        core.free(block.node());
    }
    assert!(core.remove(CHUNK..CHUNK + CHUNK / 4));
    let rest = core.allocate(CHUNK, 1).unwrap();
    assert!(cannot(&core, CHUNK - GRANULE), "the small piece is gone");
    core.free(rest.node());
}
