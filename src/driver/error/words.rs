//! Formats errors for people.

use std::fmt;

use super::Error;
use crate::NodeId;

pub(super) fn list(nodes: &[NodeId]) -> String {
    nodes
        .iter()
        .map(NodeId::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// An error with its remedy, for display: `{error}; {remedy}`.
#[derive(Debug)]
pub struct Explained<'a>(pub &'a Error);

impl fmt::Display for Explained<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        // Some errors contain their remedy.
        let shown = matches!(
            self.0,
            Error::Driver(_) | Error::ContextLost { .. } | Error::Import { .. }
        );
        if let (Some(source), false) = (self.0.driver_error(), shown) {
            write!(f, " ({source})")?;
        }
        write!(f, "; {}", self.0.remedy())
    }
}
