//! What the command line's files below `bin/egmem/` find under this name.

/// Shows nothing: a library has no terminal of its own.
pub fn progress(_text: &str) {}
