use super::gpu::Gpus;
use super::*;
use crate::driver::{Call, Code, StreamHandle};

#[test]
fn what_was_freed_passes_with_the_work_before_it_and_not_with_what_came_later() {
    let (gpus, driver) = Gpus::new(1);
    let stream = gpus.busy(&driver, 0);
    let mut deferred = Deferred::new(&driver, &Arc::default());
    deferred.after_one(&stream, 1).unwrap();
    gpus.work(&stream);
    deferred.after_stream(&stream, &mut vec![2, 3]).unwrap();
    deferred.after_stream(&stream, &mut Vec::new()).unwrap();
    assert_eq!((poll(&mut deferred), deferred.pending()), (vec![], 3));
    gpus.step(&stream);
    assert_eq!((poll(&mut deferred), deferred.pending()), (vec![1], 2));
    gpus.step(&stream);
    assert_eq!((poll(&mut deferred), deferred.pending()), (vec![2, 3], 0));
}

#[test]
fn a_list_is_taken_and_not_copied_and_a_refused_one_stays() {
    let (gpus, driver) = Gpus::new(1);
    let stream = gpus.busy(&driver, 0);
    let mut deferred = Deferred::new(&driver, &Arc::default());
    let mut list: Vec<u64> = (0..1000).collect();
    let (at, all) = (list.as_ptr(), list.clone());
    gpus.fail(Call::EventRecord, Code::UNKNOWN);
    deferred.after_stream(&stream, &mut list).unwrap_err();
    assert_eq!((&list, list.as_ptr(), deferred.pending()), (&all, at, 0));
    deferred.after_stream(&stream, &mut list).unwrap();
    assert_eq!((list.len(), deferred.pending()), (0, 1000));
    let batch = deferred.queues.values().flatten().next().unwrap();
    assert_eq!(batch.payloads.as_ptr(), at);
    assert_eq!(drain(&mut deferred), all);
}

#[test]
fn streams_pass_on_their_own() {
    let (gpus, driver) = Gpus::new(2);
    let streams = [0, 0, 1].map(|device| gpus.busy(&driver, device));
    let mut deferred = Deferred::new(&driver, &Arc::default());
    for (i, stream) in streams.iter().enumerate() {
        deferred.after_one(stream, i).unwrap();
    }
    for i in [1, 2, 0] {
        gpus.step(&streams[i]);
        assert_eq!(poll(&mut deferred), [i]);
    }
}

#[test]
fn a_poll_asks_one_event_of_a_stream_that_has_not_gone_on() {
    let (gpus, driver) = Gpus::new(1);
    let stream = gpus.busy(&driver, 0);
    let mut deferred = Deferred::new(&driver, &Arc::default());
    assert!(poll(&mut deferred).is_empty());
    assert_eq!(gpus.count(Call::ThreadExchangeStreamCaptureMode), 0);
    (0..100).for_each(|i| deferred.after_one(&stream, i).unwrap());
    assert_eq!(gpus.count(Call::EventQuery), 0);
    assert!(poll(&mut deferred).is_empty());
    assert_eq!(gpus.count(Call::EventQuery), 1);
    gpus.step(&stream);
    assert_eq!(poll(&mut deferred).len(), 100);
    assert_eq!(gpus.count(Call::EventQuery), 101);
    assert_eq!(gpus.count(Call::EventSynchronize), 0, "never waits");
}

#[test]
fn events_are_used_again_and_destroyed_in_the_end() {
    let (gpus, driver) = Gpus::new(2);
    let streams = [0, 1].map(|device| gpus.busy(&driver, device));
    let mut deferred = Deferred::new(&driver, &Arc::default());
    for round in 0..10 {
        streams.iter().for_each(|stream| gpus.work(stream));
        for stream in streams.iter().chain(&streams) {
            deferred.after_one(stream, round).unwrap();
        }
        drain(&mut deferred);
    }
    assert_eq!((gpus.events(), gpus.count(Call::EventCreate)), (4, 4));
    gpus.work(&streams[0]);
    for _ in 0..1000 {
        deferred.after_one(&streams[0], 0).unwrap();
    }
    drain(&mut deferred);
    assert!(gpus.events() < 300, "{} are kept", gpus.events());
    drop(deferred);
    assert_eq!(gpus.events(), 0);
}

