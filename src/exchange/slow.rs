//! For tests: how long the live may be silent on a slow machine. The programs under `tests/` whose
//! leases end have this file as a module too.

use std::time::Duration;

/// How many times as long as without them things take under the sanitizers and emulators of `ci/`:
/// on a small, busy machine a thread may not run for seconds there.
fn slow() -> u32 {
    if std::env::var_os("EGMEM_TEST_RUNNER").is_some() {
        return 8;
    }
    match std::env::var("EGMEM_SANITIZER").as_deref() {
        Ok("thread") => 6,
        Ok(_) => 4,
        Err(_) => 1,
    }
}

/// What is so many milliseconds without a sanitizer and an emulator. Tests take from it leases,
/// heartbeats and deadlines that a healthy party must keep to, and whatever they compare with these.
pub(crate) fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds) * slow()
}
