//! Reference-counted values by key: the first user creates a value, the last one drops it.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

use crate::per_driver::lock;
use egmem_core::Result;

/// Values by key, each alive while it has users. Clones are the same cache.
#[derive(Debug)]
pub(super) struct Cache<K: Eq + Hash, V>(Arc<Mutex<HashMap<K, Entry<V>>>>);

#[derive(Debug)]
struct Entry<V> {
    /// The number of users of the value, including those that create it or wait for it.
    seats: usize,
    cell: Arc<Mutex<Option<Arc<V>>>>,
}

impl<K: Eq + Hash, V> Clone for Cache<K, V> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K: Eq + Hash, V> Default for Cache<K, V> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: Eq + Hash + Clone, V> Cache<K, V> {
    /// Returns the value under `key`, created by `make` if there is none. Another caller with the same key
    /// waits meanwhile; if `make` fails, that caller tries its own `make`.
    pub(super) fn get_or_try(
        &self,
        key: K,
        make: impl FnOnce() -> Result<V>,
    ) -> Result<Cached<K, V>> {
        let cell = {
            let mut entries = lock(&self.0);
            let entry = entries.entry(key.clone()).or_insert_with(|| Entry {
                seats: 0,
                cell: Arc::default(),
            });
            entry.seats += 1;
            Arc::clone(&entry.cell)
        };
        let seat = Seat {
            cache: self.clone(),
            key,
        };
        let mut held = lock(&cell);
        let value = match &*held {
            Some(value) => Arc::clone(value),
            None => Arc::clone(held.insert(Arc::new(make()?))),
        };
        Ok(Cached { value, seat })
    }

    /// Returns the number of values.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        lock(&self.0).len()
    }
}

/// A use of a cached value.
#[derive(Debug)]
pub(super) struct Cached<K: Eq + Hash, V> {
    // In this order: when the last seat is dropped, only the entry has the value, and drops it.
    value: Arc<V>,
    seat: Seat<K, V>,
}

impl<K: Eq + Hash, V> Cached<K, V> {
    /// Returns the value's key.
    pub(super) fn key(&self) -> &K {
        &self.seat.key
    }
}

impl<K: Eq + Hash, V: AsRef<V>> AsRef<V> for Cached<K, V> {
    fn as_ref(&self) -> &V {
        &self.value
    }
}

impl<K: Eq + Hash, V> std::ops::Deref for Cached<K, V> {
    type Target = V;

    fn deref(&self) -> &V {
        &self.value
    }
}

#[derive(Debug)]
struct Seat<K: Eq + Hash, V> {
    cache: Cache<K, V>,
    key: K,
}

impl<K: Eq + Hash, V> Drop for Seat<K, V> {
    fn drop(&mut self) {
        let mut entries = lock(&self.cache.0);
        let last = match entries.get_mut(&self.key) {
            Some(entry) => {
                entry.seats -= 1;
                entry.seats == 0
            }
            None => false,
        };
        let gone = last.then(|| entries.remove(&self.key));
        drop(entries);
        // Outside the lock, because releasing memory takes the driver's time.
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use proptest::prelude::*;

    use super::*;
    use egmem_core::Error;

    /// Counts the live values of its kind.
    struct Counted(Arc<AtomicUsize>);

    impl Counted {
        fn new(alive: &Arc<AtomicUsize>) -> Self {
            alive.fetch_add(1, SeqCst);
            Self(Arc::clone(alive))
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, SeqCst);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Use { key: u8, fails: bool },
        Drop(prop::sample::Index),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0_u8..4, prop::bool::weighted(0.2)).prop_map(|(key, fails)| Step::Use { key, fails }),
            any::<prop::sample::Index>().prop_map(Step::Drop),
        ];
        proptest::collection::vec(step, 0..100)
    }

    proptest! {
        #[test]
        fn a_value_lives_as_long_as_its_users(steps in steps()) {
            let cache = Cache::<u8, Counted>::default();
            let alive: [Arc<AtomicUsize>; 4] = Default::default();
            let mut users: Vec<(u8, Cached<u8, Counted>)> = Vec::new();
            for step in steps {
                match step {
                    Step::Use { key, fails } => {
                        let there = users.iter().any(|(other, _)| *other == key);
                        let mut made = false;
                        let result = cache.get_or_try(key, || {
                            made = true;
                            match fails {
                                true => Err(Error::invalid("key", "")),
                                false => Ok(Counted::new(&alive[usize::from(key)])),
                            }
                        });
                        prop_assert_eq!(made, !there);
                        prop_assert_eq!(result.is_err(), !there && fails);
                        users.extend(result.ok().map(|user| (key, user)));
                    }
                    Step::Drop(which) if !users.is_empty() => {
                        users.swap_remove(which.index(users.len()));
                    }
                    Step::Drop(_) => {}
                }
                let mut keys: Vec<u8> = users.iter().map(|(key, _)| *key).collect();
                keys.sort_unstable();
                keys.dedup();
                prop_assert_eq!(cache.len(), keys.len());
                for key in 0..4 {
                    let expected = usize::from(keys.contains(&key));
                    prop_assert_eq!(alive[usize::from(key)].load(SeqCst), expected);
                }
            }
        }
    }

    #[test]
    fn threads_that_ask_at_once_make_it_once() {
        let cache = Cache::<u8, Counted>::default();
        let alive = Arc::new(AtomicUsize::new(0));
        let made = AtomicUsize::new(0);
        let barrier = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let user = cache.get_or_try(1, || {
                        made.fetch_add(1, SeqCst);
                        std::thread::sleep(std::time::Duration::from_millis(5));
                        Ok(Counted::new(&alive))
                    });
                    assert_eq!(alive.load(SeqCst), 1);
                    barrier.wait();
                    drop(user);
                });
            }
        });
        assert_eq!(made.load(SeqCst), 1);
        assert_eq!((alive.load(SeqCst), cache.len()), (0, 0));
    }

    #[test]
    fn a_failure_or_a_panic_leaves_nothing() {
        let cache = Cache::<u8, Counted>::default();
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = cache.get_or_try(1, || panic!("on purpose"));
        }));
        assert!(panic.is_err());
        assert_eq!(cache.len(), 0);
        let alive = Arc::default();
        cache.get_or_try(1, || Ok(Counted::new(&alive))).unwrap();
        assert_eq!(cache.len(), 0);
    }
}
