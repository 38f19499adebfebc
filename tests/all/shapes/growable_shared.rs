//! Growable vectors that another process maps and follows: here both ends are in one process.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use egmem::driver::{Access, Location};
use egmem::memory::{AccessChecks, Engine};
use egmem::proof::Prover;
use egmem::shapes::sharing::{Follower, GrowableExport, GrowableView};
use egmem::shapes::{Appender, Growable};
use egmem::share::{self, Channel, ImportOptions, Peers};
use egmem::{Buffer, Driver, Error, Stream};

use crate::shapes::{MIB, node, nothing_held};

fn vector(driver: &Driver) -> Growable<u64> {
    let options = Growable::on(node(driver)).max_len(8 << 20).step(2 * MIB);
    options.shareable().create(driver).unwrap()
}

fn channels() -> (Channel, Channel) {
    let (one, other) = UnixStream::pair().unwrap();
    let channel = |stream| {
        let mut channel = Channel::new(stream, &Peers::same_user()).unwrap();
        channel.set_timeout(Duration::from_secs(600));
        channel
    };
    (channel(one), channel(other))
}

fn follower(export: &GrowableExport<u64>, access: Access) -> (Follower, Channel) {
    let (one, other) = channels();
    (export.follower(one, access), other)
}

fn view(driver: &Driver, channel: &mut Channel) -> GrowableView<u64> {
    GrowableView::receive(driver, channel, ImportOptions::new()).unwrap()
}

fn why(result: Result<impl Sized, share::Error>) -> String {
    match result {
        Ok(_) => panic!("it went"),
        Err(error) => error.to_string(),
    }
}

/// Two followers, of which one comes later: both see all elements at addresses that never change.
pub fn a_view_follows_the_growth(driver: &Driver) {
    let mut vector = vector(driver);
    let mut export = GrowableExport::new(&vector);
    let (mut first, mut channel) = follower(&export, Access::ReadWrite);
    export.send(&vector, &mut first).unwrap();
    let mut early = view(driver, &mut channel);
    assert_eq!((early.len(), early.mapped_bytes()), (0, 0));
    let start = early.device_ptr();
    let mut late = None;
    let mut snapshots = Vec::new();
    for round in 0..5_u64 {
        // 2.4 MB more: one new chunk, sometimes two.
        vector.extend_from_slice(&vec![round; 300_000]).unwrap();
        export.send(&vector, &mut first).unwrap();
        let len = early.follow(&mut channel).unwrap();
        assert_eq!(len, vector.len());
        assert_eq!((early.device_ptr(), early.get(len - 1)), (start, Ok(round)));
        assert_eq!(early.mapped_bytes(), vector.mapped_bytes());
        snapshots.push(early.clone());
        if round == 2 {
            let (mut second, mut channel) = follower(&export, Access::Read);
            export.send(&vector, &mut second).unwrap();
            let view = view(driver, &mut channel);
            assert_eq!(view.len(), len);
            late = Some((second, channel, view));
        }
    }
    let (mut second, mut others, mut view) = late.unwrap();
    export.send(&vector, &mut second).unwrap();
    view.follow(&mut others).unwrap();
    // The same memory: the others read one process's writes.
    early.set(700_000, 77).unwrap();
    for index in [0, 299_999, 700_000, vector.len() - 1] {
        let expected = vector.get(index).unwrap();
        assert_eq!(
            (early.get(index), view.get(index)),
            (Ok(expected), Ok(expected))
        );
    }
    assert_eq!(vector.get(700_000), Ok(77));
    // Fewer elements, and nothing new.
    vector.truncate(10);
    export.send(&vector, &mut first).unwrap();
    assert_eq!(early.follow(&mut channel).unwrap(), 10);
    assert!(matches!(early.get(10), Err(Error::OutOfRange { .. })));
    let beyond = early.gpu_access(0, Engine::Copy, 72, 16);
    assert!(matches!(beyond, Err(Error::OutOfRange { size: 80, .. })));
    // Chunks that were sent stay, here and there.
    assert_eq!(vector.shrink_to_fit(), Ok(0));
    drop((vector, export, first, second, view, early));
    for (round, snapshot) in snapshots.iter().enumerate() {
        let last = snapshot.len() - 1;
        assert_eq!(
            (last, snapshot.get(last)),
            (300_000 * (round + 1) - 1, Ok(round as u64))
        );
    }
    drop(snapshots);
    nothing_held(driver);
}

