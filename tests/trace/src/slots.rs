//! The dependencies of an operation.

use super::addr::{Memory, Slot};
use super::op::{Op, Source};

/// A kind of slot with its number, to find the dependencies of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub enum SlotRef {
    Handle(Slot),
    Memory(Memory),
    Exported(Slot),
    Pool(Slot),
    Stream(Slot),
    Event(Slot),
}

impl Op {
    /// The slots that the operation names.
    pub fn slots(&self) -> Vec<SlotRef> {
        use SlotRef::{Event, Exported, Handle, Memory as Mem, Pool, Stream};
        let on = |stream: &Option<Slot>, mut slots: Vec<SlotRef>| {
            slots.extend(stream.map(Stream));
            slots
        };
        match self {
            Self::DeviceAttribute { .. }
            | Self::DeviceQuery { .. }
            | Self::CanAccessPeer { .. }
            | Self::Granularity { .. }
            | Self::DevicePool { .. } => Vec::new(),
            Self::Create { out: handle, .. }
            | Self::Release { handle, .. }
            | Self::Properties { handle } => vec![Handle(*handle)],
            Self::Reserve { out, hint, .. } => {
                let mut slots = vec![Mem(Memory::Range(*out))];
                slots.extend(hint.map(|hint| Mem(Memory::Range(hint))));
                slots
            }
            Self::AddressFree { range, .. } => vec![Mem(Memory::Range(*range))],
            Self::Map { at, handle, .. } => vec![Mem(at.of), Handle(*handle)],
            Self::Unmap { at, .. }
            | Self::SetAccess { at, .. }
            | Self::GetAccess { at, .. }
            | Self::PointerAttribute { at, .. }
            | Self::AddressRange { at }
            | Self::DmaBuf { at, .. }
            | Self::CpuWrite { at, .. }
            | Self::CpuRead { at, .. } => vec![Mem(at.of)],
            Self::Export { out, handle, .. } => vec![Exported(*out), Handle(*handle)],
            Self::Import { out, from } => match from {
                Source::Exported(fd) => vec![Handle(*out), Exported(*fd)],
                _ => vec![Handle(*out)],
            },
            Self::Retain { out, at } => vec![Handle(*out), Mem(at.of)],
            Self::Alloc { out: plain, .. }
            | Self::HostAlloc { out: plain, .. }
            | Self::FreePlain { plain, .. } => vec![Mem(Memory::Plain(*plain))],
            Self::PoolCreate { out: pool, .. }
            | Self::PoolDestroy { pool }
            | Self::PoolSet { pool, .. }
            | Self::PoolGet { pool, .. }
            | Self::PoolTrim { pool, .. }
            | Self::PoolSetAccess { pool, .. }
            | Self::PoolGetAccess { pool, .. }
            | Self::PoolExport { pool }
            | Self::SetDevicePool { pool, .. } => vec![Pool(*pool)],
            Self::PoolExportPointer { alloc } => vec![Mem(Memory::Pooled(*alloc))],
            Self::PoolAlloc {
                out, pool, stream, ..
            } => {
                let mut slots = vec![Mem(Memory::Pooled(*out))];
                slots.extend(pool.map(Pool));
                on(stream, slots)
            }
            Self::PoolFree { alloc, stream } => on(stream, vec![Mem(Memory::Pooled(*alloc))]),
            Self::StreamCreate { out: stream, .. } | Self::StreamDestroy { stream } => {
                vec![Stream(*stream)]
            }
            Self::StreamSynchronize { stream } | Self::StreamQuery { stream } => {
                on(stream, Vec::new())
            }
            Self::StreamWaitEvent { stream, event } | Self::EventRecord { event, stream } => {
                on(stream, vec![Event(*event)])
            }
            Self::EventCreate { out: event, .. }
            | Self::EventDestroy { event }
            | Self::EventSynchronize { event }
            | Self::EventQuery { event } => vec![Event(*event)],
            Self::EventElapsed { start, end } => vec![Event(*start), Event(*end)],
            Self::Memset { at, stream, .. }
            | Self::WriteKernel { at, stream, .. }
            | Self::CheckKernel { at, stream, .. }
            | Self::ReadKernel { at, stream, .. } => on(stream, vec![Mem(at.of)]),
            Self::Memcpy {
                dst, src, stream, ..
            } => on(stream, vec![Mem(dst.of), Mem(src.of)]),
        }
    }
}
