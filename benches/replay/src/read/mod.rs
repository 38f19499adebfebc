//! Reads logs: RMM's, and PyTorch's snapshots as JSON.

mod pytorch;
mod rmm;

use super::trace::Trace;

/// How a log is read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reading {
    /// Count lines that cannot be read, and go on.
    pub skip_bad: bool,
    /// The device of a snapshot; by default the one with most entries.
    pub device: Option<usize>,
}

/// A line (or entry) that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place} {number}: {why}")]
pub struct Bad {
    /// "line" or "entry".
    pub place: &'static str,
    /// Which one, counted from 1.
    pub number: u64,
    /// The error in it.
    pub why: Why,
}

/// An error in a line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Why {
    /// Fewer columns than the header says, or than there must be.
    #[error("{found} {}, at least {want} are needed for Action, Pointer and Size", if *found == 1 { "column" } else { "columns" })]
    Columns {
        /// How many there are.
        found: usize,
        /// How many there should be.
        want: usize,
    },
    /// A header without a column that is needed.
    #[error("the header has no column {0}")]
    NoColumn(&'static str),
    /// A field whose value is not of its column's kind.
    #[error("{column}: {text:?} is no {kind}")]
    Field {
        /// The column.
        column: &'static str,
        /// The field.
        text: String,
        /// The expected kind of value.
        kind: &'static str,
    },
    /// A field that is needed and not there.
    #[error("no {0}")]
    Missing(&'static str),
    /// An action that is neither.
    #[error("Action: {0:?} is neither allocate, free nor allocate failure")]
    Action(String),
    /// An allocation at null that did not fail.
    #[error("Pointer: an allocation of some bytes at null")]
    Null,
    /// More than an address space holds.
    #[error("Size: {0} bytes are more than an address space holds")]
    TooLarge(u64),
    /// More than 2³² allocations.
    #[error("more than 2³² allocations")]
    TooMany,
    /// Not the format at all.
    #[error("{0}")]
    Format(String),
}

/// Reads a log of either format.
///
/// # Errors
/// The first line that cannot be read, unless `reading` lets them be skipped; a file of neither format.
pub fn read(bytes: &[u8], reading: Reading) -> Result<Trace, Bad> {
    match bytes.iter().find(|byte| !byte.is_ascii_whitespace()) {
        Some(b'{') => pytorch::read(bytes, reading),
        // A pickle of any protocol from 2 on.
        Some(0x80) => Err(Bad {
            place: "line",
            number: 1,
            why: Why::Format(
                "this looks like a pickle; PyTorch's snapshots are read as JSON: python3 -c 'import json, pickle, \
                 sys; json.dump({\"device_traces\": pickle.load(sys.stdin.buffer)[\"device_traces\"]}, \
                 sys.stdout)' < snapshot.pickle > snapshot.json"
                    .into(),
            ),
        }),
        _ => match reading.device {
            Some(device) => Err(Bad {
                place: "device",
                number: device as u64,
                why: Why::Format("RMM's logs have no devices: omit --device".into()),
            }),
            None => rmm::read(bytes, reading),
        },
    }
}
