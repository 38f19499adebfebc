//! Errors of the exchange.

use egmem::Error as MemoryError;
use egmem::driver::{Call, Code, Location, NodeId};
use egmem::exchange::{End, Error, Mismatch, Refusal};
use egmem::share::Error as ShareError;
use proc_macro2::TokenTree;
use syn::Item;

use crate::errors::listing::{compare, expect_all, parse, variant};

fn examples() -> Vec<Error> {
    let peer = || "node-a (10.0.3.7:7740)".to_owned();
    let name = || "weights".to_owned();
    let missing = |missing, size| Error::RanksMissing { missing, size };
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
        Error::TlsAtOneEnd {
            peer: peer(),
            here: false,
        },
        Error::TlsAtOneEnd {
            peer: peer(),
            here: true,
        },
        Error::Interrupted,
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
        missing(vec![1], 2),
        missing(vec![1, 3], 4),
        Error::RanksFailed {
            reasons: vec!["rank 1: no IMEX channel".into()],
        },
        Error::Forged { rank: 3 },
        Error::all_gather("MPI_Allgather returned 15"),
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
    expect_all("exchange/error.rs", "Mismatch", &mismatches);
    errors.extend(mismatches.map(|what| Error::Mismatched {
        name: name(),
        peer: peer(),
        what: Box::new(what),
    }));
    let ends = [End::Here, End::There, End::Between, End::SameMachine];
    expect_all("exchange/error.rs", "End", &ends);
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

/// Returns the names that the use of the macro `by` in the file `file` of `src/` defines: each is before a `=`.
///
/// # Panics
/// If the file does not use it.
fn defined(file: &str, by: &str) -> Vec<String> {
    let is_use = |item: &Item| match item {
        Item::Macro(item) => item.mac.path.is_ident(by),
        _ => false,
    };
    let items = parse(file).items;
    let Some(Item::Macro(item)) = items.into_iter().find(is_use) else {
        panic!("no use of {by} in {file}");
    };
    let tokens: Vec<_> = item.mac.tokens.into_iter().collect();
    let names = tokens.windows(2).filter_map(|two| match two {
        [TokenTree::Ident(name), TokenTree::Punct(is)] if is.as_char() == '=' => {
            Some(name.to_string())
        }
        _ => None,
    });
    names.collect()
}

/// Every reason for which a peer refuses a request, in the order of the enum: the word of each but the last is its
/// name.
fn refusals() -> Vec<Refusal> {
    let names = defined("exchange/error.rs", "refusals");
    let known = names.iter().map(|name| Refusal::from_word(&word(name)));
    let reasons: Vec<_> = known
        .chain([Refusal::Other("of_tomorrow".into())])
        .collect();
    let found: Vec<_> = reasons.iter().map(variant).collect();
    assert_eq!(found[..names.len()], names);
    reasons
}

/// Returns the lower-case word for a variant's name: `NotFound` is `not_found`.
fn word(name: &str) -> String {
    let mut word = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !word.is_empty() {
            word.push('_');
        }
        word.extend(c.to_lowercase());
    }
    word
}

#[test]
fn the_listing_shows_every_error_as_it_reads() {
    let reason = |error: &Error| match error {
        Error::Refused { reason, .. } => Some(reason.word().into()),
        _ => None,
    };
    let file = "exchange/error.rs";
    compare("exchange", "egmem::exchange", file, &examples(), reason);
}

/// Returns errors of every kind that contains text from elsewhere.
pub fn with_text(t: &str) -> Vec<Error> {
    let s = || t.to_owned();
    vec![
        Error::invalid_of("argument", t, t),
        Error::Insecure { address: s() },
        Error::Tls {
            what: s(),
            detail: s(),
        },
        Error::TlsAtOneEnd {
            peer: s(),
            here: false,
        },
        Error::Refused {
            peer: s(),
            what: s(),
            reason: Refusal::from_word(t),
            detail: s(),
        },
        Error::Stale {
            what: s(),
            why: s(),
        },
        Error::Import {
            what: s(),
            peer: s(),
            end: End::Here,
            source: Box::new(MemoryError::failed(s(), s())),
        },
        Error::DataPlane {
            what: s(),
            peer: s(),
            detail: s(),
        },
        Error::NoCommonHandle {
            reasons: vec![s(), s()],
        },
        Error::Directory {
            directory: s(),
            detail: s(),
        },
        Error::RanksFailed {
            reasons: vec![s(), s()],
        },
        Error::all_gather(t),
    ]
}
