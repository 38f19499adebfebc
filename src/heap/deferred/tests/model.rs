//! Compares any sequence of calls with a list of the events that each payload waits for.

use proptest::collection::vec;
use proptest::prelude::*;

use super::gpu::Gpus;
use super::*;
use crate::driver::{Call, Code};

#[derive(Clone, Debug)]
enum Op {
    Work(usize),
    Step(usize),
    Free(usize, u8),
    Record(usize),
    FreeAfterEvent(usize),
    Capture(usize, bool),
    Fail(Call),
    Lose,
    Poll,
    Drain,
    TakeAndPutBack,
}

const STREAMS: usize = 4;
/// GPU 2 is the one that may be lost.
const DEVICES: [i32; STREAMS] = [0, 0, 1, 2];

fn op() -> impl Strategy<Value = Op> {
    let stream = 0..STREAMS;
    let call = prop::sample::select(vec![
        Call::StreamIsCapturing,
        Call::EventCreate,
        Call::EventRecord,
        Call::EventQuery,
        Call::EventSynchronize,
        Call::CtxSynchronize,
        Call::ThreadExchangeStreamCaptureMode,
    ]);
    prop_oneof![
        6 => stream.clone().prop_map(Op::Work),
        6 => stream.clone().prop_map(Op::Step),
        8 => (stream.clone(), 0..4_u8).prop_map(|(stream, many)| Op::Free(stream, many)),
        3 => stream.clone().prop_map(Op::Record),
        5 => stream.clone().prop_map(Op::FreeAfterEvent),
        1 => (stream, any::<bool>()).prop_map(|(stream, on)| Op::Capture(stream, on)),
        2 => call.prop_map(Op::Fail),
        1 => Just(Op::Lose),
        6 => Just(Op::Poll),
        1 => Just(Op::Drain),
        1 => Just(Op::TakeAndPutBack),
    ]
}

/// The work that a payload waits for: a stream's work up to here.
#[derive(Clone, Copy, Debug)]
struct After {
    stream: usize,
    place: u64,
}

struct World {
    gpus: Gpus,
    streams: Vec<Stream>,
    /// The newest event recorded on each stream, and the position that it marks.
    events: Vec<(Arc<Event>, u64)>,
    deferred: Deferred<u32>,
    /// By payload.
    waiting: HashMap<u32, After>,
    next: u32,
    lost: bool,
    captured: [bool; STREAMS],
}

impl World {
    fn new() -> Self {
        let (gpus, driver) = Gpus::new(3);
        let streams: Vec<_> = DEVICES.map(|d| Stream::new(&driver, d).unwrap()).into();
        let event = |device| (Arc::new(Event::new(&driver, device, false).unwrap()), 0);
        Self {
            gpus,
            events: DEVICES.map(event).into(),
            deferred: Deferred::new(&driver, &Arc::default()),
            streams,
            waiting: HashMap::new(),
            next: 0,
            lost: false,
            captured: [false; STREAMS],
        }
    }

    fn payloads(&mut self, count: u32) -> Vec<u32> {
        self.next += count;
        (self.next - count..self.next).collect()
    }

    fn is_lost(&self, stream: usize) -> bool {
        self.lost && DEVICES[stream] == 2
    }

    fn is_done(&self, after: After) -> bool {
        self.gpus.progress(&self.streams[after.stream]).1 >= after.place
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Work(stream) => self.gpus.work(&self.streams[stream]),
            Op::Step(stream) if !self.is_lost(stream) => self.gpus.step(&self.streams[stream]),
            Op::Step(_) => {}
            Op::Free(stream, many) => self.free(stream, u32::from(many)),
            Op::Record(stream) => self.record(stream),
            Op::FreeAfterEvent(stream) => {
                let (event, place) = self.events[stream].clone();
                let payload = self.payloads(1)[0];
                if self.deferred.after_event(event, payload).is_ok() {
                    self.waiting.insert(payload, After { stream, place });
                }
            }
            Op::Capture(stream, on) => {
                self.gpus.capture(&self.streams[stream], on);
                self.captured[stream] = on;
            }
            Op::Fail(call) => self.gpus.fail(call, Code::UNKNOWN),
            Op::Lose => {
                self.gpus.lose(2);
                self.lost = true;
            }
            Op::Poll => self.poll(),
            Op::Drain => self.drain(),
            Op::TakeAndPutBack => {
                let taken = self.deferred.take();
                assert_eq!(self.deferred.pending(), 0);
                self.deferred.put_back(taken);
            }
        }
        assert_eq!(self.deferred.pending(), self.waiting.len());
    }

    fn free(&mut self, stream: usize, many: u32) {
        let place = self.gpus.progress(&self.streams[stream]).0;
        let payloads = self.payloads(many.max(1));
        let on = &self.streams[stream];
        let result = match payloads[..] {
            [payload] => self.deferred.after_one(on, payload),
            _ => self.deferred.after_stream(on, &mut payloads.clone()),
        };
        if result.is_ok() {
            assert!(!self.captured[stream] || self.is_lost(stream));
            let after = After { stream, place };
            self.waiting.extend(payloads.iter().map(|&p| (p, after)));
        }
    }

    fn record(&mut self, stream: usize) {
        if self.captured[stream] {
            return;
        }
        let place = self.gpus.progress(&self.streams[stream]).0;
        if self.events[stream].0.record(&self.streams[stream]).is_ok() {
            self.events[stream].1 = place;
        }
    }

    fn poll(&mut self) {
        let mut passed = Vec::new();
        let result = self.deferred.poll(&mut passed);
        for payload in passed {
            let after = self.waiting.remove(&payload).expect("it waited");
            assert!(self.is_done(after), "{payload} after {after:?}");
        }
        let left = self.waiting.values();
        if result.is_ok() {
            for after in left.filter(|after| !self.is_lost(after.stream)) {
                assert!(!self.is_done(*after), "{after:?} has passed");
            }
        }
    }

    fn drain(&mut self) {
        let mut passed = Vec::new();
        let result = self.deferred.drain(&mut passed);
        for payload in passed {
            let after = self.waiting.remove(&payload).expect("it waited");
            assert!(
                self.is_done(after) || self.is_lost(after.stream),
                "{payload} after {after:?}"
            );
        }
        assert_eq!(result.is_ok(), self.waiting.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn payloads_pass_once_when_their_work_has_run_and_none_is_lost(ops in vec(op(), 0..120)) {
        let mut world = World::new();
        for op in &ops {
            world.apply(op);
        }
        world.gpus.forget_fault();
        world.drain();
        prop_assert!(world.waiting.is_empty());
    }
}
