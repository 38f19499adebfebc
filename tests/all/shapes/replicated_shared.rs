//! Replicated data that other processes read: both ends in one process, and readers that are killed and stopped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use egmem::driver::sim::PeerAccess;
use egmem::driver::{Access, Call, Code, Location, NodeId};
use egmem::shapes::Replicated;
use egmem::shapes::replicated::ReplicatedView;
use egmem::share::{self, Channel, ImportOptions, Shared};
use egmem::{Buffer, Driver, Error, Growth, Machine, Stream};
use egmem_tests::drivers::is_cuda_required;

use crate::shapes::ring::soon;
use crate::shapes::ring_shared::channels;
use crate::shapes::stage::{Part, Stage, deaths, driver};
use crate::shapes::{MIB, node, nothing_held};

/// More than a granule.
const LEN: usize = 300_000;
const LATER: Duration = Duration::from_secs(600);

fn values(epoch: u64) -> Vec<u64> {
    vec![epoch; LEN]
}

/// GPU 0 and its host node.
fn places(driver: &Driver) -> [Location; 2] {
    [Location::Device(0), node(driver).into()]
}

fn data(driver: &Driver) -> Replicated<u64> {
    let options = Replicated::on(places(driver)).shareable();
    options.create(driver, &values(1)).unwrap()
}

fn view(driver: &Driver, data: &Replicated<u64>) -> ReplicatedView<u64> {
    let (mut channel, mut others) = channels();
    data.share(&mut channel).unwrap();
    ReplicatedView::receive(driver, &mut others, ImportOptions::new()).unwrap()
}

fn is_held(error: &Error) -> bool {
    matches!(error, Error::StillHeld { holders, .. } if holders.iter().any(|who| who.contains("process")))
}

pub fn another_process_reads_every_version(driver: &Driver) {
    let data = data(driver);
    let view = view(driver, &data);
    assert_eq!((view.len(), view.epoch()), (LEN, 1));
    let stream = Stream::new(driver, 0).unwrap();
    let seen = Buffer::near(driver, 0, (LEN * 8) as u64).unwrap();
    for epoch in 1..6 {
        if epoch > 1 {
            assert_eq!(data.publish(&values(epoch)), Ok(epoch));
        }
        for place in places(driver) {
            let replica = view.local(place).unwrap();
            assert_eq!((replica.epoch(), replica.location()), (epoch, place));
            stream
                .copy(&seen, 0, &replica, 0, (LEN * 8) as u64)
                .unwrap();
            for index in [0, LEN / 2, LEN - 1] {
                assert_eq!(seen.get(8 * index as u64), Ok(epoch), "{place}");
            }
        }
        let refused = stream.copy(&view.local(Location::Device(0)).unwrap(), 0, &seen, 0, 8);
        assert!(
            matches!(refused, Err(Error::NotAccessible { .. })),
            "{refused:?}"
        );
    }
    assert!(!view.is_alone());
    // What was read last stays.
    let replica = view.local(node(driver)).unwrap();
    drop(data);
    assert!(view.is_alone());
    assert_eq!(
        (replica.get(7), view.local(node(driver)).unwrap().get(8)),
        (Ok(5), Ok(5))
    );
    drop((view, replica, stream, seen));
    nothing_held(driver);
}

pub fn a_version_that_another_process_reads_stays(driver: &Driver) {
    let data = data(driver);
    let (first, second) = (view(driver, &data), view(driver, &data));
    let old = first.local(node(driver)).unwrap();
    let more = old.clone();
    assert_eq!(data.publish(&values(2)), Ok(2));
    for replica in [old, more] {
        assert!(is_held(&data.publish(&values(3)).unwrap_err()));
        assert_eq!((replica.epoch(), replica.get(LEN - 1)), (1, Ok(1)));
    }
    assert_eq!(data.publish(&values(3)), Ok(3));
    // Newer replicas are in nobody's way, and a view that goes with its replica is not waited for.
    let new = second.local(node(driver)).unwrap();
    assert_eq!((new.epoch(), data.publish(&values(4))), (3, Ok(4)));
    assert!(is_held(&data.publish(&values(5)).unwrap_err()));
    let waiting = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| data.publish_within(&values(5), LATER));
        drop((new, second));
        waiting.join().unwrap()
    });
    assert_eq!(
        (waiting, first.local(node(driver)).unwrap().epoch()),
        (Ok(5), 5)
    );
}