#[test]
fn a_stream_that_is_captured_is_refused_and_left_alone() {
    let (gpus, driver) = Gpus::new(1);
    let stream = gpus.busy(&driver, 0);
    let mut deferred = Deferred::new(&driver, &Arc::default());
    deferred.after_one(&stream, 1).unwrap();
    gpus.capture(&stream, true);
    let invalid = |error| matches!(error, Error::InvalidArgument { what: "stream", .. });
    assert!(invalid(deferred.after_one(&stream, 2).unwrap_err()));
    assert!(invalid(
        deferred.after_stream(&stream, &mut vec![3, 4]).unwrap_err()
    ));
    assert_eq!(deferred.pending(), 1);
    assert_eq!(gpus.count(Call::EventRecord), 1);
    // Payloads freed before the capture began pass meanwhile.
    gpus.step(&stream);
    assert_eq!(poll(&mut deferred), [1]);
    gpus.capture(&stream, false);
    deferred.after_one(&stream, 2).unwrap();
    assert_eq!(poll(&mut deferred), [2]);
}

#[test]
fn an_event_that_was_captured_is_refused() {
    let (gpus, driver) = Gpus::new(1);
    let stream = gpus.busy(&driver, 0);
    let event = Arc::new(Event::new(&driver, 0, false).unwrap());
    gpus.capture(&stream, true);
    event.record(&stream).unwrap();
    let mut deferred = Deferred::new(&driver, &Arc::default());
    let error = deferred.after_event(Arc::clone(&event), 1).unwrap_err();
    assert_eq!(error.code(), Some(Code::CAPTURED_EVENT));
    assert_eq!(deferred.pending(), 0);
    gpus.capture(&stream, false);
    event.record(&stream).expect("nobody holds it");
}

#[test]
fn captures_of_other_threads_are_kept_out_of_the_way_of() {
    let (gpus, driver) = Gpus::new(1);
    let stream = gpus.busy(&driver, 0);
    let event = Arc::new(Event::new(&driver, 0, false).unwrap());
    event.record(&stream).unwrap();
    let mut deferred = Deferred::new(&driver, &Arc::default());
    deferred.after_one(&stream, 1).unwrap();
    deferred.after_event(event, 2).unwrap();
    assert!(poll(&mut deferred).is_empty());
    assert_eq!(drain(&mut deferred), [1, 2]);
    assert_eq!(gpus.modes_of_queries().into_iter().collect::<Vec<_>>(), [2]);
    let mode = driver.thread_exchange_capture_mode(crate::driver::CaptureMode::GLOBAL);
    assert_eq!(mode, Ok(crate::driver::CaptureMode::GLOBAL));
}

#[test]
fn an_events_mark_stays_while_memory_waits_for_it() {
    let (gpus, driver) = Gpus::new(2);
    let (slow, idle) = (gpus.busy(&driver, 0), Stream::new(&driver, 0).unwrap());
    let event = Arc::new(Event::new(&driver, 0, false).unwrap());
    event.record(&slow).unwrap();
    let mut deferred = Deferred::new(&driver, &Arc::default());
    deferred.after_event(Arc::clone(&event), 1).unwrap();
    deferred.after_event(Arc::clone(&event), 2).unwrap();
    let error = event.record(&idle).unwrap_err();
    assert!(
        matches!(error, Error::InvalidArgument { what: "event", .. }),
        "{error}"
    );
    assert!(poll(&mut deferred).is_empty(), "the mark has not moved");
    gpus.step(&slow);
    assert_eq!(poll(&mut deferred), [1, 2]);
    event.record(&idle).unwrap();
    // An event that was never recorded marks nothing.
    let never = Arc::new(Event::new(&driver, 1, false).unwrap());
    deferred.after_event(never, 3).unwrap();
    assert_eq!(poll(&mut deferred), [3]);
}

