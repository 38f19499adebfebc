//! A peer without a right sees nothing and changes nothing. One test for each cell of the table in
//! docs/security.md.

mod endings;
mod leases;
mod names;
mod raw;
mod requests;
mod sessions;
mod stage;
mod table;