pub fn gpu_work_of_another_process_reads_its_version(driver: &Driver) {
    let data = data(driver);
    let view = view(driver, &data);
    let stream = Stream::new(driver, 0).unwrap();
    let seen = Buffer::near(driver, 0, (LEN * 8) as u64).unwrap();
    let replica = view.local(Location::Device(0)).unwrap();
    // SAFETY: `release_after` keeps the version until the copy has run, and `seen` lives until then.
    unsafe { stream.copy_async(seen.device_ptr(), replica.device_ptr(), (LEN * 8) as u64) }
        .unwrap();
    if let Some(sim) = driver.sim() {
        sim.fail(Call::EventQuery, 1, Code::NOT_READY);
    }
    replica.release_after(&stream).unwrap();
    assert_eq!(data.publish(&values(2)), Ok(2));
    let mut is_waited_for = false;
    while let Err(error) = data.publish(&values(3)) {
        assert!(is_held(&error), "{error}");
        is_waited_for = true;
        // The other process says that the work has ended when it looks.
        assert_eq!(view.local(node(driver)).unwrap().epoch(), 2);
    }
    assert!(is_waited_for || !driver.is_simulated());
    stream.synchronize().unwrap();
    assert_eq!(
        (seen.get(0), seen.get(8 * (LEN as u64 - 1))),
        (Ok(1_u64), Ok(1_u64))
    );
}

