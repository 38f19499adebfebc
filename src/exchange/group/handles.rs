//! Exporting a rank's own handles, and receiving all ranks' handles.

use std::os::fd::OwnedFd;

use super::agree::cut;
use super::member::Slot;
use crate::client::{attempt, came_with, fabric};
use crate::driver::{HandleType, ShareableHandle};
use crate::protocol::{Agreed, Handles, Member, Secret};
use crate::share::queue;
use crate::share::{Description, PartHandles, Shared};
use crate::text::{MAX_TEXT, bounded};
use crate::{Error, Result};

/// File descriptors that must remain free for the rest of the process.
const SPARE: u64 = 32;

/// How the memory of ranks is passed on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Passing {
    pub via: HandleType,
    /// Whether a rank passes the fds of many parts by a source, which is one fd.
    pub sources: bool,
}

impl Passing {
    pub const fn agreed(agreed: &Agreed) -> Self {
        Self {
            via: agreed.via,
            sources: agreed.sources,
        }
    }
}

/// Exports this rank's own memory.
pub(super) async fn export(
    memory: Option<Shared>,
    Passing { via, sources }: Passing,
) -> Result<(Vec<Secret>, Vec<OwnedFd>)> {
    let Some(memory) = memory else {
        return Ok((Vec::new(), Vec::new()));
    };
    if sources && via == HandleType::PosixFd && queue::is_needed(memory.part_count()) {
        let source = move || {
            // Whether the driver exports the memory at all is known before others wait for it.
            drop(memory.export_parts(0..1, via)?);
            queue::source(&memory)
        };
        let source = attempt("exporting memory", source).await??;
        return Ok((Vec::new(), vec![source]));
    }
    let handles = attempt("exporting memory", move || memory.export(via)).await??;
    let (mut fabric, mut fds) = (Vec::new(), Vec::new());
    for handle in handles {
        match handle {
            ShareableHandle::PosixFd(fd) => fds.push(fd),
            ShareableHandle::Fabric(handle) => fabric.extend(Secret::new(handle.expose_bytes())),
        }
    }
    Ok((fabric, fds))
}

/// Checks a page of members of a group of `size` ranks, and takes ownership of their handles.
///
/// # Errors
///
/// The page's fault, as text.
pub(super) fn take(
    via: HandleType,
    size: u32,
    members: Vec<Member>,
    fds: Vec<OwnedFd>,
    slots: &mut Vec<Slot>,
) -> Result<(), String> {
    let mut fds = fds.into_iter();
    for member in members {
        if slots.len() == size as usize {
            return Err("more members than the group's size".into());
        }
        let handles: Option<PartHandles> = match (&member.memory, member.handles) {
            (None, None) => Some(Vec::new().into()),
            (Some(memory), Some(handles)) => {
                let handles = own_handles(via, memory, handles, &mut fds);
                handles.filter(|_| memory.check().is_ok())
            }
            _ => None,
        };
        let Some(handles) = handles else {
            let rank = slots.len();
            return Err(format!("rank {rank} without a handle for each part"));
        };
        slots.push(Slot::new(tidy(&member.peer), member.memory, handles));
    }
    match fds.next() {
        Some(_) => Err("more fds than members have".into()),
        None => Ok(()),
    }
}

/// Returns a member's handles: one for each part of its memory, or none.
fn own_handles(
    via: HandleType,
    memory: &Description,
    handles: Handles,
    fds: &mut impl Iterator<Item = OwnedFd>,
) -> Option<PartHandles> {
    let parts = memory.parts.len();
    match (via, handles) {
        (HandleType::Fabric, Handles::Fabric(secrets)) if secrets.len() == parts => {
            fabric(&secrets).map(PartHandles::from)
        }
        (HandleType::PosixFd, Handles::Fds(own)) if own.count as usize <= parts => {
            came_with(own, fds.take(own.count as usize).collect(), parts)
        }
        _ => None,
    }
}

/// Whether this process may open `more` further file descriptors. Past the limit, the kernel would drop the
/// excess ones.
pub(super) fn enough_fds(more: u64) -> Result<()> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |list| list.count() as u64);
    match limit {
        Some(limit) if open + more + SPARE > limit => Err(Error::LimitReached {
            what: "open files (RLIMIT_NOFILE), too few for a file descriptor of every rank",
            limit,
        }),
        _ => Ok(()),
    }
}

/// Returns a peer's text, cut and with control characters escaped.
pub(super) fn tidy(text: &str) -> String {
    bounded(cut(text), MAX_TEXT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Access, NodeId};
    use crate::protocol::Fds;
    use crate::{Buffer, Driver, Machine};

    fn member(parts: u32, handles: Option<Handles>) -> Member {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let buffer = Buffer::on(NodeId(0)).bytes(1).shareable();
        let buffer = Shared::from(buffer.allocate(&driver).unwrap());
        let memory = buffer.describe(Access::ReadWrite).unwrap();
        Member {
            bytes: None,
            peer: "a\nb".into(),
            memory: (parts > 0).then_some(memory),
            handles,
        }
    }

    fn fds(count: usize) -> Vec<OwnedFd> {
        let fd = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        (0..count).map(|_| fd()).collect()
    }

    fn fabric(bytes: usize) -> Option<Handles> {
        Some(Handles::Fabric(vec![
            Secret::new(&[7; 64][..bytes]).unwrap(),
        ]))
    }

    fn count(count: u32) -> Option<Handles> {
        Some(Handles::Fds(Fds::of(count)))
    }

    #[test]
    fn each_part_has_a_handle() {
        let mut slots = Vec::new();
        let members = vec![member(1, count(1)), member(0, None), member(1, count(1))];
        assert_eq!(
            take(HandleType::PosixFd, 4, members, fds(2), &mut slots),
            Ok(())
        );
        assert_eq!((slots.len(), slots[0].peer()), (3, "a\\nb"));
        let members = vec![member(1, fabric(64))];
        assert_eq!(
            take(HandleType::Fabric, 4, members, fds(0), &mut slots),
            Ok(())
        );
    }

    #[test]
    fn a_page_that_cannot_be_right_is_refused() {
        let fd = HandleType::PosixFd;
        for (via, members, given, wrong) in [
            (fd, vec![member(1, count(1))], 0, "rank 0"),
            (fd, vec![member(1, count(2))], 2, "rank 0"),
            (fd, vec![member(1, None)], 0, "rank 0"),
            (fd, vec![member(0, count(1))], 1, "rank 0"),
            (fd, vec![member(1, fabric(64))], 0, "rank 0"),
            (fd, vec![member(1, count(1))], 2, "more fds"),
            (HandleType::Fabric, vec![member(1, fabric(63))], 0, "rank 0"),
            (HandleType::Fabric, vec![member(1, count(1))], 1, "rank 0"),
            (
                fd,
                vec![member(0, None), member(0, None)],
                0,
                "more members",
            ),
        ] {
            let error = take(via, 1, members, fds(given), &mut Vec::new()).unwrap_err();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
