//! The identity of the group that a rank wants to join: a name and an admission.

use ring::hmac;

use super::told::refused;
use crate::driver::random;
use crate::protocol::{Admission, Refused, Texts};
use crate::{Error, PeerName, Refusal, Result, Who};

/// The smallest number of bytes in a group's secret.
pub(super) const LEAST_SECRET: usize = 16;

/// A group: its name and admission, as a keyed digest whose key only this server knows.
///
/// The time of a lookup depends only on the digest, which reveals nothing about a secret without the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Identity([u8; 32]);

/// The key of a server's groups.
pub(crate) struct Keys {
    key: hmac::Key,
    /// The number of rounds numbered so far.
    rounds: u64,
}

impl Keys {
    /// Creates a random key.
    ///
    /// # Errors
    ///
    /// [`System`](crate::MemoryError::System) if the system provides no random bytes.
    pub fn new() -> Result<Self> {
        let bytes: [u8; 32] = random().map_err(|error| Error::system("random bytes", &error))?;
        Ok(Self {
            key: hmac::Key::new(hmac::HMAC_SHA256, &bytes),
            rounds: 0,
        })
    }

    /// Returns the group that `peer` asks for, whether it exists or not.
    ///
    /// # Errors
    ///
    /// A refusal that depends only on the request: the admission does not admit `peer` itself, or is
    /// malformed.
    pub(super) fn group(
        &self,
        name: &str,
        admission: &Admission,
        peer: &PeerName,
    ) -> Result<Identity, Refused> {
        let mut digest = hmac::Context::with_key(&self.key);
        let mut add = |bytes: &[u8]| {
            digest.update(&(bytes.len() as u64).to_be_bytes());
            digest.update(bytes);
        };
        add(name.as_bytes());
        match admission {
            Admission::SamePeer => {
                if *peer == PeerName::Local {
                    let why = "any local process may be peer 'local': admit ranks by a secret";
                    return Err(refused(Refusal::Forbidden, why));
                }
                add(b"same_peer");
                add(peer.to_string().as_bytes());
            }
            Admission::Peers(list) => {
                let who = admitted(list, peer)?;
                let mut patterns: Vec<&str> = who.patterns().iter().collect();
                patterns.sort_unstable();
                patterns.dedup();
                add(b"peers");
                patterns.iter().for_each(|pattern| add(pattern.as_bytes()));
            }
            Admission::Secret(secret) => {
                if secret.expose().len() < LEAST_SECRET {
                    let why = format!("a group's secret has at least {LEAST_SECRET} bytes");
                    return Err(refused(Refusal::Invalid, why));
                }
                add(b"secret");
                add(secret.expose());
            }
        }
        let tag = digest.sign();
        let bytes = tag.as_ref().try_into();
        bytes
            .map(Identity)
            .map_err(|_| refused(Refusal::Internal, ""))
    }

    /// Returns the next round's number: random, so that it reveals nothing about other groups.
    pub(super) fn next_round(&mut self) -> u64 {
        self.rounds += 1;
        self.round(self.rounds)
    }

    fn round(&self, count: u64) -> u64 {
        // A count is shorter than every message of a group, so the inputs never coincide.
        let tag = hmac::sign(&self.key, &count.to_be_bytes());
        tag.as_ref()
            .first_chunk()
            .map_or(count, |bytes| u64::from_be_bytes(*bytes))
    }

    /// Returns the last number.
    #[cfg(test)]
    pub(super) fn last_round(&self) -> u64 {
        self.round(self.rounds)
    }
}

/// Returns the peers of a list, which must admit `peer` itself.
fn admitted(list: &Texts, peer: &PeerName) -> Result<Who, Refused> {
    let invalid = |why: String| refused(Refusal::Invalid, why);
    let who = Who::list(list).map_err(|error| invalid(error.to_string()))?;
    if who.is_anyone() {
        let why = "a group's list of peers has '*': name the peers, or use a secret";
        return Err(invalid(why.into()));
    }
    if !who.admits(peer) {
        let why = format!("the list of peers does not match this rank's own peer name, {peer}");
        return Err(refused(Refusal::Forbidden, why));
    }
    Ok(who)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Secret;

    fn peers(list: &[&str]) -> Admission {
        Admission::Peers(Texts::from_iter(list))
    }

    fn secret(byte: u8, len: usize) -> Admission {
        Admission::Secret(Secret::new(&vec![byte; len]).unwrap())
    }

    #[test]
    fn another_admission_is_another_group() {
        let keys = Keys::new().unwrap();
        let (one, two) = (PeerName::User(1), PeerName::User(2));
        let of = |name: &str, admission: &Admission, peer: &PeerName| {
            keys.group(name, admission, peer).unwrap()
        };
        let same = &Admission::SamePeer;
        let all = [
            of("g", same, &one),
            of("g", same, &two),
            of("h", same, &one),
            of("g", &secret(1, 16), &one),
            of("g", &secret(1, 17), &one),
            of("g", &secret(2, 16), &one),
            of("g", &peers(&["uid:1"]), &one),
            of("g", &peers(&["uid:1", "uid:2"]), &one),
        ];
        for (index, one) in all.iter().enumerate() {
            assert!(!all[..index].contains(one), "{index}");
        }
        assert!(of("g", &secret(1, 16), &one) == of("g", &secret(1, 16), &two));
        let (list, other) = (peers(&["uid:1", "A.b"]), peers(&["a.b", "uid:1", "a.b"]));
        assert!(of("g", &list, &one) == of("g", &other, &one));
        // Another server computes different digests.
        let same = Keys::new().unwrap().group("g", same, &one).unwrap();
        assert!(!all.contains(&same));
    }

    #[test]
    fn what_a_rank_says_alone_refuses_it() {
        let keys = Keys::new().unwrap();
        for (admission, peer, reason) in [
            (Admission::SamePeer, PeerName::Local, "forbidden"),
            (peers(&["uid:1", "*.b"]), PeerName::User(2), "forbidden"),
            (peers(&[]), PeerName::User(2), "forbidden"),
            (peers(&["*"]), PeerName::User(2), "invalid"),
            (peers(&["uid:x"]), PeerName::User(2), "invalid"),
            (secret(0, 15), PeerName::User(2), "invalid"),
        ] {
            let no = keys.group("g", &admission, &peer).err().unwrap();
            assert_eq!(no.reason, reason, "{admission:?}");
        }
    }

    #[test]
    fn numbers_of_rounds_do_not_count() {
        let mut keys = Keys::new().unwrap();
        let numbers: Vec<_> = (0..4).map(|_| keys.next_round()).collect();
        assert!(
            numbers.iter().all(|number| *number > 1 << 32),
            "{numbers:?}"
        );
        assert_eq!(keys.last_round(), numbers[3]);
    }
}