/// Two readers take versions while they are replaced as fast as it goes.
pub fn no_reader_elsewhere_sees_a_torn_version(driver: &Driver) {
    let data = data(driver);
    let views = [view(driver, &data), view(driver, &data)];
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for view in &views {
            let is_over = &is_over;
            scope.spawn(move || {
                let mut last = 0;
                while !is_over.load(Ordering::Relaxed) {
                    let replica = view.local(node(driver)).unwrap();
                    assert!(replica.epoch() >= last);
                    last = replica.epoch();
                    for index in [0, LEN - 1, fastrand::usize(0..LEN), LEN / 2] {
                        assert_eq!(replica.get(index), Ok(last), "{index}");
                    }
                }
            });
        }
        for epoch in 2..60 {
            assert_eq!(data.publish_within(&values(epoch), LATER), Ok(epoch));
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

/// A reader whose words say anything is waited for until it is gone; a publisher whose epoch is anything is read safely.
pub fn a_reader_that_writes_garbage_is_waited_for(driver: &Driver) {
    let data = data(driver);
    let (mut channel, mut others) = channels();
    data.share(&mut channel).unwrap();
    others.receive_text(128).unwrap();
    let mut offers: Vec<_> = (0..5).map(|_| others.receive().unwrap()).collect();
    let control = offers.pop().unwrap().import(driver, ImportOptions::new());
    let (control, link) = (control.unwrap(), others.receive_link().unwrap());
    control.fill(0xff).unwrap();
    assert_eq!(
        data.publish(&values(2)).map_err(|error| is_held(&error)),
        Err(true)
    );
    drop(link);
    assert_eq!(data.publish(&values(2)), Ok(2));

    // A publisher of one place, by hand.
    let (mut channel, mut others) = channels();
    channel.send_text("egmem-replicated 1 8 10 1").unwrap();
    let shared = [80, 80, 512].map(|bytes| memory(driver, bytes));
    for memory in &shared {
        channel.send(memory, Access::ReadWrite).unwrap();
    }
    let _link = channel.send_link().unwrap();
    let options = ImportOptions::new();
    let view = ReplicatedView::<u64>::receive(driver, &mut others, options).unwrap();
    shared[1].put_word(72, 7).unwrap();
    for word in [u64::MAX, 0, 1 << 63, 77] {
        shared[2].put_word(0, word).unwrap();
        let replica = view.local(node(driver)).unwrap();
        assert_eq!((replica.epoch(), view.epoch()), (word, word));
        assert_eq!(replica.get(9), Ok(7 * (word & 1)));
        assert_eq!(shared[2].word(128 * (1 + (word & 1))), Ok(1));
        drop(replica);
        assert_eq!(shared[2].word(128 * (1 + (word & 1))), Ok(0));
    }
}

fn memory(driver: &Driver, bytes: u64) -> Shared {
    let buffer = Buffer::on(node(driver)).bytes(bytes).shareable();
    buffer.allocate(driver).unwrap().into()
}

pub fn data_that_cannot_be_are_not_received(driver: &Driver) {
    let (mut channel, mut others) = channels();
    let options = Replicated::on(places(driver));
    let error = options
        .create(driver, &values(1))
        .unwrap()
        .share(&mut channel)
        .unwrap_err();
    assert!(
        matches!(error, share::Error::Memory(Error::InvalidArgument { .. })),
        "{error}"
    );
    for (text, sizes, is_right) in [
        ("8 10 1", [80, 80, 512], true),
        ("4 10 1", [40, 40, 512], false),
        ("8 10 1", [80, 88, 512], false),
        ("8 10 1", [80, 80, 511], false),
        ("8 18446744073709551615 1", [80, 80, 512], false),
    ] {
        channel
            .send_text(&format!("egmem-replicated 1 {text}"))
            .unwrap();
        for bytes in sizes {
            channel
                .send(&memory(driver, bytes), Access::ReadWrite)
                .unwrap();
        }
        channel.send_link().unwrap();
        let options = ImportOptions::new();
        let view = ReplicatedView::<u64>::receive(driver, &mut others, options);
        assert_eq!(view.is_ok(), is_right, "{text}: {view:?}");
    }
    for text in [
        "",
        "egmem-replicated 1 8 0 1",
        "egmem-replicated 1 8 10 0",
        "egmem-replicated 1 8 10 257",
        "egmem-replicated 1 8 10 1 1",
        "egmem-replicated 1 8 10 1 ?",
        "egmem-replicated 18 10 1",
        "egmem-replicated 1 8 10  1",
    ] {
        channel.send_text(text).unwrap();
        let options = ImportOptions::new();
        let error = ReplicatedView::<u64>::receive(driver, &mut others, options).unwrap_err();
        assert!(
            matches!(error, share::Error::Memory(Error::InvalidArgument { .. })),
            "{error}"
        );
    }
    nothing_held(driver);
}

fn view_for(
    driver: &Driver,
    data: &Replicated<u64>,
    options: ImportOptions,
) -> ReplicatedView<u64> {
    let (mut channel, mut others) = channels();
    data.share(&mut channel).unwrap();
    ReplicatedView::receive(driver, &mut others, options).unwrap()
}

fn is_denied<T: std::fmt::Debug>(result: egmem::Result<T>) -> bool {
    matches!(result, Err(Error::NotAccessible { .. }))
}

#[test]
fn readers_get_copies_that_the_options_allow() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let [own, other, third] = [0, 1, 2].map(Location::Device);
    let data = data(&driver);
    let view = view_for(&driver, &data, ImportOptions::new().access_by([other]));
    for (who, at) in [(other, own), (Location::Host, node(&driver).into())] {
        assert_eq!(view.local(who).unwrap().location(), at, "{who}");
    }
    assert!(is_denied(view.local(own)) && is_denied(view.local(third)));
    let options = ImportOptions::new().access_by([other]);
    let view = view_for(&driver, &data, options.access(Location::Host, Access::None));
    assert!(is_denied(view.local(Location::Host)) && is_denied(view.local(node(&driver))));
    assert_eq!(view.local(other).unwrap().location(), own);
}

/// Without peer access a GPU that the options name reads the copies that it reaches; copies that nobody here reads are in
/// nobody's way.
#[test]
fn copies_out_of_reach_are_left_out() {
    let mut machine = Machine::h200x8();
    machine.nvlink = PeerAccess::None;
    machine.peer_access = PeerAccess::None;
    let driver = Driver::simulated(machine).unwrap();
    let [own, other] = [0, 1].map(Location::Device);
    let data = data(&driver);
    let view = view_for(&driver, &data, ImportOptions::new().access_by([own, other]));
    for (who, at) in [(own, own), (other, node(&driver).into())] {
        assert_eq!(view.local(who).unwrap().location(), at, "{who}");
    }
    let view = view_for(&driver, &data, ImportOptions::new().access_by([other]));
    assert!(is_denied(view.local(own)));
    assert_eq!(view.local(other).unwrap().location(), node(&driver).into());
}

/// A message that breaks off closes the channel at both ends: what comes next would be taken for the rest.
#[test]
fn half_a_message_closes_the_channel() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let sim = driver.sim().unwrap();
    let data = data(&driver);
    for failing in 1..=5 {
        let (mut channel, mut others) = channels();
        let (call, code) = (Call::MemExportToShareableHandle, Code::OUT_OF_MEMORY);
        sim.fail(call, failing, code);
        // Buffers may keep the handles that they exported before.
        if data.share(&mut channel).is_err() {
            assert!(is_closed(&channel.send_text("")));
            let options = ImportOptions::new();
            let view = ReplicatedView::<u64>::receive(&driver, &mut others, options);
            assert!(is_closed(&view), "{view:?}");
        } else {
            assert!(sim.cancel_all() == 1 && failing > 1);
        }
    }
    let (mut channel, mut others) = channels();
    others.set_timeout(Duration::from_millis(1));
    let receive = |channel: &mut Channel| {
        ReplicatedView::<u64>::receive(&driver, channel, ImportOptions::new())
    };
    let early = receive(&mut others);
    assert!(
        matches!(early, Err(share::Error::TimedOut { .. })),
        "{early:?}"
    );
    channel.send_text("egmem-replicated 1 8 10 1").unwrap();
    // The time may end before the text is read, and after that.
    let end = soon();
    while !is_closed(&receive(&mut others)) {
        assert!(Instant::now() < end, "it waits for the text again");
    }
    assert!(is_closed(&channel.send_text("")));
}

