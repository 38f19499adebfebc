//! Formats errors for people.

use std::borrow::Cow;
use std::fmt;

use super::{DriverError, Error};
use crate::NodeId;

pub(super) fn list(nodes: &[NodeId]) -> String {
    nodes
        .iter()
        .map(NodeId::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// An error of any of egmem's crates, which says what to do about it: for [`Explained`].
pub trait Explain: fmt::Display {
    /// Returns what to do about the error, in a sentence; nothing where the error's text says it.
    fn remedy(&self) -> &'static str;

    /// Returns the failed driver call behind the error, unless the error's text has it.
    fn untold_call(&self) -> Option<DriverError>;
}

impl Explain for Error {
    fn remedy(&self) -> &'static str {
        self.remedy()
    }

    fn untold_call(&self) -> Option<DriverError> {
        match self {
            Self::Driver(_) | Self::ContextLost { .. } => None,
            other => other.driver_error(),
        }
    }
}

/// An error with its remedy, for display: `{error}; {remedy}`, or `{error}` without a remedy.
#[derive(Debug)]
pub struct Explained<'a, E: ?Sized = Error>(pub &'a E);

impl<E: Explain + ?Sized> Explained<'_, E> {
    /// Returns the text without the remedy: the error's, and the failed driver call behind it.
    pub fn message(&self) -> String {
        match self.0.untold_call() {
            Some(source) => format!("{} ({source})", self.0),
            None => self.0.to_string(),
        }
    }

    /// Returns the remedy with the names that a language has.
    pub fn remedy_in(&self, language: Language) -> Cow<'static, str> {
        language.adapt(self.0.remedy())
    }

    /// Returns the text with the remedy, for a command line: `{error}; what to do: {remedy}`.
    pub fn advice(&self) -> String {
        self.joined("; what to do: ")
    }

    fn joined(&self, between: &str) -> String {
        let mut text = self.message();
        if !self.0.remedy().is_empty() {
            text = text + between + self.0.remedy();
        }
        text
    }
}

impl<E: Explain + ?Sized> fmt::Display for Explained<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.joined("; "))
    }
}

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
