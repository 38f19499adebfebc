use proptest::prelude::*;

use super::*;

#[test]
fn alignment_and_hint_are_kept() {
    for shift in [12, 21, 30, 32] {
        let range = Range::reserve(2 << 20, 1 << shift).unwrap();
        assert!(range.start.is_multiple_of((1 << shift).max(GRANULARITY)));
    }
    // Other tests' threads may map something there in between.
    let kept = |_| {
        let free = Range::reserve(4 << 20, 0).unwrap().start;
        let range = Range::reserve_from(2 << 20, 0, free).unwrap();
        (range.start == free).then_some((free, range))
    };
    let (free, _range) = (0..100).find_map(kept).expect("a free hint is kept");
    let above = Range::reserve_from(2 << 20, 0, free).unwrap();
    assert!(above.start >= free + (2 << 20));
    let aligned = Range::reserve_from(2 << 20, 1 << 30, free).unwrap();
    assert!(aligned.start > free && aligned.start.is_multiple_of(1 << 30));
}

#[test]
fn what_cannot_be_is_refused() {
    assert!(Range::reserve(1 << 62, 0).is_err());
    assert!(Range::reserve(u64::MAX - 4095, 1 << 30).is_err());
    assert!(Range::reserve_from(1 << 46, 0, HIGHEST - (1 << 46) + GRANULARITY).is_err());
    assert!(Range::reserve_from(GRANULARITY, 0, HIGHEST).is_err());
}

proptest! {
    #[test]
    fn agrees_with_a_map_of_single_units(
        steps in prop::collection::vec((any::<bool>(), 1_u64..20, 0_u32..5, 0_u64..40), 0..80),
    ) {
        const UNITS: u64 = 64;
        let mut ranges = FreeRanges::whole(0, UNITS);
        let mut model = vec![true; UNITS as usize];
        let mut taken: Vec<(u64, u64)> = Vec::new();
        for (give, len, shift, from) in steps {
            if give && !taken.is_empty() {
                let (start, len) = taken.swap_remove(len as usize % taken.len());
                ranges.give(start, len);
                model[start as usize..(start + len) as usize].fill(true);
            } else {
                // 4: no alignment requested.
                let alignment = 1_u64 << (shift % 4);
                let fits = (0..)
                    .step_by(alignment as usize)
                    .take_while(|at| at + len <= UNITS)
                    .filter(|&at| shift == 4 || at >= from)
                    .find(|&at| model[at as usize..(at + len) as usize].iter().all(|&u| u));
                let start = match shift {
                    4 => ranges.take(len),
                    _ => ranges.take_aligned(len, alignment, from, 0),
                };
                prop_assert_eq!(start, fits);
                if let Some(start) = start {
                    model[start as usize..(start + len) as usize].fill(false);
                    taken.push((start, len));
                }
            }
            prop_assert_eq!(ranges.is_whole(0, UNITS), model.iter().all(|&free| free));
        }
    }
}

#[test]
fn a_window_packs_and_takes_back() {
    let window = Arc::new(Window::new(Placement::Packed).unwrap());
    let first = window.take(6 << 20, 0, 0).unwrap();
    let second = window.take(2 << 20, 4 << 20, 0).unwrap();
    assert_eq!(second.start - first.start, 8 << 20);
    let third = window.take(2 << 20, 0, 0).unwrap();
    assert_eq!(third.start - first.start, 6 << 20);
    let at = first.start;
    assert!(!at.is_multiple_of(WINDOW_ALIGNMENT));
    // The search goes up from the hint.
    let above = window.take(2 << 20, 0, at).unwrap();
    assert_eq!(above.start, second.start + second.len);
    drop((first, above));
    assert_eq!(window.take(2 << 20, 0, at).unwrap().start, at);
    let above = window.take(2 << 20, 0, at + (4 << 20)).unwrap();
    assert_eq!(above.start, at + (4 << 20));
    assert!(
        window
            .take(2 << 20, 0, window.all.start - (2 << 20))
            .is_none()
    );
    assert!(window.take(WINDOW - FIRST, 0, 0).is_none());
    drop((second, third, above));
    assert!(window.take(WINDOW - FIRST, 0, 0).is_some());
}

/// Returns whether the kernel can read a byte there.
fn is_readable(address: u64) -> bool {
    let (_reader, writer) = io::pipe().unwrap();
    // SAFETY: the kernel checks the address, and only reads it.
    unsafe { libc::write(writer.as_raw_fd(), address as *const _, 1) == 1 }
}

#[test]
fn a_guarded_range_has_guards_and_is_used_again_at_once() {
    let window = Arc::new(Window::new(Placement::Guarded).unwrap());
    let file = tempfile::tempfile().unwrap();
    file.set_len(2 << 20).unwrap();
    let take = |len, alignment| window.take(len, alignment, 0).unwrap();
    let ranges = [take(2 << 20, 0), take(2 << 20, 8 << 20), take(2 << 20, 0)];
    for range in &ranges {
        let (start, end) = (range.start, range.start + range.len);
        range
            .place(start, 2 << 20, &file, 0, Access::ReadWrite)
            .unwrap();
        assert!(is_readable(start) && is_readable(end - 1));
        assert!(!is_readable(start - 1) && !is_readable(end));
        let apart = |other: &Range| other.start.abs_diff(start) >= 6 << 20 || other.start == start;
        assert!(ranges.iter().all(apart));
    }
    assert!(ranges[1].start.is_multiple_of(8 << 20));
    let [first, second, third] = ranges;
    let (at, last) = (first.start, third.start);
    drop((first, third));
    assert!(!is_readable(at) && !is_readable(last));
    assert_eq!(take(2 << 20, 0).start, last, "the last freed comes first");
    let larger = take(4 << 20, 0);
    assert_ne!(larger.start, at);
    let again = take(2 << 20, 0);
    drop((again, larger, second));
    // All of it except its two guards.
    let whole = GUARDED_WINDOW - FIRST - (4 << 20);
    assert!(window.take(whole, 0, 0).is_some());
}