fn is_closed<T>(result: &share::Result<T>) -> bool {
    matches!(result, Err(share::Error::PeerLost { .. }))
}

/// A sender may wait until the fds of a large table are taken: each copy is imported before the next comes.
#[test]
fn copies_are_imported_as_they_come() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let sim = driver.sim().unwrap();
    let (mut channel, mut others) = channels();
    let shared = [80, 80, 512].map(|bytes| memory(&driver, bytes));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            channel.send_text("egmem-replicated 1 8 10 1").unwrap();
            let end = soon();
            for (imports, memory) in shared.iter().enumerate() {
                while sim.count(Call::MemImportFromShareableHandle) < imports as u64 {
                    assert!(Instant::now() < end, "it waits for more");
                    std::thread::yield_now();
                }
                channel.send(memory, Access::ReadWrite).unwrap();
            }
            channel.send_link().unwrap();
        });
        let options = ImportOptions::new();
        let view = ReplicatedView::<u64>::receive(&driver, &mut others, options).unwrap();
        assert_eq!(view.len(), 10);
    });
}

/// Copies of more parts than fds come with one message.
#[test]
fn copies_of_many_parts_are_received() {
    const PART: u64 = 2 << 20;
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let (mut channel, mut others) = channels();
    let bytes = 40 * PART;
    let many = Buffer::on(node(&driver)).bytes(bytes).shareable();
    let many = many.growth(Growth::steady().chunk(PART));
    let [first, second] = [(); 2].map(|()| many.clone().allocate(&driver).unwrap());
    assert_eq!(first.physical().len(), 40);
    second.put(bytes - 8, 7_u64).unwrap();
    let control = memory(&driver, 512);
    control.put_word(0, 1).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let text = format!("egmem-replicated 1 8 {} 1", bytes / 8);
            channel.send_text(&text).unwrap();
            for memory in [first.into(), second.into(), control] {
                channel.send(&memory, Access::ReadWrite).unwrap();
            }
            channel.send_link().unwrap();
        });
        let options = ImportOptions::new();
        let view = ReplicatedView::<u64>::receive(&driver, &mut others, options).unwrap();
        let replica = view.local(node(&driver)).unwrap();
        assert_eq!(
            (replica.epoch(), replica.get(bytes as usize / 8 - 1)),
            (1, Ok(7))
        );
    });
}

#[test]
fn readers_that_have_ended_hold_nothing() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let data = data(&driver);
    drop(view(&driver, &data));
    let held = driver.sim().unwrap().held();
    for _ in 0..3 {
        drop(view(&driver, &data));
    }
    assert_eq!(driver.sim().unwrap().held(), held);
}

