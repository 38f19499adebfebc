//! PyTorch's memory snapshot, `torch.cuda.memory._snapshot()`, as JSON: the history in its
//! `device_traces`, one list of entries a device.

use serde::Deserialize;

use super::{Bad, Reading, Why};
use crate::trace::{Builder, Line, Trace};

#[derive(Deserialize)]
struct Snapshot {
    device_traces: Vec<Vec<Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    action: String,
    addr: Option<u64>,
    size: Option<u64>,
    time_us: Option<u64>,
    stream: Option<u64>,
}

/// Reads a whole snapshot; a stream stands for a thread, because snapshots have no threads.
pub fn read(bytes: &[u8], reading: Reading) -> Result<Trace, Bad> {
    let snapshot: Snapshot = serde_json::from_slice(bytes).map_err(|error| Bad {
        place: "line",
        number: error.line() as u64,
        why: Why::Format(format!("no snapshot of PyTorch's as JSON: {error}")),
    })?;
    let devices = snapshot.device_traces;
    let lengths = || devices.iter().map(Vec::len);
    let fullest = lengths()
        .enumerate()
        .rev()
        .max_by_key(|&(_, length)| length);
    let device = reading
        .device
        .or(fullest.map(|(device, _)| device))
        .unwrap_or(0);
    let Some(entries) = devices.get(device) else {
        return Err(Bad {
            place: "device",
            number: device as u64,
            why: Why::Format(format!("the snapshot has {} devices", devices.len())),
        });
    };
    let mut builder = Builder::default();
    let lines = lengths().sum::<usize>() as u64;
    builder.notes().lines = lines;
    builder.notes().other_devices = lines - entries.len() as u64;
    for (index, entry) in entries.iter().enumerate() {
        if let Err(why) = take(entry, &mut builder) {
            if !reading.skip_bad {
                return Err(Bad {
                    place: "entry",
                    number: index as u64 + 1,
                    why,
                });
            }
            builder.notes().bad += 1;
        }
    }
    Ok(builder.finish())
}

fn take(entry: &Entry, builder: &mut Builder) -> Result<(), Why> {
    let line = |stream| {
        Ok(Line {
            thread: stream,
            time: entry.time_us,
            pointer: entry.addr.ok_or(Why::Missing("addr"))?,
            size: entry.size.ok_or(Why::Missing("size"))?,
        })
    };
    let stream = entry.stream.unwrap_or(0).to_string();
    match entry.action.as_str() {
        "alloc" => builder.allocate(&line(&stream)?)?,
        // Only then may its bytes be given out again.
        "free_completed" => builder.free(&line(&stream)?),
        "oom" => builder.notes().failures += 1,
        // The first half of a free, the caching allocator's own memory, marks, and actions of later versions.
        _ => builder.notes().others += 1,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SNAPSHOT: &str = r#"{"segments": [{"address": 1, "blocks": []}], "device_traces": [[], [
        {"action": "segment_alloc", "addr": 140000, "size": 2097152, "stream": 0, "time_us": 100},
        {"action": "alloc", "addr": 140000, "size": 512, "stream": 0, "time_us": 101, "frames": [{"line": 3}]},
        {"action": "free_requested", "addr": 140000, "size": 512, "stream": 0, "time_us": 109},
        {"action": "free_completed", "addr": 140000, "size": 512, "stream": 0, "time_us": 110},
        {"action": "oom", "size": 1099511627776, "device_free": 5, "stream": 0},
        {"action": "alloc", "addr": 140000, "size": 1024, "stream": 7, "time_us": 120},
        {"action": "free_completed", "addr": 99, "size": 1024, "stream": 7, "time_us": 130}
    ], [{"action": "snapshot", "addr": 0, "size": 0}]]}"#;

    #[test]
    fn a_snapshot_is_a_trace() {
        let trace = read(SNAPSHOT.as_bytes(), Reading::default()).unwrap();
        let events = trace.events.iter();
        let events: Vec<_> = events
            .map(|event| (event.block, event.frees, event.size))
            .collect();
        assert_eq!(events, [(0, false, 512), (0, true, 512), (1, false, 1024)]);
        assert_eq!(trace.times, [0, 9, 19]);
        assert_eq!(trace.threads, ["0", "7"]);
        let notes = trace.notes;
        assert_eq!((notes.others, notes.failures), (2, 1));
        assert_eq!((notes.unknown_frees, notes.other_devices), (1, 1));
        assert_eq!((notes.lines, notes.accounted()), (8, 8));
    }

    #[test]
    fn a_device_can_be_chosen() {
        let reading = |device| Reading {
            device: Some(device),
            ..Reading::default()
        };
        let trace = read(SNAPSHOT.as_bytes(), reading(2)).unwrap();
        assert_eq!((trace.notes.others, trace.notes.other_devices), (1, 7));
        assert!(read(SNAPSHOT.as_bytes(), reading(3)).is_err());
    }

    #[test]
    fn a_bad_entry_is_told_with_its_number() {
        let text = r#"{"device_traces": [[{"action": "alloc", "addr": 1, "size": 5}, {"action": "alloc", "addr": 1}]]}"#;
        let error = read(text.as_bytes(), Reading::default()).unwrap_err();
        assert_eq!(error.to_string(), "entry 2: no size");
        let reading = Reading {
            skip_bad: true,
            device: None,
        };
        let trace = read(text.as_bytes(), reading).unwrap();
        assert_eq!((trace.notes.bad, trace.notes.allocations), (1, 1));
        for text in ["{", "{}", "{\"device_traces\": 3}", "[]"] {
            assert!(read(text.as_bytes(), Reading::default()).is_err(), "{text}");
        }
        let none = read(br#"{"device_traces": []}"#, Reading::default());
        assert!(none.is_err_and(|error| error.place == "device"));
    }
}
