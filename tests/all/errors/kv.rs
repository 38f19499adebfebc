//! Errors of a KV-cache tier.

use egmem::driver::{Call, Code};
use egmem::kv::{Error, Key};
use egmem::{DriverError, Error as MemoryError};

use crate::errors::listing::compare;

fn examples() -> Vec<Error> {
    let in_use = |is_elsewhere| Error::InUse {
        pid: 4711,
        is_elsewhere,
    };
    let growing = |is_growing| Error::Full {
        needed: 8,
        pages: 100,
        available: 3,
        pinned: 10,
        writing: 7,
        missing: 80,
        is_growing,
        evicted: Vec::new(),
    };
    vec![
        MemoryError::invalid_of("pages", "0 pages", "1 to 1073741824").into(),
        Error::Full {
            needed: 8,
            pages: 100,
            available: 3,
            pinned: 90,
            writing: 7,
            missing: 0,
            is_growing: false,
            evicted: Vec::new(),
        },
        growing(true),
        growing(false),
        Error::NotReady {
            key: Key::new([0xab; 32]),
            index: 2,
        },
        Error::WrongState {
            page: 7,
            is: "free",
            need: "being written",
        },
        in_use(false),
        in_use(true),
        Error::TooManyMembers { members: 64 },
        Error::Busy { pid: 4711 },
        Error::Damaged,
        Error::UnusableMethod {
            what: "a simulated GPU runs no kernels",
            source: Some(DriverError {
                call: Call::ModuleLoadData,
                code: Code::INVALID_PTX,
            }),
        },
        Error::NotATier {
            why: "it begins with other bytes than a tier's header".into(),
            is_other_version: false,
        },
        Error::NotATier {
            why: "its format is version 2, not 3".into(),
            is_other_version: true,
        },
        Error::OtherTier {
            what: "page_bytes",
            found: "4096".into(),
            wanted: "8192".into(),
        },
        Error::CopyFailed { pages: 4 },
        Error::StillCopying { pages: 4 },
    ]
}

#[test]
fn the_listing_shows_every_error_as_it_reads() {
    compare("kv", "egmem::kv", "kv/error.rs", &examples(), |_| None);
}

/// Returns errors of every kind that contains text from elsewhere.
pub fn with_text(text: &str) -> Vec<Error> {
    vec![
        MemoryError::invalid("key", text).into(),
        Error::NotATier {
            why: text.into(),
            is_other_version: false,
        },
        Error::OtherTier {
            what: "page_bytes",
            found: text.into(),
            wanted: text.into(),
        },
    ]
}