#[test]
fn events_pass_in_whatever_order() {
    let (gpus, driver) = Gpus::new(2);
    let streams = [0, 1, 0].map(|device| gpus.busy(&driver, device));
    let mut deferred = Deferred::new(&driver, &Arc::default());
    for (i, stream) in streams.iter().enumerate() {
        let event = Event::new(&driver, stream.device(), false).unwrap();
        event.record(stream).unwrap();
        deferred.after_event(Arc::new(event), i).unwrap();
    }
    for i in [2, 0, 1] {
        gpus.step(&streams[i]);
        assert_eq!(poll(&mut deferred), [i]);
    }
    assert_eq!(gpus.events(), 0, "the callers' events have gone");
}

#[test]
fn another_drivers_stream_and_event_are_refused() {
    let ((gpus, driver), (_, other)) = (Gpus::new(1), Gpus::new(1));
    let stream = gpus.busy(&driver, 0);
    let event = Arc::new(Event::new(&driver, 0, false).unwrap());
    let mut deferred = Deferred::new(&other, &Arc::default());
    let error = deferred.after_one(&stream, 1).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }));
    let error = deferred.after_event(event, 1).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }));
    assert_eq!(deferred.pending(), 0);
}

#[test]
fn each_threads_default_stream_is_another() {
    let (gpus, driver) = Gpus::new(1);
    let handle = StreamHandle {
        device: 0,
        raw: StreamHandle::PER_THREAD,
    };
    // SAFETY: the handle is a number to this driver, as good as any.
    let stream = unsafe { Stream::borrowed(&driver, handle) };
    let key = Key::of(&stream);
    assert!(key == Key::of(&stream.clone()));
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(key != Key::of(&stream)));
    });
    let (one, other) = (gpus.busy(&driver, 0), gpus.busy(&driver, 0));
    assert!(Key::of(&one) != Key::of(&other));
}

