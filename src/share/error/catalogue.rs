//! Every error of sharing with an example: the test compares their texts with tests/data/errors/share.txt.

use std::time::Duration;

use super::{Distrust, Error, Unreachable};
use crate::MemoryError;
use crate::listing::{Example, compare};

variants!(Errors: Error { Memory, NotTrusted, Unreachable, PeerLost, Protocol, TimedOut });
variants!(Distrusts: Distrust { User, Name, Validity, Revoked, Authority, RevocationList, Certificate, ByPeer });
variants!(Unreachables: Unreachable { NobodyListens, NoSocket, Denied, UnknownHost, Network });

/// Errors of a peer that is not reached or not trusted.
fn of_connecting(peer: &str) -> Vec<Error> {
    let distrusts = [
        (Distrust::User, "user 1001 is not on the list"),
        (
            Distrust::Name,
            "its certificate is for node-a, not for 10.0.3.7",
        ),
        (Distrust::Validity, "its certificate has expired"),
        (Distrust::Revoked, "its certificate is revoked"),
        (
            Distrust::Authority,
            "its certificate is from an authority that is not trusted here",
        ),
        (
            Distrust::RevocationList,
            "the revocation list here has expired",
        ),
        (Distrust::Certificate, "no TLS 1.3 connection to it"),
        (
            Distrust::ByPeer,
            "it does not trust this process: the certificate is revoked",
        ),
    ];
    let causes: Vec<_> = distrusts
        .iter()
        .map(|(cause, _)| Distrusts::of(cause))
        .collect();
    assert_eq!(causes, Distrusts::ALL, "examples of NotTrusted");
    let unreachables = [
        (
            Unreachable::NobodyListens,
            "Connection refused (os error 111)",
        ),
        (
            Unreachable::NoSocket,
            "No such file or directory (os error 2)",
        ),
        (Unreachable::Denied, "Permission denied (os error 13)"),
        (Unreachable::UnknownHost, "Name or service not known"),
        (Unreachable::Network, "No route to host (os error 113)"),
    ];
    let causes: Vec<_> = unreachables
        .iter()
        .map(|(cause, _)| Unreachables::of(cause))
        .collect();
    assert_eq!(causes, Unreachables::ALL, "examples of Unreachable");
    let distrusted = distrusts.map(|(cause, why)| Error::NotTrusted {
        peer: peer.into(),
        cause,
        why: why.into(),
    });
    let unreached = unreachables.map(|(cause, why)| Error::Unreachable {
        peer: peer.into(),
        cause,
        why: why.into(),
    });
    distrusted.into_iter().chain(unreached).collect()
}

#[test]
fn the_listing_shows_every_error_as_it_reads() {
    let peer = || "node-a (10.0.3.7:7740)".to_owned();
    let mut errors = of_connecting(&peer());
    errors.extend([
        MemoryError::invalid_of("size", "it is 0", "1 byte or more").into(),
        Error::PeerLost {
            peer: peer(),
            why: "Connection reset by peer (os error 104)".into(),
        },
        Error::Protocol {
            peer: peer(),
            detail: "a frame of 16777217 bytes".into(),
        },
        Error::TimedOut {
            what: "the fetch of weights".into(),
            after: Duration::from_secs(5),
        },
    ]);
    let examples: Vec<_> = errors
        .iter()
        .map(|error| Example {
            variant: Errors::of(error),
            reason: None,
            text: error.to_string(),
            remedy: error.remedy(),
        })
        .collect();
    compare("share", "egmem::share::Error", Errors::ALL, &examples);
}