/// A lost GPU reads nothing any more. Where there is another, the stream may have waited for its work, which goes on: only a
/// wait for all of them tells. The publisher's data are on a node alone, so it needs no GPU.
#[test]
fn a_lost_gpu_holds_no_version_where_it_is_the_only_one() {
    for (machine, gpus) in [(Machine::gh200(), 1), (Machine::h200x8(), 8)] {
        let driver = Driver::simulated(machine).unwrap();
        let sim = driver.sim().unwrap();
        let options = Replicated::on([node(&driver)]).shareable();
        let data = options.create(&driver, &values(1)).unwrap();
        let view = view(&driver, &data);
        let stream = Stream::new(&driver, 0).unwrap();
        let replica = view.local(Location::Device(0)).unwrap();
        sim.fail(Call::EventQuery, 1, Code::NOT_READY);
        replica.release_after(&stream).unwrap();
        assert_eq!(data.publish(&values(2)), Ok(2));
        assert!(is_held(&data.publish(&values(3)).unwrap_err()));
        let read_only = Buffer::on(node(&driver)).access(Location::Device(0), Access::Read);
        let read_only = read_only.bytes(MIB).allocate(&driver).unwrap();
        // SAFETY: the memory outlives the work, which faults.
        unsafe { stream.memset_async(read_only.device_ptr(), 1, 8) }.unwrap();
        assert!(matches!(
            stream.synchronize(),
            Err(Error::ContextLost { .. })
        ));
        assert_eq!(view.local(node(&driver)).unwrap().epoch(), 2);
        if gpus > 1 {
            assert!(is_held(&data.publish(&values(3)).unwrap_err()));
            let before = sim.count(Call::CtxSynchronize);
            drop(view);
            assert_eq!(sim.count(Call::CtxSynchronize) - before, gpus);
        }
        assert_eq!(data.publish(&values(3)), Ok(3));
    }
}

#[test]
fn data_are_shared_also_if_the_first_node_has_no_memory() {
    let mut machine = Machine::gh200x4();
    machine.nodes[0].cpus.clear();
    let driver = Driver::simulated(machine).unwrap();
    for place in [Location::Device(1), NodeId(1).into()] {
        let options = Replicated::on([place]).shareable();
        let data = options.create(&driver, &values(1)).unwrap();
        let view = view(&driver, &data);
        assert_eq!(data.publish(&values(2)), Ok(2));
        assert_eq!(view.epoch(), 2);
        drop((view, data));
        nothing_held(&driver);
    }
}

/// Reads versions until it is killed; says which it reads.
#[test]
fn child() {
    let Some(mut part) = Part::of_this_process() else {
        return;
    };
    let (driver, options) = (part.driver.clone(), ImportOptions::new());
    let view = ReplicatedView::<u64>::receive(&driver, &mut part.channel, options).unwrap();
    let node = node(&driver);
    while !view.is_alone() {
        let replica = view.local(node).unwrap();
        let epoch = replica.epoch();
        part.say(epoch);
        for index in [0, LEN - 1, fastrand::usize(0..LEN)] {
            assert_eq!(replica.get(index), Ok(epoch));
        }
    }
}

/// Readers are killed, and some were stopped before: what they had is free again, and no version is torn.
#[test]
fn killed_readers_hold_nothing() {
    let driver = driver();
    let data = data(&driver);
    let stage = Stage::new(&driver, module_path!());
    let mut epoch = 1;
    for death in 0..deaths(if is_cuda_required() { 5 } else { 20 }) {
        let (mut reader, mut channel) = stage.start("read", 0);
        data.share(&mut channel).unwrap();
        while stage.word() == 0 {
            std::thread::yield_now();
        }
        for _ in 0..fastrand::u64(1..4) {
            epoch += 1;
            assert_eq!(data.publish_within(&values(epoch), LATER), Ok(epoch));
        }
        if death % 2 == 1 {
            reader.signal(libc::SIGSTOP);
            // It may have stopped with a version of which the second next cannot be written.
            for _ in 0..3 {
                match data.publish(&values(epoch + 1)) {
                    Ok(_) => epoch += 1,
                    Err(error) => assert!(is_held(&error), "{error}"),
                }
            }
        }
        reader.kill();
        for _ in 0..2 {
            epoch += 1;
            assert_eq!(data.publish_within(&values(epoch), LATER), Ok(epoch));
        }
    }
}
