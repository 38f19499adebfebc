//! Processes that follow a growing vector see the elements of their last update, through all operations.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;

use egmem::Driver;
use egmem::driver::Access;
use egmem::shapes::Growable;
use egmem::shapes::sharing::{Follower, GrowableExport, GrowableView};
use egmem::share::{Channel, ImportOptions, Peers};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::shapes::{MIB, grace, node, nothing_held};

const MOST: usize = 1 << 20;

#[derive(Clone, Debug)]
enum Step {
    Extend(usize),
    Truncate(Index),
    Shrink,
    /// One process more.
    Join,
    /// Sends an update to one of them.
    Send(Index),
    /// One of them takes its next update.
    Follow(Index),
    /// One of them keeps its view.
    Keep(Index),
    /// One of them writes an element.
    Write(Index, Index),
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<Index>;
    prop_oneof![
        3 => (1..400_000_usize).prop_map(Step::Extend),
        1 => index().prop_map(Step::Truncate),
        1 => Just(Step::Shrink),
        1 => Just(Step::Join),
        3 => index().prop_map(Step::Send),
        3 => index().prop_map(Step::Follow),
        1 => index().prop_map(Step::Keep),
        2 => (index(), index()).prop_map(|(who, at)| Step::Write(who, at)),
    ]
}

/// A process that follows the vector.
struct Process {
    to: Follower,
    channel: Channel,
    /// `None` before it took the first update.
    view: Option<GrowableView<u64>>,
    /// The vector's lengths in updates that it has not taken.
    told: VecDeque<usize>,
    len: usize,
}

impl Process {
    fn join(export: &GrowableExport<u64>) -> Self {
        let (one, other) = UnixStream::pair().unwrap();
        let [one, channel] =
            [one, other].map(|end| Channel::new(end, &Peers::same_user()).unwrap());
        Self {
            to: export.follower(one, Access::ReadWrite),
            channel,
            view: None,
            told: VecDeque::new(),
            len: 0,
        }
    }

    fn follow(&mut self, driver: &Driver) {
        let Some(len) = self.told.pop_front() else {
            return;
        };
        match &mut self.view {
            Some(view) => assert_eq!(view.follow(&mut self.channel).unwrap(), len),
            None => {
                let options = ImportOptions::new();
                let view = GrowableView::receive(driver, &mut self.channel, options);
                self.view = Some(view.unwrap());
            }
        }
        self.len = len;
    }
}

/// Compares some elements of a view, and the bytes behind them.
fn check(view: &GrowableView<u64>, len: usize, memory: &[u64]) -> Result<(), TestCaseError> {
    prop_assert_eq!(view.len(), len);
    for index in [0, len / 3, len / 2, len.saturating_sub(1)] {
        let expected = memory.get(index).filter(|_| index < len);
        prop_assert_eq!(view.get(index).ok(), expected.copied(), "{}", index);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn views_have_the_elements_they_were_told(steps in prop::collection::vec(step(), 1..40)) {
        let driver = grace();
        let options = Growable::<u64>::on(node(&driver)).max_len(MOST).step(2 * MIB);
        let mut vector = options.shareable().create(&driver).unwrap();
        let mut export = GrowableExport::new(&vector);
        let mut all = vec![Process::join(&export)];
        let mut kept: Vec<(GrowableView<u64>, usize)> = Vec::new();
        // The content of the memory, behind the elements too.
        let mut memory = vec![0; MOST];
        let mut next = 0;
        for step in steps {
            match step {
                Step::Extend(count) => {
                    let from = vector.len();
                    let count = count.min(MOST - from);
                    let new: Vec<u64> = (next..next + count as u64).collect();
                    next += count as u64;
                    vector.extend_from_slice(&new).unwrap();
                    memory[from..from + count].copy_from_slice(&new);
                }
                Step::Truncate(at) => vector.truncate(at.index(MOST)),
                // Chunks that were sent are not given back: views may have more elements than the vector.
                Step::Shrink => drop(vector.shrink_to_fit().unwrap()),
                Step::Join => all.push(Process::join(&export)),
                Step::Send(who) => {
                    let at = who.index(all.len());
                    let process = &mut all[at];
                    // No more than a socket holds.
                    if process.told.len() < 4 {
                        export.send(&vector, &mut process.to).unwrap();
                        process.told.push_back(vector.len());
                    }
                }
                Step::Follow(who) => {
                    let at = who.index(all.len());
                    all[at].follow(&driver);
                }
                Step::Keep(who) => {
                    let process = who.get(&all);
                    kept.extend(process.view.clone().map(|view| (view, process.len)));
                }
                Step::Write(who, at) => {
                    let process = who.get(&all);
                    if let Some(view) = &process.view && process.len > 0 {
                        let index = at.index(process.len);
                        view.set(index, next).unwrap();
                        memory[index] = next;
                        next += 1;
                    }
                }
            }
            for process in &all {
                if let Some(view) = &process.view {
                    check(view, process.len, &memory)?;
                }
            }
        }
        for (view, len) in &kept {
            check(view, *len, &memory)?;
        }
        let mut seen = vec![0; vector.len()];
        vector.cpu().unwrap().read_at(0, &mut seen).unwrap();
        prop_assert!(seen == memory[..vector.len()]);
        // Views keep their memory.
        drop((vector, export));
        for process in &all {
            if let Some(view) = &process.view {
                check(view, process.len, &memory)?;
            }
        }
        drop((all, kept));
        nothing_held(&driver);
    }
}
