//! Errors of groups.

use egmem::exchange::Error as ExchangeError;
use egmem::exchange::group::Error;

use crate::errors::listing::compare;

fn examples() -> Vec<Error> {
    let missing = |missing, size| Error::RanksMissing {
        group: "job-7".into(),
        missing,
        size,
    };
    vec![
        ExchangeError::LimitReached {
            what: "open files",
            limit: 1024,
        }
        .into(),
        missing(vec![1], 2),
        missing(vec![1, 3], 4),
        Error::RanksDisagree {
            group: "job-7".into(),
            reasons: vec![
                "rank 0: a barrier".into(),
                "rank 1: a gather of 16 bytes".into(),
            ],
        },
    ]
}

#[test]
fn the_listing_shows_every_error_as_it_reads() {
    let file = "exchange/group/error.rs";
    compare("group", "egmem::exchange::group", file, &examples(), |_| {
        None
    });
}

/// Returns errors of every kind that contains text from elsewhere.
pub fn with_text(text: &str) -> Vec<Error> {
    vec![
        ExchangeError::failed(text, text).into(),
        Error::RanksMissing {
            group: text.into(),
            missing: vec![1],
            size: 2,
        },
        Error::RanksDisagree {
            group: text.into(),
            reasons: vec![text.into(), text.into()],
        },
    ]
}
