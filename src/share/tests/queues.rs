//! Memory with more parts than fds may come with a message.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use super::*;
use crate::queue::{self, BATCH, MAX_WITH_MESSAGE};
use crate::shared::MAX_KEPT;
use crate::{Channel, PartHandles, Peers};
use egmem_core::Growth;

const PART: u64 = 2 * MIB;

/// A buffer that was created in `parts` chunks; each begins with its number.
fn in_parts(driver: &Driver, parts: usize) -> Shared {
    let options = Buffer::on(NodeId(0)).bytes(parts as u64 * PART).shareable();
    let options = options.growth(Growth::steady().chunk(PART));
    let buffer = options.allocate(driver).unwrap();
    assert_eq!(buffer.physical().len(), parts);
    for part in 0..parts as u64 {
        buffer.put(part * PART, part).unwrap();
    }
    buffer.into()
}

fn channels() -> (Channel, Channel) {
    let (one, other) = UnixStream::pair().unwrap();
    let channel = |stream| Channel::new(stream, &Peers::same_user()).unwrap();
    (channel(one), channel(other))
}

#[track_caller]
fn has_all_parts(imported: &crate::ImportedBuffer, parts: usize) {
    for part in 0..parts as u64 {
        assert_eq!(imported.get::<u64>(part * PART).unwrap(), part);
    }
}

/// Drivers count exports that are open: see docs/driver-behaviour.md.
#[test]
fn a_few_fds_are_kept_and_the_others_exported_again() {
    let driver = driver();
    let exports = |shared: &Shared| {
        let before = count(&driver, Call::MemExportToShareableHandle);
        assert_eq!(fds(shared).len(), shared.part_count());
        count(&driver, Call::MemExportToShareableHandle) - before
    };
    let few = in_parts(&driver, MAX_KEPT);
    let all = MAX_KEPT as u64;
    assert_eq!([exports(&few), exports(&few)], [all, 0]);
    let one = in_parts(&driver, 1);
    assert_eq!([exports(&one), exports(&one)], [1, 0]);
    // The oldest is closed for it.
    assert_eq!(exports(&few), all, "each makes room for the next");
    let more = in_parts(&driver, MAX_KEPT + 1);
    assert_eq!([exports(&more), exports(&more)], [all + 1, all + 1]);
    drop(more);
    assert_eq!([exports(&few), exports(&few)], [all, 0]);
}

#[test]
fn batches_are_all_parts_in_order() {
    for parts in [0, 1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH, 4096] {
        let batches: Vec<_> = queue::batches(parts).collect();
        assert!(
            batches
                .iter()
                .all(|batch| (1..=BATCH).contains(&batch.len()))
        );
        let all: Vec<_> = batches.into_iter().flatten().collect();
        assert_eq!(all, (0..parts).collect::<Vec<_>>());
    }
}

#[test]
fn buffers_around_the_borders_arrive_whole() {
    let driver = driver();
    let before = held(&driver);
    let borders = [
        1,
        2,
        MAX_WITH_MESSAGE,
        MAX_WITH_MESSAGE + 1,
        3 * BATCH,
        3 * BATCH + 1,
        100,
    ];
    for parts in borders {
        let shared = in_parts(&driver, parts);
        let (mut from, mut to) = channels();
        from.send(&shared, Access::ReadWrite).unwrap();
        let offer = to.receive().unwrap();
        assert_eq!(offer.description().parts.len(), parts);
        // All that is here already is the queue.
        let queued = parts > MAX_WITH_MESSAGE;
        assert_eq!(offer.handles.here().is_empty(), queued, "{parts}");
        has_all_parts(&offer.import(&driver, ours()).unwrap(), parts);
        // The channel goes on.
        from.send(&shared, Access::Read).unwrap();
        let (description, handles) = to.receive().unwrap().into_parts();
        assert_eq!(handles.len(), parts);
        let imported = ours().import(&driver, &description, handles).unwrap();
        has_all_parts(&imported, parts);
    }
    assert_eq!(held(&driver), before);
}

