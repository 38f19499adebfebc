//! An accepted message encodes and decodes to the same message; other bytes give this protocol's error.

use std::fmt::Debug;

use egmem::exchange::Error;
use egmem::exchange::protocol::{decode, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub fn run<T>(bytes: &[u8])
where
    T: Serialize + DeserializeOwned + PartialEq + Debug,
{
    match decode::<T>(bytes) {
        Ok(message) => {
            let again = encode(&message);
            assert_eq!(decode::<T>(&again).expect("our own message"), message);
        }
        Err(Error::Share(egmem::share::Error::Protocol { detail, .. })) => {
            assert!(detail.chars().count() <= 170);
        }
        Err(other) => panic!("another error: {other}"),
    }
}
