//! Caches the answers of trials, per process and driver.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::support::{Support, Trial};
use crate::Driver;
use crate::per_driver::{PerDriver, lock};

type Cell = Arc<Mutex<Option<Support>>>;

/// The answers of one driver. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Cells(Arc<Mutex<HashMap<Trial, Cell>>>);

impl Cells {
    /// Returns the answers of `driver`.
    pub(super) fn of(driver: &Driver) -> Self {
        static CELLS: PerDriver<Cells> = PerDriver::new();
        CELLS.of(driver)
    }

    /// Returns the answer to `trial`, from `attempt` if there is none yet. Another caller with the same trial
    /// waits meanwhile.
    pub(super) fn get_or_try(&self, trial: Trial, attempt: impl FnOnce() -> Support) -> Support {
        let cell = Arc::clone(lock(&self.0).entry(trial).or_default());
        let mut answer = lock(&cell);
        match &*answer {
            Some(known) => known.clone(),
            None => {
                let support = attempt();
                if !matches!(support, Support::Unknown(_)) {
                    *answer = Some(support.clone());
                }
                support
            }
        }
    }
}
