//! Every error with an example, as `tests/data/errors` lists them, and no error's text steers a terminal.

#[cfg(feature = "portable")]
mod exchange;
#[cfg(feature = "portable")]
mod kv;
mod listing;
mod memory;
#[cfg(feature = "portable")]
mod share;

use egmem::text::is_unsafe;
use egmem::{Explain, Explained};
use proptest::prelude::*;

fn check<E: Explain>(errors: Vec<E>) {
    for error in errors {
        let shown = error.to_string();
        assert!(!shown.contains(is_unsafe), "{shown:?}");
        let shown = Explained(&error).to_string();
        assert!(!shown.contains(is_unsafe), "{shown:?}");
    }
}

proptest! {
    #[test]
    fn no_text_of_an_error_steers_a_terminal(text in "[\\x00-\\x1f\\x7f-\\u{9f}\u{61c}\u{200e}-\u{200f}\u{2028}-\u{202e}\u{2066}-\u{2069}a-zä]{1,24}") {
        check(memory::with_text(&text));
        #[cfg(feature = "portable")]
        check(share::with_text(&text));
        #[cfg(feature = "portable")]
        check(kv::with_text(&text));
        #[cfg(feature = "portable")]
        {
            check(exchange::with_text(&text));
            let refusal = egmem::exchange::Refusal::from_word(&text).to_string();
            prop_assert!(!refusal.contains(is_unsafe), "{refusal:?}");
        }
    }
}
