//! Shared parts of test programs: drivers, child processes, deadlines, certificates, and connections by hand.

mod connection;
pub mod drivers;
mod fdless;
mod files;
mod frames;
pub mod pki;
mod program;
mod quiet;
mod slow;
mod subscriber;
mod tls;

pub use connection::{Connection, framed};
pub use fdless::FdLess;
pub use files::{leave_files, open_files, set_file_limit};
pub use frames::{read_frame, write_frame};
pub use program::{
    alone, alone_as, child, child_arguments, command, data, egmem, egmem_program, example, root,
    this_program, words,
};
pub use slow::ms;
pub use subscriber::with_subscriber;
pub use tls::{identity, tls_config};
