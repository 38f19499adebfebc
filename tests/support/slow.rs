//! Times that a healthy peer keeps on a slow machine too.

use std::time::Duration;

/// Returns the factor by which the sanitizers and emulators of `ci/` slow everything down: on a small, busy
/// machine a thread may not run for seconds there.
fn slow() -> u32 {
    match std::env::var("EGMEM_SANITIZER").as_deref() {
        Ok("thread") => 6,
        Ok(_) => 4,
        // Without a sanitizer a runner is an emulator.
        Err(_) if std::env::var_os("EGMEM_TEST_RUNNER").is_some() => 8,
        Err(_) => 1,
    }
}

/// Returns `milliseconds`, scaled under a sanitizer or an emulator. Tests derive from it the leases,
/// heartbeats and deadlines that a healthy peer must meet, and the times that they compare with these.
pub fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds) * slow()
}
