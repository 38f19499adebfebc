//! The command line `egmem`.

fn main() {}
