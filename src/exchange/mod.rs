//! Memory exchanged by name, within a node and between nodes.

pub mod protocol;
