//! Parts of the Python package that need no interpreter, with their own tests. cargo links no test of that crate itself: its symbols
//! are the interpreter's.

#[path = "../src/python/holds.rs"]
mod holds;
