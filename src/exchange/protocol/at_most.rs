//! Lists whose length a peer cannot choose freely.

use std::fmt;

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{MAX_LISTED, Texts};

/// Appends an element to a list, or refuses it.
type Push<A, T> = fn(&mut A, T) -> Result<(), String>;

/// Deserializes a list of at most `most` elements.
///
/// An empty text or secret is one byte of a frame and many in memory: a longer list is an error before it is
/// built.
fn list<'de, D: Deserializer<'de>, T: Deserialize<'de>, A: Default>(
    deserializer: D,
    (most, noun): (usize, &'static str),
    push: Push<A, T>,
) -> Result<A, D::Error> {
    struct List<A, T> {
        most: usize,
        noun: &'static str,
        push: Push<A, T>,
    }
    impl<'de, T: Deserialize<'de>, A: Default> Visitor<'de> for List<A, T> {
        type Value = A;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {} {}", self.most, self.noun)
        }

        fn visit_seq<S: SeqAccess<'de>>(self, mut list: S) -> Result<A, S::Error> {
            let announced = list.size_hint().unwrap_or(0);
            if announced > self.most {
                return Err(de::Error::invalid_length(announced, &self));
            }
            let (mut all, mut count) = (A::default(), 0);
            while let Some(one) = list.next_element()? {
                if count == self.most {
                    return Err(de::Error::invalid_length(count + 1, &self));
                }
                (self.push)(&mut all, one).map_err(de::Error::custom)?;
                count += 1;
            }
            Ok(all)
        }
    }
    deserializer.deserialize_seq(List { most, noun, push })
}

/// Deserializes a list of at most `N` texts, for `#[serde(deserialize_with)]`.
pub(super) fn texts<'de, D: Deserializer<'de>, const N: usize>(
    deserializer: D,
) -> Result<Texts, D::Error> {
    let texts = list(
        deserializer,
        (N, "texts"),
        |all: &mut Texts, text: String| {
            all.push(&text);
            Ok(())
        },
    );
    texts.map(Texts::shrunk)
}

/// Deserializes leases in ascending order, each once, at most [`MAX_LISTED`].
///
/// The order bounds the memory for the list: of distinct numbers in CBOR only 24 take one byte and 232 two,
/// so 8 bytes in memory are 3 bytes of a frame.
pub(super) fn leases<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    list(
        deserializer,
        (MAX_LISTED, "numbers in ascending order"),
        |all: &mut Vec<u64>, one| {
            if all.last().is_some_and(|last| *last >= one) {
                return Err("numbers out of order".into());
            }
            all.push(one);
            Ok(())
        },
    )
}

#[cfg(test)]
mod tests {
    use crate::protocol::{Ask, Create, Leases, MAX_LISTED, Request, Texts, decode, encode};

    fn reads(ask: Ask) -> bool {
        let request = (1, ask);
        decode::<Request>(&encode(&request)).is_ok_and(|read| read == request)
    }

    #[test]
    fn lists_are_as_long_as_anybody_needs_and_no_longer() {
        let create = |count| Create {
            name: "n".into(),
            bytes: 1,
            node: None,
            peers: Texts::from_iter(vec![""; count]),
        };
        assert!(reads(Ask::Create(create(1024))) && !reads(Ask::Create(create(1025))));
    }

    #[test]
    fn a_received_text_with_nuls_is_still_one_text() {
        // A value, because `Texts` would replace the NULs before they are encoded.
        let peers = ["a\0b", "\0\0", "c\u{7}"];
        let ask = serde_json::json!({"name": "n", "bytes": 1, "peers": peers});
        let mut bytes = Vec::new();
        ciborium::into_writer(&serde_json::json!([1, {"create": ask}]), &mut bytes).unwrap();
        assert!(bytes.windows(3).any(|sent| sent == b"a\0b"));
        let (_, Ask::Create(read)) = decode::<Request>(&bytes).unwrap() else {
            panic!("another request");
        };
        let texts: Vec<_> = read.peers.iter().collect();
        assert_eq!(texts, ["a\u{1}b", "\u{1}\u{1}", "c\u{7}"]);
    }

    #[test]
    fn lists_of_leases_are_ascending_and_bounded() {
        let reads = |held: Vec<u64>| {
            let leases = Leases { leases: held };
            decode::<Leases>(&encode(&leases)).is_ok_and(|read| read == leases)
        };
        let most = MAX_LISTED as u64;
        assert!(reads(Vec::new()) && reads(vec![0, 7, u64::MAX]) && reads((0..most).collect()));
        assert!(!reads(vec![7, 7]) && !reads(vec![8, 7]) && !reads((0..=most).collect()));
    }
}
