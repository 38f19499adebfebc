//! The form of messages, and invalid ones.

use super::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_request_is_an_array_of_its_id_and_the_request() {
    let request = (7, Ask::Release { lease: 9 });
    let bytes = encode(&request);
    assert_eq!(hex(&bytes), "8207a16772656c65617365a1656c6561736509");
    assert_eq!(decode::<Request>(&bytes).unwrap(), request);
    assert_eq!(hex(&encode(&(7_u64, Ask::Ping))), "82076470696e67");
}

#[test]
fn numbers_and_lengths_may_be_wider_than_they_need() {
    // [7, {"release": {"lease": 9}}]: the id in eight bytes, the lease in two; then a length of text and of a map in one.
    for bytes in [
        &b"\x82\x1b\0\0\0\0\0\0\0\x07\xa1\x67release\xa1\x65lease\x19\0\x09"[..],
        b"\x98\x02\x18\x07\xb8\x01\x78\x07release\xb9\0\x01\x79\0\x05lease\x1a\0\0\0\x09",
    ] {
        let request = (7, Ask::Release { lease: 9 });
        assert_eq!(decode::<Request>(bytes).unwrap(), request, "{bytes:02x?}");
    }
}

#[test]
fn a_server_sends_replies_and_events() {
    let event = FromServer::Event(Event::Closing { ms: 1 });
    let reply = FromServer::Reply(7, Answer::Done);
    for (message, wire) in [
        (event, "a1656576656e74a167636c6f73696e67a1626d7301"),
        (reply, "a1657265706c79820764646f6e65"),
    ] {
        let bytes = encode(&message);
        assert_eq!(hex(&bytes), wire);
        assert_eq!(decode::<FromServer>(&bytes).unwrap(), message);
    }
}

#[test]
fn unknown_fields_are_skipped() {
    // [1, {"list": {"new": [2.0, {"a": null}]}}]
    let bytes = b"\x82\x01\xa1\x64list\xa1\x63new\x82\xf9\x40\x00\xa1\x61a\xf6";
    assert_eq!(
        decode::<Request>(bytes).unwrap(),
        (1, Ask::List(List::default()))
    );
}

/// The order of fields is no part of the protocol: a reader that takes an array of them reads nothing else than a map has.
#[test]
fn fields_without_keys_are_errors_or_the_same() {
    // [7, {"release": [9]}], [7, {"probe": [9]}]
    for (bytes, ask) in [
        (
            &b"\x82\x07\xa1\x67release\x81\x09"[..],
            Ask::Release { lease: 9 },
        ),
        (b"\x82\x07\xa1\x65probe\x81\x09", Ask::Probe { lease: 9 }),
    ] {
        let is_other = decode::<Request>(bytes).is_ok_and(|found| found != (7, ask));
        assert!(!is_other, "{bytes:02x?}");
    }
    // [7, {"list": ["a"]}], [7, {"release": []}], [7, {"release": [9, 9]}]
    for bytes in [
        &b"\x82\x07\xa1\x64list\x81\x61a"[..],
        b"\x82\x07\xa1\x67release\x80",
        b"\x82\x07\xa1\x67release\x82\x09\x09",
    ] {
        assert!(decode::<Request>(bytes).is_err(), "{bytes:02x?}");
    }
}

#[test]
fn other_forms_are_errors() {
    for bytes in [
        // An unknown request, two requests, a field twice, no id, a third element.
        &b"\x82\x01\xa1\x63new\xa0"[..],
        b"\x82\x01\xa2\x64list\xa0\x64list\xa0",
        b"\x82\x01\xa1\x67release\xa2\x65lease\x01\x65lease\x01",
        b"\x82\xf6\x64ping",
        b"\x83\x01\x64ping\x01",
        // The first version.
        b"\xa2\x62id\x01\x64ping\xa0",
        b"",
    ] {
        assert!(decode::<Request>(bytes).is_err(), "{bytes:02x?}");
    }
    // An answer without an id; an event with one; an unknown answer; two messages; nothing.
    for bytes in [
        &b"\xa1\x65reply\x82\xf6\x64done"[..],
        b"\xa1\x65event\x82\x01\xa1\x67closing\xa1\x62ms\x01",
        b"\xa1\x65reply\x82\x01\xa1\x63new\xa0",
        b"\xa2\x65reply\x82\x01\x64done\x65reply\x82\x02\x64done",
        b"\xa1\x65reply\x81\x01",
        b"\xa0",
    ] {
        assert!(decode::<FromServer>(bytes).is_err(), "{bytes:02x?}");
    }
    assert!(decode::<Greeting>(b"\xa0").is_err());
}

