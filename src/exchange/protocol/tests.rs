//! Round trips of every message, and invalid messages.

use super::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_request_is_a_map_of_its_id_and_one_choice() {
    let request = Request {
        id: 7,
        ask: Some(Ask::Release(Release { lease: 9 })),
    };
    let bytes = encode(&request);
    assert_eq!(hex(&bytes), "a2626964076772656c65617365a1656c6561736509");
    assert_eq!(decode::<Request>(&bytes).unwrap(), request);
}

#[test]
fn unknown_choices_and_fields_are_skipped() {
    // {"new": [1, {"a": null}], "id": 1}
    let bytes = b"\xa2\x63new\x82\x01\xa1\x61a\xf6\x62id\x01";
    assert_eq!(
        decode::<Request>(bytes).unwrap(),
        Request { id: 1, ask: None }
    );
    assert_eq!(
        decode::<FromServer>(bytes).unwrap(),
        FromServer::Reply(Reply {
            id: 1,
            answer: None
        })
    );
    assert_eq!(
        decode::<FromServer>(b"\xa1\x63new\x01").unwrap(),
        FromServer::Notice(Notice(None))
    );
    // {"id": 1, "list": {"new": 2.0}}
    let bytes = b"\xa2\x62id\x01\x64list\xa1\x63new\xf9\x40\x00";
    assert_eq!(
        decode::<Request>(bytes).unwrap().ask,
        Some(Ask::List(List::default()))
    );
}

#[test]
fn two_choices_are_an_error() {
    for bytes in [
        &b"\xa3\x62id\x01\x64ping\xa0\x64list\xa0"[..],
        b"\xa3\x62id\x01\x64ping\xa0\x64ping\xa0",
        b"\xa3\x62id\x01\x62id\x01\x64ping\xa0",
    ] {
        assert!(decode::<Request>(bytes).is_err(), "{bytes:02x?}");
    }
    // An answer and an event; an answer without an id; an event with one.
    for bytes in [
        &b"\xa3\x62id\x01\x64done\xa0\x67closing\xa1\x62ms\x01"[..],
        b"\xa1\x64done\xa0",
        b"\xa2\x62id\x01\x67closing\xa1\x62ms\x01",
    ] {
        assert!(decode::<FromServer>(bytes).is_err(), "{bytes:02x?}");
    }
    assert!(decode::<Greeting>(b"\xa0").is_err());
}

#[test]
fn errors_do_not_repeat_the_peers_bytes_at_length() {
    let mut bytes = b"\xa1\x62id\x79\x10\x00".to_vec();
    bytes.extend([b'\n'; 0x1000]);
    let error = decode::<Request>(&bytes).unwrap_err().to_string();
    assert!(error.len() < 400 && !error.contains('\n'), "{error}");
}

#[test]
fn a_secret_is_not_in_the_error_about_its_message() {
    // A ticket of 65 bytes.
    let mut bytes = b"\xa2\x62id\x01\x66redeem\xa1\x66ticket\x58\x41".to_vec();
    bytes.extend([b'Z'; 65]);
    let error = decode::<Request>(&bytes).unwrap_err().to_string();
    assert!(
        !error.contains("ZZ") && !error.contains("90, 90"),
        "{error}"
    );
}