#[test]
fn what_is_not_imported_leaves_nothing_and_the_channel_goes_on() {
    let driver = driver();
    let shared = in_parts(&driver, 100);
    let (mut from, mut to) = channels();
    let before = held(&driver);
    // Not wanted at all.
    from.send(&shared, Access::Read).unwrap();
    drop(to.receive().unwrap());
    // The driver refuses a part in the middle.
    for nth in [1, 50, 100] {
        from.send(&shared, Access::Read).unwrap();
        let offer = to.receive().unwrap();
        let sim = driver.sim().unwrap();
        sim.fail(Call::MemImportFromShareableHandle, nth, Code::UNKNOWN);
        let error = offer.import(&driver, ours()).unwrap_err();
        assert_eq!(error.code(), Some(Code::UNKNOWN), "{error}");
        assert_eq!(held(&driver), before, "{nth}");
    }
    from.send(&shared, Access::Read).unwrap();
    has_all_parts(&to.receive().unwrap().import(&driver, ours()).unwrap(), 100);
}

#[test]
fn a_driver_that_exports_nothing_is_told_of_before_anything_is_sent() {
    let driver = driver();
    let shared = in_parts(&driver, 40);
    let (mut from, mut to) = channels();
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemExportToShareableHandle, 1, Code::UNKNOWN);
    from.send(&shared, Access::Read).unwrap_err();
    from.send(&shared, Access::Read).unwrap();
    has_all_parts(&to.receive().unwrap().import(&driver, ours()).unwrap(), 40);
}

fn send(queue: &UnixStream, batch: &[ShareableHandle]) {
    use std::os::fd::AsFd;
    let fds = crate::fd::all_posix(batch).unwrap();
    crate::fd::try_send(queue.as_fd(), &[0], &fds).unwrap();
}

/// Imports a memory of `parts` parts from a queue that `fill` fills.
fn from_queue(driver: &Driver, parts: usize, fill: impl FnOnce(UnixStream, &Shared)) -> Error {
    let shared = in_parts(driver, parts);
    let description = shared.describe(Access::Read).unwrap();
    let before = held(driver);
    let (queue, theirs) = queue::pair().unwrap();
    fill(queue, &shared);
    let handles = PartHandles::from_queue(theirs);
    let imported = ours().import_from(driver, &description, handles);
    let error = imported.unwrap_err();
    assert_eq!(held(driver), before);
    error
}

#[test]
fn an_importer_that_wants_no_more_is_lost() {
    let (queue, theirs) = queue::pair().unwrap();
    drop(theirs);
    let shared = in_parts(&driver(), 40);
    let error = queue::fill(&queue, &shared, "it", crate::DEFAULT_TIMEOUT).unwrap_err();
    assert!(matches!(error, crate::Error::PeerLost { .. }), "{error}");
}

#[test]
fn a_queue_that_ends_early_or_lies_is_an_error_and_leaves_nothing() {
    use std::io::Write;

    let driver = driver();
    let batch =
        |shared: &Shared, count| shared.export_parts(0..count, HandleType::PosixFd).unwrap();
    let ended = from_queue(&driver, 40, |_, _| {});
    let half = from_queue(&driver, 40, |queue, shared| {
        send(&queue, &batch(shared, BATCH));
    });
    let none = from_queue(&driver, 40, |mut queue, _| queue.write_all(&[0]).unwrap());
    for error in [ended, half, none] {
        assert!(matches!(error, Error::System { .. }), "{error}");
        assert!(error.to_string().contains("ended"), "{error}");
    }
    // More in one message than a batch.
    let many = from_queue(&driver, 40, |queue, shared| {
        send(&queue, &batch(shared, BATCH + 1));
    });
    assert!(many.to_string().contains("more file descriptors"), "{many}");
    // More than parts.
    let last = from_queue(&driver, BATCH + 1, |queue, shared| {
        send(&queue, &batch(shared, BATCH));
        send(&queue, &batch(shared, 2));
    });
    assert!(last.to_string().contains("more file descriptors"), "{last}");
    // An fd that is no memory's.
    let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let error = from_queue(&driver, 40, |queue, _| {
        let wrong = ShareableHandle::PosixFd(file);
        send(&queue, &[wrong]);
    });
    assert!(error.code().is_some(), "{error}");
}
