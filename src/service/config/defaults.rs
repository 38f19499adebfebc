//! Default values of tables that also have keys without a default.

use std::time::Duration;

pub fn yes() -> bool {
    true
}
pub fn peer_bytes() -> u64 {
    64 << 30
}
pub fn peer_names() -> u64 {
    256
}
/// Longer than a debugger stops a program, and longer than most jobs run; short enough that a node whose
/// clients crash regains its quota without an operator.
pub fn forgive_after() -> Duration {
    Duration::from_secs(86_400)
}
pub fn chunk() -> u64 {
    512 << 20
}
pub fn min_chunk() -> u64 {
    16 << 20
}
pub fn prefix() -> String {
    "/egmem/v1/".into()
}
pub fn directory_lease() -> Duration {
    Duration::from_secs(10)
}
