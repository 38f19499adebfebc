//! docs/protocol.md against the code.

use std::collections::BTreeSet;

use ciborium::Value;
use egmem::driver::{Access, HandleType};
use egmem::exchange::protocol::*;
use egmem::exchange::{Limits, Refusal};
use egmem::share::queue::MAX_WITH_MESSAGE;

use crate::protocol::samples;

const TEXT: &str = include_str!("../../../docs/protocol.md");

/// Returns the bytes of the blocks with this heading; the text behind a `#` is a comment.
fn examples(heading: &str) -> Vec<Vec<u8>> {
    let start = format!("```hex {heading}\n");
    let block = |text: &str| {
        let block = text.split("```").next().expect("a block");
        let lines = block
            .lines()
            .map(|line| line.split('#').next().expect("a line"));
        let bytes = lines.flat_map(str::split_whitespace);
        bytes
            .map(|byte| u8::from_str_radix(byte, 16).expect("two digits"))
            .collect()
    };
    TEXT.split(&start).skip(1).map(block).collect()
}

fn frame(bytes: &[u8]) -> &[u8] {
    let (length, rest) = bytes.split_first_chunk().expect("a length");
    assert_eq!(u32::from_be_bytes(*length) as usize, rest.len());
    rest
}

#[test]
fn the_examples_are_what_the_codec_writes_and_reads() {
    let fetch = (
        4,
        Ask::Fetch(Fetch {
            name: "job-7/rank:0".into(),
            accept: vec![HandleType::Fabric, HandleType::PosixFd],
            access: Some(Access::ReadWrite),
            probe: true,
            instance: None,
            owner: None,
        }),
    );
    let requests = examples("frame request");
    assert_eq!(requests.len(), 1);
    assert_eq!(frame(&requests[0]), &encode(&fetch)[..]);
    assert_eq!(decode::<Request>(frame(&requests[0])).unwrap(), fetch);

    let refused = FromServer::Reply(
        4,
        Answer::Refused(Refused {
            reason: Refusal::NotFound.word().into(),
            detail: String::new(),
        }),
    );
    let withdrawing = FromServer::Event(Event::Withdrawing { lease: 9, ms: 5000 });
    let found = examples("frame from_server");
    assert_eq!(found.len(), 2);
    for (found, message) in found.iter().zip([refused, withdrawing]) {
        assert_eq!(frame(found), &encode(&message)[..]);
        assert_eq!(decode::<FromServer>(frame(found)).unwrap(), message);
    }
}

fn words(value: &Value, all: &mut BTreeSet<String>) {
    match value {
        Value::Map(entries) => {
            for (key, value) in entries {
                all.insert(key.as_text().expect("keys are texts").into());
                words(value, all);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| words(item, all)),
        _ => {}
    }
}

/// Every key of every message is explained.
#[test]
fn every_field_and_choice_is_in_the_specification() {
    let mut all = BTreeSet::new();
    let mut add = |bytes: &[u8]| {
        words(&ciborium::from_reader(bytes).expect("CBOR"), &mut all);
    };
    samples::hellos().iter().for_each(|(_, m)| add(&encode(m)));
    samples::greetings()
        .iter()
        .for_each(|(_, m)| add(&encode(m)));
    samples::requests()
        .iter()
        .for_each(|(_, m)| add(&encode(m)));
    samples::from_server()
        .iter()
        .for_each(|(_, m)| add(&encode(m)));
    assert!(all.len() > 40, "{all:?}");
    let missing: Vec<_> = all
        .iter()
        .filter(|word| {
            !TEXT.contains(&format!("`{word}`")) && !TEXT.contains(&format!("`{{\"{word}\""))
        })
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn refusals_versions_and_limits_are_those_of_the_code() {
    for line in TEXT.split("## Refusals").nth(1).unwrap().lines() {
        if let Some(word) = line
            .strip_prefix("| `")
            .and_then(|line| line.split('`').next())
        {
            assert!(
                !matches!(Refusal::from_word(word), Refusal::Other(_)),
                "{word}"
            );
        }
    }
    assert_eq!((OLDEST, VERSION), (2, 2));
    assert!(TEXT.contains("Version 2."));
    let limits = Limits::default();
    // Wherever its lines end.
    let text = TEXT.split_whitespace().collect::<Vec<_>>().join(" ");
    for (value, said) in [
        (u64::from(limits.frame_bytes >> 20), "Frames {} MiB"),
        (limits.names_per_peer as u64, "{} that one peer owns"),
        (limits.requests_per_peer as u64, "{} of one peer and 262144"),
        (limits.requests as u64, "{} of all, 64 KiB"),
        (
            u64::from(MAX_HELLO >> 10),
            "{} KiB for the client's first frame",
        ),
        (MAX_WITH_MESSAGE as u64, "{} fds a frame"),
        (limits.connections as u64, "{} connections that have"),
        (limits.connections_per_peer as u64, "{} of one peer"),
        (
            limits.handshakes as u64,
            "{} connections that have not been greeted",
        ),
        (limits.sessions as u64, "{} sessions"),
        (limits.sessions_per_peer as u64, "{} of one peer, 65,536"),
        (limits.fds_per_peer as u64, "{} fds of a peer"),
        (limits.requests_in_flight as u64, "{} requests in flight"),
        (limits.list_page as u64, "{} entries in an answer"),
        (limits.handshake.as_secs(), "greeting {} s"),
        (limits.frame.as_secs(), "frame {} s"),
        (limits.request.as_secs(), "a driver call {} s"),
        (limits.wait.as_secs(), "a wait {} s"),
    ] {
        let said = said.replace("{}", &value.to_string());
        assert!(text.contains(&said), "{said}");
    }
}
