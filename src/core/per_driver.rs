//! State of this process for each driver.

use std::sync::Mutex;

use crate::Driver;
use crate::driver::WeakDriver;
pub use crate::driver::lock;

/// Values by driver. The references are weak, so that the registry keeps no driver alive; a dead driver's
/// address is not reused before its entry is removed.
pub struct PerDriver<T>(Mutex<Vec<(WeakDriver, T)>>);

impl<T: Clone + Default> PerDriver<T> {
    /// Creates an empty registry.
    pub const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Returns the value for `driver`: initially the default. Clones of a driver are the same driver.
    pub fn of(&self, driver: &Driver) -> T {
        let key = driver.downgrade();
        let mut registry = lock(&self.0);
        registry.retain(|(driver, _)| driver.is_alive());
        if let Some((_, value)) = registry.iter().find(|(driver, _)| driver.same(&key)) {
            return value.clone();
        }
        let value = T::default();
        registry.push((key, value.clone()));
        value
    }
}

impl<T: Clone + Default> Default for PerDriver<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(lock(&registry.0).len(), 1);
    }
}
