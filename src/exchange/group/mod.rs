//! All ranks of a program get each other's memory mapped with one call.

mod agree;
mod coordinator;
mod roster;
mod round;

#[allow(unused_imports, reason = "for the server and the group's own options")]
pub(crate) use coordinator::{Groups, MembersPage, Rules};
