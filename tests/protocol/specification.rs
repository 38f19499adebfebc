//! docs/protocol.md against the code.
