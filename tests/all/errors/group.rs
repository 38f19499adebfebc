//! Errors of groups.

use egmem::exchange::Error as ExchangeError;
use egmem::exchange::group::Error;

use crate::errors::listing::compare;

fn examples() -> Vec<Error> {
    let missing = |missing, size| Error::RanksMissing { missing, size };
    vec![
        ExchangeError::LimitReached {
            what: "open files",
            limit: 1024,
        }
        .into(),
        missing(vec![1], 2),
        missing(vec![1, 3], 4),
        Error::RanksFailed {
            reasons: vec!["rank 1: no IMEX channel".into()],
        },
        Error::Forged { rank: 3 },
        Error::all_gather("MPI_Allgather returned 15"),
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
        Error::RanksFailed {
            reasons: vec![text.into(), text.into()],
        },
        Error::all_gather(text),
    ]
}