#[test]
fn the_only_gpu_lost_has_no_work_left() {
    let (gpus, driver) = Gpus::new(1);
    let stream = gpus.busy(&driver, 0);
    let event = Arc::new(Event::new(&driver, 0, false).unwrap());
    event.record(&stream).unwrap();
    let mut deferred = Deferred::new(&driver, &Arc::default());
    deferred.after_one(&stream, 1).unwrap();
    deferred.after_event(Arc::clone(&event), 2).unwrap();
    gpus.lose(0);
    deferred.after_one(&stream, 3).unwrap();
    deferred.after_stream(&stream, &mut vec![4, 5]).unwrap();
    deferred.after_event(event, 6).unwrap();
    assert_eq!(deferred.pending(), 6);
    assert_eq!(poll(&mut deferred), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn what_waited_for_a_lost_gpu_waits_for_the_others_that_it_may_have_waited_for() {
    let (gpus, driver) = Gpus::new(3);
    let streams = [0, 1, 2].map(|device| gpus.busy(&driver, device));
    let mut deferred = Deferred::new(&driver, &Arc::default());
    for (i, stream) in streams.iter().enumerate() {
        deferred.after_one(stream, i).unwrap();
    }
    gpus.lose(0);
    gpus.lose(2);
    assert_eq!((poll(&mut deferred), deferred.pending()), (vec![], 3));
    gpus.fail(Call::CtxSynchronize, Code::STREAM_CAPTURE_UNSUPPORTED);
    let mut passed = Vec::new();
    let error = deferred.drain(&mut passed).unwrap_err();
    assert_eq!(error.code(), Some(Code::STREAM_CAPTURE_UNSUPPORTED));
    assert_eq!((passed, deferred.pending()), (vec![1], 2));
    gpus.work(&streams[1]);
    assert_eq!(drain(&mut deferred), [0, 2]);
    let (put, done) = gpus.progress(&streams[1]);
    assert_eq!(put, done, "GPU 1 was waited for");
}

#[test]
fn each_call_may_fail_and_nothing_is_lost() {
    for call in [
        Call::StreamIsCapturing,
        Call::EventCreate,
        Call::EventRecord,
    ] {
        let (gpus, driver) = Gpus::new(1);
        let stream = gpus.busy(&driver, 0);
        let mut deferred = Deferred::new(&driver, &Arc::default());
        gpus.fail(call, Code::OUT_OF_MEMORY);
        let error = deferred.after_one(&stream, 1).unwrap_err();
        assert_eq!(error.code(), Some(Code::OUT_OF_MEMORY), "{call}");
        assert_eq!(deferred.pending(), 0);
        deferred.after_one(&stream, 1).unwrap();
        assert!(poll(&mut deferred).is_empty());
        gpus.step(&stream);
        assert_eq!(poll(&mut deferred), [1]);
    }
    for (call, wait) in [(Call::EventQuery, false), (Call::EventSynchronize, true)] {
        let (gpus, driver) = Gpus::new(1);
        let mut deferred = Deferred::new(&driver, &Arc::default());
        for i in 0..2 {
            let stream = Stream::new(&driver, 0).unwrap();
            deferred.after_one(&stream, i).unwrap();
            let event = Arc::new(Event::new(&driver, 0, false).unwrap());
            event.record(&stream).unwrap();
            deferred.after_event(event, 2 + i).unwrap();
        }
        gpus.fail(call, Code::UNKNOWN);
        let mut passed = Vec::new();
        let error = if wait {
            deferred.drain(&mut passed).unwrap_err()
        } else {
            deferred.poll(&mut passed).unwrap_err()
        };
        assert_eq!(error.code(), Some(Code::UNKNOWN));
        assert_eq!((passed.len(), deferred.pending()), (3, 1), "{call}");
        passed.extend(poll(&mut deferred));
        passed.sort_unstable();
        assert_eq!(passed, [0, 1, 2, 3]);
    }
}

#[test]
fn what_is_taken_can_be_put_back_in_its_place() {
    for after_event in [false, true] {
        let (gpus, driver) = Gpus::new(1);
        let stream = gpus.busy(&driver, 0);
        let event = Arc::new(Event::new(&driver, 0, false).unwrap());
        event.record(&stream).unwrap();
        let mut deferred = Deferred::new(&driver, &Arc::default());
        let put = if after_event {
            deferred.after_event(Arc::clone(&event), 1)
        } else {
            deferred.after_one(&stream, 1)
        };
        put.unwrap();
        let mut taken = deferred.take();
        assert_eq!((taken.pending(), deferred.pending()), (1, 0));
        gpus.work(&stream);
        deferred.after_one(&stream, 2).unwrap();
        deferred.after_event(event, 3).unwrap();
        gpus.fail(Call::EventSynchronize, Code::UNKNOWN);
        let mut passed = Vec::new();
        taken.drain(&mut passed).unwrap_err();
        assert_eq!((passed.len(), taken.pending()), (0, 1));
        deferred.put_back(taken);
        assert_eq!(deferred.pending(), 3);
        gpus.step(&stream);
        assert_eq!(poll(&mut deferred), [1, 3], "1 is before 2 again");
        gpus.step(&stream);
        assert_eq!(poll(&mut deferred), [2]);
    }
}

#[test]
fn dropping_waits() {
    let (gpus, driver) = Gpus::new(2);
    let streams = [0, 1].map(|device| gpus.busy(&driver, device));
    let mut deferred = Deferred::new(&driver, &Arc::default());
    deferred.after_one(&streams[0], ()).unwrap();
    let event = Event::new(&driver, 1, false).unwrap();
    event.record(&streams[1]).unwrap();
    deferred.after_event(Arc::new(event), ()).unwrap();
    gpus.work(&streams[0]);
    drop(deferred);
    assert_eq!(
        gpus.progress(&streams[0]),
        (2, 1),
        "for no more than it must"
    );
    assert_eq!(gpus.progress(&streams[1]), (1, 1));
    assert_eq!(gpus.events(), 0);
}
