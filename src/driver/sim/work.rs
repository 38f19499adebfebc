//! Streams with the work that waits in them, events, and kernels.

use std::collections::{HashMap, VecDeque};

use super::share::Sharing;

/// A device and the driver's pointer: 0 is the device's default stream.
pub(super) type StreamKey = (i32, u64);

/// A position in a stream: after its `seq`-th piece of work.
pub(super) type Point = (StreamKey, u64);

#[derive(Debug, Default)]
pub(super) struct Stream {
    pub(super) queue: VecDeque<Work>,
    pub(super) submitted: u64,
    pub(super) completed: u64,
    /// Its handle was destroyed; the stream lives until its work is done.
    pub(super) destroyed: bool,
    /// For each other stream, the position that this one waits for.
    pub(super) waited: HashMap<StreamKey, u64>,
}

/// A piece of work, with the program's addresses: they are looked up when it runs, as on a GPU.
#[derive(Debug)]
pub(super) enum Work {
    Copy {
        dst: u64,
        src: u64,
        bytes: u64,
    },
    Fill {
        dst: u64,
        value: u8,
        bytes: u64,
    },
    Kernel {
        kernel: Kernel,
        args: [u64; 5],
    },
    Record,
    Wait(Point),
    /// Memory freed at this point returns to its pool.
    Free {
        pool: u64,
    },
}

/// A stream's part in a capture that has begun, in global mode.
#[derive(Debug)]
pub(super) struct Capture {
    /// The capture's number, which its streams and the events recorded on them share.
    pub(super) id: u64,
    /// Whether the capture began on the stream, or another of its streams has waited for this one since it was drawn in by a
    /// wait. The capture's end needs that.
    pub(super) is_joined: bool,
    /// Whether the stream and the legacy default stream wait for each other.
    pub(super) blocking: bool,
    /// Whether no call has disturbed it.
    pub(super) valid: bool,
}

/// An event: the position that it was recorded at, if any.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) device: i32,
    pub(super) timing: bool,
    pub(super) sharing: Sharing,
    pub(super) recorded: Option<Point>,
    /// The capture that its stream was part of when it was recorded.
    pub(super) captured: Option<u64>,
}

/// A kernel that the simulator can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    CheckRewrite,
    Read,
    Write,
}

/// A module's kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function {
    pub(super) device: i32,
    pub(super) module: u64,
    pub(super) kernel: Kernel,
}