/// More chunks than an update has come in several.
pub fn many_chunks_come_in_batches(driver: &Driver) {
    const CHUNKS: usize = 70;
    let step = (2 * MIB / 8) as usize;
    let options = Growable::<u64>::on(node(driver)).max_len(CHUNKS * step);
    let mut vector = options.step(2 * MIB).shareable().create(driver).unwrap();
    for chunk in 0..CHUNKS as u64 {
        vector.extend_unwritten(step).unwrap();
        vector.set(chunk as usize * step, chunk).unwrap();
    }
    let mut export = GrowableExport::new(&vector);
    let (mut to, mut channel) = follower(&export, Access::Read);
    let other = driver.clone();
    let receiver = std::thread::spawn(move || view(&other, &mut channel));
    export.send(&vector, &mut to).unwrap();
    let all = receiver.join().unwrap();
    assert_eq!((vector.chunks(), all.len()), (CHUNKS, CHUNKS * step));
    for chunk in 0..CHUNKS {
        assert_eq!(all.get(chunk * step), Ok(chunk as u64));
    }
    drop((all, export, to, vector));
    nothing_held(driver);
}

/// A GPU reads the elements that were there while more are added.
pub fn a_gpu_reads_a_view_while_it_follows(driver: &Driver) {
    let mut vector = vector(driver);
    vector.extend_from_slice(&[5; 400_000]).unwrap();
    let mut export = GrowableExport::new(&vector);
    let (mut to, mut channel) = follower(&export, Access::ReadWrite);
    export.send(&vector, &mut to).unwrap();
    let mut all = view(driver, &mut channel);
    let stream = Stream::new(driver, 0).unwrap();
    let seen = Buffer::near(driver, 0, 3_200_000).unwrap();
    let ticket = stream.start_copy((seen, 0), (all.clone(), 0), 3_200_000);
    vector.extend_from_slice(&[6; 400_000]).unwrap();
    export.send(&vector, &mut to).unwrap();
    all.follow(&mut channel).unwrap();
    let (seen, before) = ticket.unwrap().wait().unwrap();
    assert_eq!((before.len(), seen.get::<u64>(3_199_992)), (400_000, Ok(5)));
    Prover::new(driver, 0).unwrap().write(&all, 3).unwrap();
    drop((before, all, to, export));
    drop((vector, seen, stream));
    nothing_held(driver);
}

/// Another process reads the records of an appender that goes on.
pub fn collected_records_are_followed(driver: &Driver) {
    let options = Appender::<u64>::on(node(driver))
        .max_len(1 << 20)
        .step(2 * MIB);
    let mut appender = options.ahead(1).shareable().create(driver).unwrap();
    let mut export = GrowableExport::new(appender.records());
    let (mut to, mut channel) = follower(&export, Access::Read);
    export.send(appender.records(), &mut to).unwrap();
    let mut seen = view(driver, &mut channel);
    for round in 1..4_u64 {
        assert_eq!(appender.append(&[round; 200_000]), Ok(200_000));
        export.send(appender.records(), &mut to).unwrap();
        let len = seen.follow(&mut channel).unwrap();
        assert_eq!(len as u64, round * 200_000);
        assert_eq!((seen.get(0), seen.get(len - 1)), (Ok(1), Ok(round)));
    }
    assert!(appender.records().chunks() > 1);
    drop((seen, to, export, appender));
    nothing_held(driver);
}

/// A view that may only read writes nothing, neither by the CPU nor by a GPU.
pub fn a_reader_gets_no_right_to_write(driver: &Driver) {
    let mut vector = vector(driver);
    vector.push(1).unwrap();
    let mut export = GrowableExport::new(&vector);
    let (mut to, mut channel) = follower(&export, Access::Read);
    export.send(&vector, &mut to).unwrap();
    let view = view(driver, &mut channel);
    assert_eq!(view.get(0), Ok(1));
    let error = view.set(0, 2).unwrap_err();
    assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    let stream = Stream::new(driver, 0).unwrap();
    let error = stream.fill(&view, 0, 8, 1).unwrap_err();
    assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    // Asking for more than was allowed maps nothing.
    let (mut to, mut channel) = follower(&export, Access::Read);
    export.send(&vector, &mut to).unwrap();
    let options = ImportOptions::new().access(Location::Host, Access::ReadWrite);
    let refused = GrowableView::<u64>::receive(driver, &mut channel, options);
    assert!(refused.is_err());
    assert_eq!(vector.get(0), Ok(1));
}

