//! Lists that a peer may make only so long.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Reads a list of at most `N`, for `#[serde(deserialize_with)]`.
///
/// A text or a secret of no bytes is one byte of a frame and many in memory: what is longer than
/// anybody needs is an error before it is built.
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

#[cfg(test)]
mod tests {
    use crate::exchange::protocol::{Ask, Create, Join, Offer, Request, Secret, decode, encode};
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
        let offer = |count| Offer {
            group: "g".into(),
            round: 1,
            fabric: vec![Secret::new(&[]).unwrap(); count],
            first: 0,
        };
        let create = |count| Create {
            name: "n".into(),
            bytes: 1,
            node: None,
            peers: vec![String::new(); count],
        };
        let join = |count| Join {
            group: "g".into(),
            rank: 0,
            size: 1,
            can: Vec::new(),
            cannot: vec![String::new(); count],
            memory: None,
            ms: 1,
        };
        assert!(reads(Ask::Offer(offer(MAX_PARTS))) && !reads(Ask::Offer(offer(MAX_PARTS + 1))));
        assert!(reads(Ask::Create(create(1024))) && !reads(Ask::Create(create(1025))));
        assert!(reads(Ask::Join(join(64))) && !reads(Ask::Join(join(65))));
    }
}
