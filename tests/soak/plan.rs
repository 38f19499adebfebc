//! How long the soak runs, and from which seed.

use std::path::PathBuf;
use std::time::Duration;

/// The settings from the environment.
#[derive(Clone, Debug)]
pub struct Plan {
    /// `EGMEM_SOAK_SECONDS`: after so long no new round of load begins; 10 without it.
    pub total: Duration,
    /// How long each round's load lasts.
    pub load: Duration,
    /// `EGMEM_SOAK_SEED`: the seed of every random choice.
    pub seed: u64,
    /// `EGMEM_SOAK_OUT`: where the table goes as CSV.
    pub out: Option<PathBuf>,
}

impl Plan {
    /// Reads the environment.
    pub fn from_env() -> Self {
        let number = |name: &str| {
            let text = std::env::var(name).ok()?;
            let parsed = text.parse::<u64>();
            Some(parsed.unwrap_or_else(|error| panic!("{name}={text}: {error}")))
        };
        let total = Duration::from_secs(number("EGMEM_SOAK_SECONDS").unwrap_or(10));
        Self {
            total,
            load: (total / 2).min(Duration::from_secs(45)),
            seed: number("EGMEM_SOAK_SEED").unwrap_or_else(|| fastrand::u64(..)),
            out: std::env::var_os("EGMEM_SOAK_OUT").map(PathBuf::from),
        }
    }

    /// Whether this is the short run of `cargo test`, which waits for idle threads only at its end.
    pub fn is_short(&self) -> bool {
        self.total < Duration::from_secs(60)
    }
}
