//! Looking for mistakes.

/// What is remembered of every block.
#[derive(Debug)]
pub(super) struct Debug;

impl Debug {
    pub(super) fn report_live(&self) {}
}
