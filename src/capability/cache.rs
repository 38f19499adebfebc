//! Where answers are kept: once per process and driver.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::{Support, Trial};
use crate::Driver;
use crate::driver::Backend;

type Cell = Arc<Mutex<Option<Support>>>;

/// The answers of one driver. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Cells(Arc<Mutex<HashMap<Trial, Cell>>>);

/// The drivers of this process that were asked. Weak, so that the registry keeps no driver alive;
/// and a dead driver's address is not used again before its entry is gone.
static REGISTRY: Mutex<Vec<(Weak<dyn Backend>, Cells)>> = Mutex::new(Vec::new());

impl Cells {
    /// The answers of `driver`.
    pub(super) fn of(driver: &Driver) -> Self {
        let key = driver.downgrade();
        let mut registry = lock(&REGISTRY);
        registry.retain(|(driver, _)| driver.strong_count() > 0);
        if let Some((_, cells)) = registry.iter().find(|(driver, _)| driver.ptr_eq(&key)) {
            return cells.clone();
        }
        let cells = Self::default();
        registry.push((key, cells.clone()));
        cells
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

/// A panic while trying leaves no answer, which is a state as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
