//! Every error of groups with an example: the test compares their texts with tests/data/errors/group.txt.

use super::Error;

use crate::listing::{Example, compare};

variants!(Errors: Error { Exchange, RanksMissing, RanksDisagree });

fn examples() -> Vec<Error> {
    let missing = |missing, size| Error::RanksMissing {
        group: "job-7".into(),
        missing,
        size,
    };
    vec![
        crate::Error::LimitReached {
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
    let examples: Vec<_> = examples()
        .iter()
        .map(|error| Example {
            variant: Errors::of(error),
            reason: None,
            text: error.to_string(),
            remedy: error.remedy(),
        })
        .collect();
    let of = "egmem::exchange::group::Error";
    compare("group", of, Errors::ALL, &examples);
}

#[test]
fn no_text_of_an_error_steers_a_terminal() {
    let text = "a\u{1b}[2J\u{202e}\n";
    let errors = [
        Error::Exchange(crate::Error::failed(text, text)),
        Error::RanksMissing {
            group: text.into(),
            missing: vec![1],
            size: 2,
        },
        Error::RanksDisagree {
            group: text.into(),
            reasons: vec![text.into(), text.into()],
        },
    ];
    for error in errors {
        let shown = error.to_string();
        assert!(!shown.contains(crate::text::is_unsafe), "{shown:?}");
        assert!(shown.contains("a\\u{1b}[2J\\u{202e}\\n"), "{shown:?}");
    }
}
