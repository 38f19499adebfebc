//! State of this process for each driver.

use std::sync::{Mutex, MutexGuard};

use crate::Driver;
use crate::driver::WeakDriver;
pub use crate::driver::lock;
use crate::fork::PerProcess;

/// Values by driver. The references are weak, so that the registry keeps no driver alive; a dead driver's
/// address is not reused before its entry is removed. A forked child has a registry of its own: a thread of its parent may
/// have held the lock of the parent's.
pub struct PerDriver<T>(PerProcess<Mutex<Vec<(WeakDriver, T)>>>);

impl<T: Clone + Default + Send> PerDriver<T> {
    /// Creates an empty registry.
    pub const fn new() -> Self {
        Self(PerProcess::new())
    }

    /// Returns the value for `driver`: initially the default. Clones of a driver are the same driver.
    pub fn of(&self, driver: &Driver) -> T {
        let key = driver.downgrade();
        let mut registry = self.registry();
        registry.retain(|(driver, _)| driver.is_alive());
        if let Some((_, value)) = registry.iter().find(|(driver, _)| driver.same(&key)) {
            return value.clone();
        }
        let value = T::default();
        registry.push((key, value.clone()));
        value
    }

    fn registry(&self) -> MutexGuard<'_, Vec<(WeakDriver, T)>> {
        lock(self.0.get(|_| Mutex::default()))
    }
}

impl<T: Clone + Default + Send> Default for PerDriver<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Machine;

    #[test]
    fn each_driver_has_its_own_for_as_long_as_it_lives() {
        let registry = PerDriver::<Arc<()>>::new();
        let one = Driver::simulated(Machine::gh200()).unwrap();
        let other = Driver::simulated(Machine::gh200()).unwrap();
        let value = registry.of(&one);
        assert!(Arc::ptr_eq(&value, &registry.of(&one.clone())));
        assert!(!Arc::ptr_eq(&value, &registry.of(&other)));
        drop(one);
        assert_eq!(Arc::strong_count(&value), 2);
        registry.of(&other);
        assert_eq!(Arc::strong_count(&value), 1, "the registry has let it go");
        assert_eq!(registry.registry().len(), 1);
    }

    /// Keeps tests that fork apart from those that see whether a pipe's other end is closed: a child has all ends that are open.
    /// Taken before any other lock.
    pub(crate) fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        lock(&ALONE)
    }

    #[test]
    #[cfg(not(miri))]
    fn a_child_that_is_forked_while_the_registry_is_locked_has_its_own() {
        let _alone = alone();
        let registry = PerDriver::<Arc<()>>::new();
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let _locked = registry.registry();
        assert!(crate::fork_check::in_a_child(
            || registry.of(&driver) == Arc::default()
        ));
    }
}
