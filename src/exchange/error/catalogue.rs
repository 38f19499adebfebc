//! Every error of the exchange with an example: the test compares their texts with
//! tests/data/errors/exchange.txt.

use super::{End, Error, Mismatch, Refusal};
use crate::driver::{Call, Code, Location, NodeId};
use crate::{MemoryError, ShareError};

use crate::listing::{Example, compare};

variants!(Errors: Error {
    Share, Insecure, Tls, Refused, Mismatched, Stale, Import, DataPlane, NoCommonHandle, LimitReached, Directory,
});
variants!(Refusals: Refusal {
    NotFound, Forbidden, ReadOnly, Configured, NotTrusted, Unsupported, Version, Invalid, Limit, Quota, Exists, WrongOwner, Closing,
    NoCommonHandle, RanksDisagree, Expired, Stale, NoMemory, TimedOut, Internal, Other,
});
variants!(Mismatches: Mismatch { Owner, Size, Node });
variants!(Ends: End { Here, There, Between });

fn examples() -> Vec<Error> {
    let peer = || "node-a (10.0.3.7:7740)".to_owned();
    let name = || "weights".to_owned();
    let mut errors = vec![
        Error::Share(ShareError::PeerLost {
            peer: peer(),
            why: "Connection reset by peer (os error 104)".into(),
        }),
        Error::invalid(
            "publication",
            "it was withdrawn, which gave its memory back",
        ),
        Error::Insecure {
            address: "10.0.3.7:7740".into(),
        },
        Error::Tls {
            what: "certs/node-a.pem".into(),
            detail: "no certificate in it".into(),
        },
        Error::Stale {
            what: "the lease of weights".into(),
            why: "the exporter has restarted".into(),
        },
        Error::DataPlane {
            what: name(),
            peer: peer(),
            detail: "words written here do not arrive there".into(),
        },
        Error::NoCommonHandle {
            reasons: vec!["rank 1 has no IMEX channel".into()],
        },
        Error::LimitReached {
            what: "thread caches",
            limit: 1024,
        },
        Error::Directory {
            directory: "etcd at 10.0.3.9:2379".into(),
            detail: "it does not answer".into(),
        },
    ];
    let mismatches = [
        Mismatch::Owner {
            expected: "node-a".into(),
            found: "node-c".into(),
        },
        Mismatch::Size {
            expected: 4 << 20,
            found: 2 << 20,
        },
        Mismatch::Node {
            expected: NodeId(0),
            found: vec![Location::HostNuma(1)],
        },
    ];
    let kinds: Vec<_> = mismatches.iter().map(Mismatches::of).collect();
    assert_eq!(kinds, Mismatches::ALL, "examples of Mismatched");
    errors.extend(mismatches.map(|what| Error::Mismatched {
        name: name(),
        peer: peer(),
        what: Box::new(what),
    }));
    let ends = [End::Here, End::There, End::Between];
    let places: Vec<_> = ends.iter().map(Ends::of).collect();
    assert_eq!(places, Ends::ALL, "examples of Import");
    errors.extend(ends.map(|end| Error::Import {
        what: name(),
        peer: peer(),
        end,
        source: Box::new(MemoryError::driver(
            Call::MemImportFromShareableHandle,
            Code::INVALID_VALUE,
        )),
    }));
    errors.extend(refusals().into_iter().map(|reason| Error::Refused {
        peer: peer(),
        what: "the fetch of weights".into(),
        reason,
        detail: String::new(),
    }));
    errors
}

/// Every reason for which a peer refuses a request, in the order of the enum.
fn refusals() -> Vec<Refusal> {
    let known = Refusal::WORDS.into_iter().map(|(reason, ..)| reason);
    let reasons: Vec<_> = known
        .chain([Refusal::Other("of_tomorrow".into())])
        .collect();
    let names: Vec<_> = reasons.iter().map(Refusals::of).collect();
    assert_eq!(names, Refusals::ALL, "Refusal::WORDS");
    reasons
}

#[test]
fn the_listing_shows_every_error_as_it_reads() {
    let examples: Vec<_> = examples()
        .iter()
        .map(|error| Example {
            variant: Errors::of(error),
            reason: match error {
                Error::Refused { reason, .. } => Some(reason.word().into()),
                _ => None,
            },
            text: error.to_string(),
            remedy: error.remedy(),
        })
        .collect();
    compare("exchange", "egmem::exchange::Error", Errors::ALL, &examples);
}