/// A vector that may not be shared is not sent, and an update that does not fit is refused.
pub fn what_cannot_be_followed_is_refused(driver: &Driver) {
    let mut alone = Growable::<u64>::on(node(driver))
        .max_len(100)
        .create(driver)
        .unwrap();
    alone.push(1).unwrap();
    let mut export = GrowableExport::new(&alone);
    let (mut to, mut channel) = follower(&export, Access::Read);
    assert!(why(export.send(&alone, &mut to)).contains("shareable"));
    let mut vector = vector(driver);
    assert!(why(export.send(&vector, &mut to)).contains("not the one"));
    vector.push(2).unwrap();
    let mut export = GrowableExport::new(&vector);
    assert!(why(export.send(&vector, &mut to)).contains("follower"));
    channel.set_timeout(Duration::from_millis(1));
    let nothing = GrowableView::<u64>::receive(driver, &mut channel, ImportOptions::new());
    assert!(
        matches!(nothing, Err(share::Error::TimedOut { .. })),
        "{nothing:?}"
    );

    // An earlier export of the same addresses: its follower has other chunks.
    let mut earlier = GrowableExport::new(&vector);
    let (mut to, _channel) = follower(&earlier, Access::Read);
    earlier.send(&vector, &mut to).unwrap();
    vector.truncate(0);
    drop(earlier);
    vector.shrink_to_fit().unwrap();
    vector.push(2).unwrap();
    let (mut new, _new_channel) = follower(&export, Access::Read);
    export.send(&vector, &mut new).unwrap();
    assert!(why(export.send(&vector, &mut to)).contains("follower"));

    // Elements of another size.
    let (mut to, mut channel) = follower(&export, Access::Read);
    export.send(&vector, &mut to).unwrap();
    let other = GrowableView::<[u64; 2]>::receive(driver, &mut channel, ImportOptions::new());
    assert!(why(other).contains("8 bytes"));
    // Updates of a peer that does not keep to the rules.
    for (text, expected) in [
        ("hello", "kind of text"),
        ("egmem-growable 1 8 8388608 1 2097152 1 1", "too few"),
        ("egmem-growable 1 8 9999 0 0 0 0", "other sizes"),
        (
            "egmem-growable 1 8 8388608 8388609 2097152 0 0",
            "other sizes",
        ),
        ("egmem-growable 1 8 8388608 5 0 0 0", "missing"),
        (
            "egmem-growable 1 8 8388608 262145 2097152 0 0",
            "more elements",
        ),
    ] {
        let (mut to, mut channel) = follower(&export, Access::Read);
        export.send(&vector, &mut to).unwrap();
        let mut view = view(driver, &mut channel);
        assert_eq!(view.mapped_bytes(), 2 * MIB);
        to.channel().send_text(text).unwrap();
        let found = why(view.follow(&mut channel));
        assert!(found.contains(expected), "{text}: {found}");
        assert_eq!((view.len(), view.get(0)), (1, Ok(2)));
    }
    // More chunks than announced.
    let (mut to, mut channel) = follower(&export, Access::Read);
    export.send(&vector, &mut to).unwrap();
    let mut view = view(driver, &mut channel);
    let parts = [0, 1].map(|_| (node(driver).into(), 2 * MIB));
    let buffer = Buffer::in_parts(parts).shareable().allocate(driver);
    let text = "egmem-growable 1 8 8388608 1 2097152 1 0";
    to.channel().send_text(text).unwrap();
    let shared = share::Shared::from(buffer.unwrap());
    to.channel().send(&shared, Access::Read).unwrap();
    assert!(why(view.follow(&mut channel)).contains("another number"));
    assert_eq!(view.mapped_bytes(), 2 * MIB);
    drop((shared, view));

    let (mut one, mut other) = channels();
    let most = u64::MAX;
    let text = format!("egmem-growable 1 8 {most} 0 0 0 0");
    one.send_text(&text).unwrap();
    let endless = GrowableView::<u64>::receive(driver, &mut other, ImportOptions::new());
    assert!(why(endless).contains("addresses"));
    // Half an update: the chunk is missing.
    let (mut one, mut other) = channels();
    other.set_timeout(Duration::from_millis(1));
    one.send_text("egmem-growable 1 8 8388608 1 0 1 0").unwrap();
    let end = Instant::now() + Duration::from_secs(600);
    let receive =
        |channel: &mut Channel| GrowableView::<u64>::receive(driver, channel, ImportOptions::new());
    // The time may end before the text is read, and after that.
    while !matches!(receive(&mut other), Err(share::Error::PeerLost { .. })) {
        assert!(Instant::now() < end, "it waits for the text again");
    }
    drop((to, export, vector, alone));
    nothing_held(driver);
}