/// The decoder believes no length, and its recursion has a limit.
#[test]
fn lengths_that_are_not_there_and_deep_nesting_are_errors() {
    for claim in [
        &b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff"[..],
        b"\xbb\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x5b\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x7b\xff\xff\xff\xff\xff\xff\xff\xff",
    ] {
        for start in [
            &b""[..],
            b"\x82\x01\xa1\x65fetch\xa1\x66accept",
            b"\x82\x01\xa1\x65fetch\xa1\x63new",
            b"\x82\x01\xa1\x64wait\xa1\x64name",
        ] {
            let bytes = [start, claim].concat();
            assert!(decode::<Request>(&bytes).is_err(), "{bytes:02x?}");
            assert!(decode::<FromServer>(&bytes).is_err(), "{bytes:02x?}");
        }
    }
    for deep in [0x81, 0xc1, 0x9f, 0xbf] {
        let mut bytes = b"\x82\x01\xa1\x64list\xa1\x63new".to_vec();
        bytes.extend(vec![deep; 1 << 20]);
        assert!(decode::<Request>(&bytes).is_err(), "{deep:02x}");
    }
}

#[test]
fn errors_do_not_repeat_the_peers_bytes_at_length() {
    let mut bytes = b"\x82\x01\xa1\x79\x10\x00".to_vec();
    bytes.extend([b'\n'; 0x1000]);
    bytes.push(0xa0);
    let error = decode::<Request>(&bytes).unwrap_err().to_string();
    assert!(error.len() < 400 && !error.contains('\n'), "{error}");
}

#[test]
fn a_secret_is_not_in_the_error_about_its_message() {
    // {"resume": …}, a token of 65 bytes.
    let mut bytes = b"\xa1\x66resume\x58\x41".to_vec();
    bytes.extend([b'Z'; 65]);
    let error = decode::<Hello>(&bytes).unwrap_err().to_string();
    assert!(
        !error.contains("ZZ") && !error.contains("90, 90"),
        "{error}"
    );
}

/// Otherwise a server of the first version would hang up without a word.
#[test]
fn a_hello_has_the_fields_that_the_first_version_requires() {
    #[derive(Deserialize)]
    struct First {
        magic: String,
        oldest: u16,
        newest: u16,
        boot: BootId,
        fabric: bool,
        #[serde(default)]
        resume: Option<Secret>,
    }
    let hello = Hello {
        magic: MAGIC.into(),
        oldest: OLDEST,
        newest: VERSION,
        boot: BootId::from_bytes([7; 16]),
        resume: Secret::new(&[1; 40]),
        agent: String::new(),
        moves: true,
        fabric: false,
    };
    let first: First = decode(&encode(&hello)).unwrap();
    assert_eq!((first.magic, first.boot), (hello.magic, hello.boot));
    assert_eq!((first.oldest, first.newest), (OLDEST, VERSION));
    assert_eq!((first.resume, first.fabric), (hello.resume, false));
}

#[test]
fn names_are_checked() {
    let longest = "x".repeat(MAX_NAME);
    for good in ["a", "A-Z_a.z/0:9", longest.as_str()] {
        check_name(good).unwrap();
    }
    let long = "x".repeat(MAX_NAME + 1);
    for bad in ["", " ", "a\0", "ä", "a\n", "*", "a,b", long.as_str()] {
        assert!(check_name(bad).is_err(), "{bad:?}");
    }
    check_prefix("").unwrap();
    assert!(check_prefix("a*").is_err());
}

#[test]
fn secrets_are_bounded_and_not_shown() {
    let most = Secret::new(&[7; MAX_SECRET]).unwrap();
    assert_eq!(decode::<Secret>(&encode(&most)).unwrap(), most);
    assert!(Secret::new(&[7; MAX_SECRET + 1]).is_none());
    // A byte string of one byte more than is allowed.
    let mut long = vec![0x58, 65];
    long.extend([7; MAX_SECRET + 1]);
    assert!(decode::<Secret>(&long).is_err());
    let shown = format!("{:?}", Secret::new(b"key").unwrap());
    assert_eq!(shown, "Secret(3 bytes, redacted)");
}

#[test]
fn leases_are_read_in_order_and_once_and_bounded() {
    let read = |leases: Vec<u64>| match decode::<Answer>(&encode(&Answer::Expired { leases })) {
        Ok(Answer::Expired { leases }) => Some(leases),
        _ => None,
    };
    assert_eq!(read(vec![u64::MAX, 0, 7, 0, 7]).unwrap(), [0, 7, u64::MAX]);
    let most = MAX_LISTED as u64;
    assert_eq!(read((0..most).collect()).unwrap().len(), MAX_LISTED);
    assert!(read((0..=most).collect()).is_none());
    assert_eq!(read(vec![3; MAX_LISTED + 1]).unwrap(), [3]);
}
