//! The protocol's codec: there and back, hostile bytes, the fuzzers' seeds, the specification.

mod arbitrary;
mod samples;
mod seeds;
mod specification;

use std::fmt::Debug;

use egmem::exchange::Error;
use egmem::exchange::protocol::*;
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

fn there_and_back<T>(message: &T)
where
    T: Serialize + DeserializeOwned + PartialEq + Debug,
{
    let bytes = encode(message);
    assert_eq!(&decode::<T>(&bytes).unwrap(), message);
    // Less of it is nothing, more is too much.
    for cut in 0..bytes.len() {
        decode::<T>(&bytes[..cut]).unwrap_err();
    }
    let mut more = bytes.to_vec();
    more.push(0);
    decode::<T>(&more).unwrap_err();
}

/// All input gets an answer: this protocol's error or a message that can be sent.
fn survive<T>(bytes: &[u8])
where
    T: Serialize + DeserializeOwned + PartialEq + Debug,
{
    match decode::<T>(bytes) {
        Ok(message) => assert_eq!(decode::<T>(&encode(&message)).unwrap(), message),
        Err(error) => assert!(
            matches!(error, Error::Share(egmem::share::Error::Protocol { .. })),
            "{error}"
        ),
    }
}

fn survive_all(bytes: &[u8]) {
    survive::<Hello>(bytes);
    survive::<Greeting>(bytes);
    survive::<Request>(bytes);
    survive::<FromServer>(bytes);
}

#[test]
fn samples_go_there_and_back() {
    for (_, message) in samples::hellos() {
        there_and_back(&message);
    }
    for (_, message) in samples::greetings() {
        there_and_back(&message);
    }
    for (_, message) in samples::requests() {
        there_and_back(&message);
    }
    for (_, message) in samples::from_server() {
        there_and_back(&message);
    }
}

/// CBOR that is well formed, and mostly no message.
fn cbor() -> impl Strategy<Value = ciborium::Value> {
    use ciborium::Value;
    let key = prop_oneof![
        Just("id"),
        Just("fetch"),
        Just("names"),
        Just("welcome"),
        Just("name"),
        Just("granted"),
        Just("memory"),
        Just("ended"),
        Just("why"),
        Just("handles"),
        Just("ping"),
        Just("new"),
    ];
    let leaf = prop_oneof![
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        proptest::collection::vec(any::<u8>(), 0..80).prop_map(Value::Bytes),
        Just(Value::Null),
    ];
    leaf.prop_recursive(5, 64, 8, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::Array),
            proptest::collection::vec((key.clone(), inner), 0..6).prop_map(|entries| {
                let entry = |(key, value): (&str, Value)| (Value::from(key), value);
                Value::Map(entries.into_iter().map(entry).collect())
            }),
        ]
    })
}

proptest! {
    #[test]
    fn hellos(message in arbitrary::hello()) {
        there_and_back(&message);
    }

    #[test]
    fn greetings(message in arbitrary::greeting()) {
        there_and_back(&message);
    }

    #[test]
    fn requests(message in arbitrary::request()) {
        there_and_back(&message);
    }

    #[test]
    fn replies_and_notices(message in arbitrary::from_server()) {
        there_and_back(&message);
    }

    #[test]
    fn bytes_of_any_kind(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        survive_all(&bytes);
    }

    #[test]
    fn bytes_that_were_a_message(
        message in arbitrary::from_server(), at in any::<prop::sample::Index>(), byte: u8,
    ) {
        let mut bytes = encode(&message).to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        survive_all(&bytes);
    }

    #[test]
    fn well_formed_items_of_any_kind(value in cbor()) {
        let mut bytes = Vec::new();
        ciborium::into_writer(&value, &mut bytes).unwrap();
        survive_all(&bytes);
    }

    /// Fields of a newer version are skipped, wherever they are.
    #[test]
    fn fields_that_are_not_known(message in arbitrary::request(), extra in cbor()) {
        let bytes = encode(&message);
        let mut value: ciborium::Value = ciborium::from_reader(&bytes[..]).unwrap();
        fn add(value: &mut ciborium::Value, extra: &ciborium::Value) {
            match value {
                ciborium::Value::Map(entries) => {
                    for (_, value) in entries.iter_mut() {
                        add(value, extra);
                    }
                    entries.push(("not known".into(), extra.clone()));
                }
                ciborium::Value::Array(items) => items.iter_mut().for_each(|item| add(item, extra)),
                _ => {}
            }
        }
        // But not in an enumeration, which is a map of one: the request itself.
        let request = &mut value.as_array_mut().expect("an array")[1];
        if let Some([(_, body)]) = request.as_map_mut().map(Vec::as_mut_slice) {
            add(body, &extra);
            let mut more = Vec::new();
            ciborium::into_writer(&value, &mut more).unwrap();
            prop_assert_eq!(decode::<Request>(&more).unwrap(), message);
        }
    }
}
