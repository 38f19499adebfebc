//! The names that remedies have in Python and C.

use std::borrow::Cow;

/// A language besides Rust whose programs read errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Language {
    /// Python.
    Python,
    /// C and C++.
    C,
}

/// What remedies call a thing: in Rust and on the command line, in Python, in C. A text that does as well in all of them needs no
/// row: "a larger limit".
const NAMES: &[[&str; 3]] = &[
    [
        "`Driver::simulated`, `--sim`",
        "`egmem.simulated(\"gh200\")`",
        "`egm_driver_simulated`",
    ],
    [
        "`overcommit(true)`",
        "`overcommit=True`",
        "`EGM_OVERCOMMIT`",
    ],
    [
        ", or later with `set_access`",
        ": `access_by`, or `host` for the CPU",
        ", or later with `egm_buffer_set_access`",
    ],
    [
        "`--server-user` and `share::Peers`",
        "`server_users`",
        "`server_user`",
    ],
    [
        "`--expect-peer`, `Tls::expect_peer`",
        "`expect_peer`",
        "`expect_peer`",
    ],
    // Python connects to other machines with TLS alone.
    [
        ", or allow plain TCP, which anyone on the network path can read: `--plain-anywhere`, `plain_anywhere = true` of \
         `egmem serve`, `Security::PlainAnywhere`",
        ": `ca`, `cert` and `key`",
        ", or allow plain TCP, which anyone on the network path can read: `EGM_PLAIN_ANYWHERE`",
    ],
    ["`--read-only`", "`mode=\"r\"`", "`EGM_READ_ONLY`"],
    ["`CopyMethod::Auto`", "`method=\"auto\"`", "`auto`"],
];

impl Language {
    /// Returns a remedy with the names that this language has.
    pub fn adapt(self, remedy: &str) -> Cow<'_, str> {
        let mut adapted = Cow::Borrowed(remedy);
        for [rust, python, c] in NAMES {
            if adapted.contains(rust) {
                let name = match self {
                    Self::Python => python,
                    Self::C => c,
                };
                adapted = Cow::Owned(adapted.replace(rust, name));
            }
        }
        adapted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_differ_are_replaced() {
        let remedy = "choose another node, or allow it with `overcommit(true)`";
        let python = "choose another node, or allow it with `overcommit=True`";
        assert_eq!(Language::Python.adapt(remedy), python);
        assert!(Language::C.adapt(remedy).ends_with("`EGM_OVERCOMMIT`"));
        assert!(matches!(Language::C.adapt("free blocks"), Cow::Borrowed(_)));
    }
}
