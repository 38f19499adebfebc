//! Errors of sharing.

use std::time::Duration;

use egmem::Error as MemoryError;
use egmem::share::{Distrust, Error, Unreachable};

use crate::errors::listing::{compare, expect_all};

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
    let causes = distrusts.map(|(cause, _)| cause);
    expect_all("share/error.rs", "Distrust", &causes);
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
    let causes = unreachables.map(|(cause, _)| cause);
    expect_all("share/error.rs", "Unreachable", &causes);
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
    let file = "share/error.rs";
    compare("share", "egmem::share", file, &errors, |_| None);
}

/// Returns errors of every kind that contains text from elsewhere.
pub fn with_text(t: &str) -> Vec<Error> {
    let s = || t.to_owned();
    vec![
        MemoryError::invalid("argument", t).into(),
        Error::NotTrusted {
            peer: s(),
            cause: Distrust::Name,
            why: s(),
        },
        Error::Unreachable {
            peer: s(),
            cause: Unreachable::Network,
            why: s(),
        },
        Error::PeerLost {
            peer: s(),
            why: s(),
        },
        Error::Protocol {
            peer: s(),
            detail: s(),
        },
        Error::TimedOut {
            what: s(),
            after: Duration::ZERO,
        },
    ]
}
