//! Formats errors for people.

use std::borrow::Cow;
use std::fmt;

use super::{DriverError, Error, Language};
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
