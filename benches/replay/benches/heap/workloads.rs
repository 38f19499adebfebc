//! The workloads that are measured.

use std::alloc::Layout;
use std::io;
use std::sync::Arc;

use crate::entrant::Entrant;
use crate::runner::{self, Runner};
use crate::sequence::{self, Sequence, Sizes};
use crate::suite::Program;
use crate::threads;
use egmem_replay::contestants::Room;

/// The default alignment of blocks, as malloc's.
pub const ALIGN: usize = 16;

/// Work for one thread or many.
#[derive(Clone)]
pub enum Work {
    /// For one: measured by its own clock.
    One(runner::Work),
    /// For many: measured by wall time.
    Many(threads::Work),
}

/// Work by name.
pub struct Workload {
    /// Its name: a group, a slash, a size.
    pub name: String,
    /// The unit that a time is divided by.
    pub unit: &'static str,
    /// Itself.
    pub work: Work,
}

impl Workload {
    /// Makes a contestant for it.
    ///
    /// # Errors
    /// If the contestant cannot be made.
    pub fn start(&self, kind: Entrant) -> io::Result<Box<dyn Runner>> {
        match &self.work {
            Work::One(work) => runner::start(kind, work.room(), work),
            Work::Many(work) => threads::start(kind, work.room(), work),
        }
    }

    /// The divisor of a pass's time.
    pub fn operations(&self) -> u64 {
        let operations = match &self.work {
            Work::One(work) => work.operations(),
            Work::Many(work) => work.operations(),
        };
        match self.unit {
            // A sequence counts both halves of a pair.
            "pair" if self.sequence().is_some() => operations / 2,
            _ => operations,
        }
    }

    /// The sequence, for one thread.
    pub fn sequence(&self) -> Option<&Arc<Sequence>> {
        match &self.work {
            Work::One(runner::Work::Events(sequence, _)) => Some(sequence),
            _ => None,
        }
    }

    /// Whether its peak memory is measured in a process of its own.
    pub fn takes_memory(&self) -> bool {
        matches!(self.work, Work::Many(threads::Work::Suite { .. }))
    }

    /// Returns a capacity of which 97 % is live at the peak, if the workload measures that.
    pub fn tight(&self) -> Option<Room> {
        if !self.name.starts_with("random") {
            return None;
        }
        let sequence = self.sequence()?;
        let capacity = (sequence.peak as f64 / 0.97) as u64;
        Some(Room {
            capacity,
            blocks: sequence.blocks,
            align: ALIGN as u64,
        })
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, ALIGN).expect("a layout")
}

/// All of them whose names contain one of `only`; without any, all.
pub fn all(only: &[String]) -> Vec<Workload> {
    let mut all = Vec::new();
    let mut add = |name: String, unit, work: &dyn Fn() -> Work| {
        if only.is_empty() || only.iter().any(|part| name.contains(part)) {
            let work = work();
            all.push(Workload { name, unit, work });
        }
    };
    let one = |sequence| Work::One(runner::Work::Events(Arc::new(sequence), ALIGN));

    let pair = layout(64 << 10);
    add("pair/64 KiB".into(), "pair", &|| {
        Work::One(runner::Work::Pairs {
            layout: pair,
            count: 200_000,
        })
    });
    for threads in [1, 2] {
        add(format!("pairs of threads/{threads}"), "pair", &|| {
            Work::Many(threads::Work::Pairs {
                threads,
                layout: pair,
                count: 400_000,
            })
        });
    }
    for (size, most) in [
        ("64 KiB", 64 << 10),
        ("1 MiB", 1 << 20),
        ("64 MiB", 64 << 20),
    ] {
        for (name, count) in [("1k", 1000), ("10k", 10_000), ("100k", 100_000)] {
            add(format!("random/to {size}, {name}"), "operation", &|| {
                one(sequence::random_allocations(count, most, 1))
            });
        }
        for (name, count, runs) in [("1k", 1000, 100), ("10k", 10_000, 10)] {
            let name = format!("random, anew/to {size}, {name}");
            add(name, "operation", &|| {
                one(sequence::random_allocations_anew(count, most, runs))
            });
        }
    }
    add("holes/1 KiB".into(), "pair", &|| {
        one(sequence::holes(200_000))
    });

    let kinds = [
        ("1 KiB", Sizes::Fixed(1024)),
        ("to 64 KiB", Sizes::Uniform(1, 64 << 10, 1)),
    ];
    for (name, sizes) in kinds {
        add(format!("producer and consumer/{name}"), "block", &|| {
            let mut rng = fastrand::Rng::with_seed(3);
            Work::Many(threads::Work::Pass {
                sizes: (0..200_000).map(|_| sizes.draw(&mut rng)).collect(),
                align: ALIGN,
            })
        });
    }
    add("batches/20 threads, 64 B".into(), "block", &|| {
        Work::Many(threads::Work::Batches {
            threads: 20,
            layout: layout(64),
            count: 50_000,
        })
    });
    let kinds = [
        ("4 KiB", Sizes::Fixed(4096)),
        ("8 B to 4 KiB", Sizes::Uniform(8, 4096, 8)),
        ("8 B to 128 B", Sizes::Uniform(8, 128, 8)),
    ];
    type Make = fn(u32, Sizes, u64) -> Sequence;
    let shapes: [(_, Make); 2] = [
        ("churn", sequence::churn::<10_000>),
        ("peak", sequence::peak),
    ];
    for (shape, make) in shapes {
        for (name, sizes) in kinds {
            for threads in [1, 4] {
                add(
                    format!("{shape}/{name}, threads: {threads}"),
                    "operation",
                    &|| {
                        let each = |seed| make(500_000, sizes, seed);
                        Work::Many(threads::Work::Events(
                            (0..threads).map(each).collect(),
                            ALIGN,
                        ))
                    },
                );
            }
        }
    }
    let kinds = [
        ("2 KiB to 64 KiB", Sizes::Uniform(2 << 10, 64 << 10, 1)),
        ("2 KiB to 512 KiB", Sizes::Uniform(2 << 10, 512 << 10, 1)),
        ("64 KiB to 1 MiB", Sizes::Uniform(64 << 10, 1 << 20, 1)),
    ];
    for (name, sizes) in kinds {
        for threads in [1, 2, 4, 8, 16] {
            let name = format!("mixed sizes/{name}, threads: {threads}");
            add(name, "operation", &|| {
                let each = |seed| sequence::churn::<1000>(500_000, sizes, seed);
                let sequences = (0..threads).map(each).collect();
                Work::Many(threads::Work::Events(sequences, ALIGN))
            });
        }
    }
    for program in Program::ALL {
        for threads in [1, 4, 16] {
            let name = format!("suite/{}, threads: {threads}", program.name());
            add(name, "block", &|| {
                Work::Many(threads::Work::Suite { program, threads })
            });
        }
    }
    // NVIDIA Dynamo's arena is offset-allocator behind a mutex; blocks as a KV cache's.
    for threads in [1, 16] {
        add(format!("arena/threads: {threads}"), "operation", &|| {
            let sizes = Sizes::Uniform(64 << 10, 2 << 20, 4096);
            let each = |seed| sequence::churn::<256>(200_000, sizes, seed);
            let sequences = (0..threads).map(each).collect();
            Work::Many(threads::Work::Events(sequences, ALIGN))
        });
    }
    all
}
