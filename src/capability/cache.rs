//! Where answers are kept: once per process and driver.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::{Support, Trial};
use crate::Driver;
use crate::per_driver::{PerDriver, lock};

type Cell = Arc<Mutex<Option<Support>>>;

/// The answers of one driver. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Cells(Arc<Mutex<HashMap<Trial, Cell>>>);

impl Cells {
    /// The answers of `driver`.
    pub(super) fn of(driver: &Driver) -> Self {
        static CELLS: PerDriver<Cells> = PerDriver::new();
        CELLS.of(driver)
    }

    /// The answer to `trial`, by `attempt` if there is none yet. Who asks meanwhile waits for it.
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
