//! The measured work: one copy or fill by each of the ways.

use std::hint::black_box;

use egmem::memory::{CpuView, ParallelCopy};

/// A way to move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Write,
    Read,
    Fill,
    LibcWrite,
    LibcRead,
    LibcFill,
    /// By several threads.
    ParallelWrite,
    ParallelRead,
    ParallelFill,
}

impl Work {
    pub const ALL: [Self; 9] = [
        Self::LibcWrite,
        Self::Write,
        Self::LibcRead,
        Self::Read,
        Self::LibcFill,
        Self::Fill,
        Self::ParallelWrite,
        Self::ParallelRead,
        Self::ParallelFill,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Write => "write_at",
            Self::Read => "read_at",
            Self::Fill => "fill",
            Self::LibcWrite => "memcpy to the view",
            Self::LibcRead => "memcpy from the view",
            Self::LibcFill => "memset",
            Self::ParallelWrite => "parallel write_at",
            Self::ParallelRead => "parallel read_at",
            Self::ParallelFill => "parallel fill",
        }
    }

    /// The baseline for the same work: libc's call, or one thread.
    pub const fn beside(self) -> Self {
        match self {
            Self::Write | Self::LibcWrite => Self::LibcWrite,
            Self::Read | Self::LibcRead => Self::LibcRead,
            Self::Fill | Self::LibcFill => Self::LibcFill,
            Self::ParallelWrite => Self::Write,
            Self::ParallelRead => Self::Read,
            Self::ParallelFill => Self::Fill,
        }
    }
}

/// A view, and private memory of the same size.
pub struct Ways<'a> {
    view: CpuView<'a>,
    own: Vec<u8>,
    parallel: ParallelCopy,
}

impl<'a> Ways<'a> {
    /// All of the memory is touched before anything is measured.
    pub fn new(view: CpuView<'a>, parallel: ParallelCopy) -> Self {
        let own = vec![1_u8; view.len() as usize];
        view.write_at(0, &own).expect("the view is writable");
        Self {
            view,
            own,
            parallel,
        }
    }

    /// Does `work` once, with the first `bytes`.
    pub fn run(&mut self, work: Work, bytes: usize) {
        let own = &mut self.own[..bytes];
        let shared = self.view.as_ptr();
        match work {
            Work::Write => self.view.write_at(0, own).expect("a write"),
            Work::Read => self.view.read_at(0, own).expect("a read"),
            Work::Fill => self.view.fill(0, bytes as u64, 7).expect("a fill"),
            Work::ParallelWrite => (self.parallel.write_at(self.view, 0, own)).expect("a write"),
            Work::ParallelRead => (self.parallel.read_at(self.view, 0, own)).expect("a read"),
            Work::ParallelFill => {
                (self.parallel.fill(self.view, 0, bytes as u64, 7)).expect("a fill");
            }
            // SAFETY: the view has so many bytes, and no other code uses them.
            Work::LibcWrite => unsafe {
                black_box(libc::memcpy(
                    shared.cast(),
                    own.as_ptr().cast(),
                    black_box(bytes),
                ));
            },
            // SAFETY: as above.
            Work::LibcRead => unsafe {
                black_box(libc::memcpy(
                    own.as_mut_ptr().cast(),
                    shared.cast(),
                    black_box(bytes),
                ));
            },
            // SAFETY: as above.
            Work::LibcFill => unsafe {
                black_box(libc::memset(shared.cast(), 7, black_box(bytes)));
            },
        }
    }
}
