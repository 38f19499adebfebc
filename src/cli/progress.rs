//! The progress of work on many bytes, on a terminal.

use std::time::{Duration, Instant};

use egmem::size::Bytes;

use crate::output::progress;

/// How long a text stays at least.
const INTERVAL: Duration = Duration::from_millis(100);

/// How many bytes are done of a total, on standard error if that is a terminal. It goes away when dropped.
pub struct ByteProgress {
    doing: &'static str,
    begun: Instant,
    /// When the next text may be shown.
    next: Instant,
}

impl ByteProgress {
    /// Begins; `doing` says what happens to the bytes: "writing".
    pub fn new(doing: &'static str) -> Self {
        let begun = Instant::now();
        Self {
            doing,
            begun,
            next: begun,
        }
    }

    /// Shows that `done` bytes are done; `total` is `None` if it is unknown.
    pub fn show(&mut self, done: u64, total: Option<u64>) {
        let now = Instant::now();
        if now >= self.next {
            self.next = now + INTERVAL;
            progress(&text(self.doing, done, total, now - self.begun));
        }
    }
}

impl Drop for ByteProgress {
    fn drop(&mut self) {
        progress("");
    }
}

fn text(doing: &str, done: u64, total: Option<u64>, took: Duration) -> String {
    let of = match total {
        Some(total) => format!(
            " of {} ({} %)",
            Bytes(total),
            u128::from(done) * 100 / u128::from(total.max(1))
        ),
        None => String::new(),
    };
    // Nothing has a rate at its begin.
    let rate = match took < INTERVAL {
        true => String::new(),
        false => format!(", {:.2} GB/s", done as f64 / took.as_secs_f64() / 1e9),
    };
    format!("{doing}: {}{of}{rate}", Bytes(done))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_bytes_percent_and_rate() {
        let two = Duration::from_secs(2);
        assert_eq!(
            text("writing", 3 << 30, Some(16 << 30), two),
            "writing: 3 GiB of 16 GiB (18 %), 1.61 GB/s"
        );
        assert_eq!(
            text("writing", 0, Some(16 << 30), Duration::ZERO),
            "writing: 0 B of 16 GiB (0 %)"
        );
        assert_eq!(
            text("writing", 1 << 30, None, two),
            "writing: 1 GiB, 0.54 GB/s"
        );
        assert_eq!(
            text("writing", 0, Some(0), two),
            "writing: 0 B of 0 B (0 %), 0.00 GB/s"
        );
        let all = text("writing", u64::MAX, Some(u64::MAX), two);
        assert!(all.contains("(100 %)"), "{all}");
    }
}
