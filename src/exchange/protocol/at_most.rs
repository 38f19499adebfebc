//! Lists whose length a peer cannot choose freely.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{MAX_LISTED, Secret};
use crate::share::MAX_PARTS;

/// Bytes of a fabric handle.
const HANDLE: usize = 64;

/// Deserializes the fabric handles of a memory's parts, for `#[serde(deserialize_with)]`.
///
/// An empty secret is one byte of a frame and 24 in memory; one of a handle's length takes at most twice its
/// bytes.
pub(super) fn handles<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Secret>, D::Error> {
    #[derive(Deserialize)]
    #[serde(try_from = "Secret")]
    struct Handle(Secret);
    impl TryFrom<Secret> for Handle {
        type Error = String;
        fn try_from(secret: Secret) -> Result<Self, String> {
            match secret.expose().len() {
                HANDLE => Ok(Self(secret)),
                len => Err(format!("a fabric handle of {len} bytes, not {HANDLE}")),
            }
        }
    }
    let all = at_most::<D, Handle, MAX_PARTS>(deserializer)?;
    Ok(all.into_iter().map(|handle| handle.0).collect())
}

/// Deserializes a list of at most `N`, for `#[serde(deserialize_with)]`.
///
/// An empty text or secret is one byte of a frame and many in memory: a longer list is an error before it is
/// built.
pub(super) fn at_most<'de, D: Deserializer<'de>, T: Deserialize<'de>, const N: usize>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    struct List<T, const N: usize>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for List<T, N> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {N}")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut all = Vec::new();
            while let Some(one) = list.next_element()? {
                if all.len() == N {
                    return Err(de::Error::invalid_length(N + 1, &self));
                }
                all.push(one);
            }
            Ok(all)
        }
    }
    deserializer.deserialize_seq(List::<T, N>(PhantomData))
}

/// Leases in ascending order, each once, at most [`MAX_LISTED`].
///
/// The order bounds the memory for the list: of distinct numbers in CBOR only 24 take one byte and 232 two,
/// so 8 bytes in memory are 3 bytes of a frame.
struct Ascending(Vec<u64>);

impl<'de> Deserialize<'de> for Ascending {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Ascending;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_LISTED} numbers in ascending order")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Ascending, A::Error> {
                let announced = list.size_hint().unwrap_or(0);
                if announced > MAX_LISTED {
                    return Err(de::Error::invalid_length(announced, &self));
                }
                // A few bytes can announce any length: memory is allocated only for numbers that arrive.
                let mut all = Vec::with_capacity(announced.min(1024));
                while let Some(one) = list.next_element::<u64>()? {
                    if all.last().is_some_and(|last| *last >= one) {
                        return Err(de::Error::custom("numbers out of order"));
                    }
                    if all.len() == MAX_LISTED {
                        return Err(de::Error::invalid_length(MAX_LISTED + 1, &self));
                    }
                    all.push(one);
                }
                Ok(Ascending(all))
            }
        }
        deserializer.deserialize_seq(List)
    }
}

/// Deserializes a list of leases, for `#[serde(deserialize_with)]`.
pub(super) fn leases<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    Ascending::deserialize(deserializer).map(|list| list.0)
}

/// Deserializes an optional list of leases.
pub(super) fn some_leases<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<u64>>, D::Error> {
    Option::<Ascending>::deserialize(deserializer).map(|list| list.map(|list| list.0))
}

#[cfg(test)]
mod tests {
    use crate::protocol::{
        Admission, Ask, Create, Hello, Join, MAGIC, MAX_LISTED, OLDEST, Offer, Request, Secret,
        Texts, VERSION, decode, encode,
    };
    use crate::share::MAX_PARTS;

    fn reads(ask: Ask) -> bool {
        let request = Request {
            id: 1,
            ask: Some(ask),
        };
        decode::<Request>(&encode(&request)).is_ok_and(|read| read == request)
    }

    #[test]
    fn lists_are_as_long_as_anybody_needs_and_no_longer() {
        let offer_of = |len, count| Offer {
            group: "g".into(),
            round: 1,
            fabric: vec![Secret::new(&vec![0; len]).unwrap(); count],
            first: 0,
        };
        let create = |count| Create {
            name: "n".into(),
            bytes: 1,
            node: None,
            peers: Texts::from_iter(vec![""; count]),
        };
        let offer = |count| offer_of(64, count);
        let join = |count| Join {
            group: "g".into(),
            rank: 0,
            size: 1,
            admission: Admission::SamePeer,
            can: Vec::new(),
            cannot: vec![String::new(); count],
            memory: None,
            ms: 1,
        };
        assert!(reads(Ask::Offer(offer(MAX_PARTS))) && !reads(Ask::Offer(offer(MAX_PARTS + 1))));
        assert!(!reads(Ask::Offer(offer_of(63, 1))) && !reads(Ask::Offer(offer_of(0, 1))));
        assert!(reads(Ask::Create(create(1024))) && !reads(Ask::Create(create(1025))));
        assert!(reads(Ask::Join(join(64))) && !reads(Ask::Join(join(65))));
    }

    #[test]
    fn lists_of_leases_are_ascending_and_bounded() {
        let reads = |held: Vec<u64>| {
            let hello = Hello {
                magic: MAGIC.into(),
                oldest: OLDEST,
                newest: VERSION,
                boot: crate::share::BootId::from_bytes([1; 16]),
                fabric: true,
                resume: None,
                held: Some(held),
                agent: String::new(),
            };
            decode::<Hello>(&encode(&hello)).is_ok_and(|read| read == hello)
        };
        let most = MAX_LISTED as u64;
        assert!(reads(Vec::new()) && reads(vec![0, 7, u64::MAX]) && reads((0..most).collect()));
        assert!(!reads(vec![7, 7]) && !reads(vec![8, 7]) && !reads((0..=most).collect()));
    }
}
