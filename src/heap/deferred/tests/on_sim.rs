use super::*;
use crate::driver::{Call, Code, Location, NodeId};
use crate::{Buffer, Machine};

const BYTES: u64 = 2 << 20;

fn setup() -> (Driver, Buffer) {
    let driver = Driver::simulated(Machine::gh200x4()).unwrap();
    let topology = crate::Topology::discover(&driver).unwrap();
    let node = topology.gpus()[0].host_node().unwrap();
    let buffer = Buffer::on(node)
        .access_by(topology.gpus())
        .bytes(BYTES)
        .allocate(&driver)
        .unwrap();
    (driver, buffer)
}

/// Submits a fill of the `index`-th piece of the buffer to a stream.
fn fill(stream: &Stream, buffer: &Buffer, index: usize, byte: u8) {
    let at = buffer.device_ptr().add(64 * index as u64);
    // SAFETY: the buffer lives until the test has waited, and is read only through `CpuView`.
    unsafe { stream.memset_async(at, byte, 64) }.unwrap();
}

fn byte(buffer: &Buffer, index: usize) -> u8 {
    let mut bytes = [0_u8; 1];
    buffer.read_at(64 * index as u64, &mut bytes).unwrap();
    bytes[0]
}

#[test]
fn nothing_comes_back_before_its_work_has_run() {
    let (driver, buffer) = setup();
    let streams = [0, 0, 3].map(|device| Stream::new(&driver, device).unwrap());
    let mut deferred = Deferred::new(&driver, &Arc::default());
    for (i, stream) in streams.iter().enumerate() {
        fill(stream, &buffer, i, 7);
        deferred.after_one(stream, i).unwrap();
        fill(stream, &buffer, i, 9);
        assert_eq!(byte(&buffer, i), 0, "nobody has waited");
    }
    drop(streams);
    assert_eq!(poll(&mut deferred), [0, 1, 2]);
    // The simulator runs the work that is waited for, and no more.
    assert_eq!([0, 1, 2].map(|i| byte(&buffer, i)), [7; 3]);
}

#[test]
fn an_event_of_a_stream_that_waits_for_another_gpu() {
    let (driver, buffer) = setup();
    let [first, second] = [0, 3].map(|device| Stream::new(&driver, device).unwrap());
    fill(&first, &buffer, 0, 7);
    second.wait_for(&first).unwrap();
    fill(&second, &buffer, 1, 8);
    let event = Arc::new(Event::new(&driver, 3, false).unwrap());
    event.record(&second).unwrap();
    let mut deferred = Deferred::new(&driver, &Arc::default());
    deferred.after_event(Arc::clone(&event), 1).unwrap();
    assert_eq!(poll(&mut deferred), [1]);
    assert_eq!([0, 1].map(|i| byte(&buffer, i)), [7, 8]);
    assert_eq!(Arc::strong_count(&event), 1);
}

#[test]
fn an_event_that_another_process_can_record_is_refused() {
    let (driver, _buffer) = setup();
    let lent = Arc::new(Event::interprocess(&driver, 0).unwrap());
    let mut deferred = Deferred::new(&driver, &Arc::default());
    let error = deferred.after_event(Arc::clone(&lent), 1).unwrap_err();
    assert!(
        matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("stream"),
        "{error}"
    );
    assert_eq!((deferred.pending(), Arc::strong_count(&lent)), (0, 1));
}

#[test]
fn dropping_waits_and_gives_back_every_event() {
    let (driver, buffer) = setup();
    let sim = driver.sim().unwrap();
    let stream = Stream::new(&driver, 1).unwrap();
    let before = sim.held();
    let mut deferred = Deferred::new(&driver, &Arc::default());
    fill(&stream, &buffer, 0, 7);
    deferred.after_one(&stream, 0).unwrap();
    drop(deferred);
    assert_eq!(byte(&buffer, 0), 7);
    assert_eq!(sim.held(), before);
}

#[test]
fn each_call_is_made_to_fail_once() {
    let calls = [
        Call::StreamIsCapturing,
        Call::EventCreate,
        Call::EventRecord,
        Call::ThreadExchangeStreamCaptureMode,
        Call::EventQuery,
        Call::EventSynchronize,
        Call::EventDestroy,
    ];
    for (call, nth) in calls
        .into_iter()
        .flat_map(|call| (1..=4).map(move |n| (call, n)))
    {
        let (driver, buffer) = setup();
        let sim = driver.sim().unwrap();
        let streams = [0, 1].map(|device| Stream::new(&driver, device).unwrap());
        let held = sim.held();
        let mut deferred = Deferred::new(&driver, &Arc::default());
        let (mut freed, mut refused, mut passed) = (Vec::new(), Vec::new(), Vec::new());
        sim.fail(call, nth, Code::UNKNOWN);
        for (i, stream) in streams.iter().cycle().take(6).enumerate() {
            fill(stream, &buffer, i, 7);
            let result = match i {
                4 => {
                    let event = Event::new(&driver, 0, false);
                    let event = event.and_then(|event| event.record(stream).map(|()| event));
                    match event {
                        Ok(event) => deferred.after_event(Arc::new(event), i),
                        Err(error) => Err(error),
                    }
                }
                _ => deferred.after_one(stream, i),
            };
            match result {
                Ok(()) => freed.push(i),
                Err(_) => refused.push(i),
            }
            if i == 3 {
                let _ = deferred.poll(&mut passed);
            }
        }
        let _ = deferred.drain(&mut passed);
        passed.extend(drain(&mut deferred));
        passed.sort_unstable();
        assert_eq!(passed, freed, "{call} {nth}");
        assert_eq!(freed.len() + refused.len(), 6);
        assert!(refused.len() <= 1, "{call} {nth}");
        assert!(freed.iter().all(|&i| byte(&buffer, i) == 7), "{call} {nth}");
        drop(deferred);
        sim.cancel_all();
        assert_eq!(sim.held(), held, "{call} {nth}");
    }
}

#[test]
fn a_lost_gpu_keeps_nothing_for_good() {
    let (driver, buffer) = setup();
    let [bad, good] = [0, 1].map(|device| Stream::new(&driver, device).unwrap());
    let mut deferred = Deferred::new(&driver, &Arc::default());
    let gone = Buffer::on(NodeId(0))
        .bytes(BYTES)
        .access_by([Location::Device(0), Location::Device(1)])
        .allocate(&driver)
        .unwrap();
    fill(&bad, &gone, 0, 1);
    drop(gone);
    deferred.after_one(&bad, 0).unwrap();
    fill(&good, &buffer, 1, 7);
    deferred.after_one(&good, 1).unwrap();
    assert_eq!(poll(&mut deferred), [1]);
    assert_eq!(deferred.pending(), 1);
    fill(&good, &buffer, 2, 7);
    assert_eq!(drain(&mut deferred), [0]);
    assert_eq!(byte(&buffer, 2), 7, "the other GPU was waited for");
}
