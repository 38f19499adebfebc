//! Reference-counted values by key: the first user creates a value, the last one drops it.

use std::collections::HashMap;
use std::hash::Hash;
use std::ops::Deref;
use std::sync::{Arc, Mutex, Weak};

use crate::fork::Generation;
use crate::per_driver::lock;
use egmem_core::Result;

/// Values by key, each alive while it has users.
pub(super) type Cache<K, V> = Arc<Mutex<HashMap<K, Weak<Slot<K, V>>>>>;

/// The place of a value, which its users have, including those that create it or wait for it.
#[derive(Debug)]
pub(super) struct Slot<K: Eq + Hash, V> {
    cache: Cache<K, V>,
    process: Generation,
    key: K,
    value: Mutex<Option<Arc<V>>>,
}

impl<K: Eq + Hash, V> Drop for Slot<K, V> {
    /// Leaves the cache. The value is dropped after that, outside the lock, because releasing memory takes the driver's time.
    fn drop(&mut self) {
        // A forked child has no use for its parent's cache, whose lock may never be released there.
        if !self.process.is_current() {
            return;
        }
        let mut slots = lock(&self.cache);
        // A new slot may have taken its place.
        if slots
            .get(&self.key)
            .is_some_and(|slot| slot.strong_count() == 0)
        {
            slots.remove(&self.key);
        }
    }
}

/// A use of a cached value.
#[derive(Debug)]
pub(super) struct Cached<K: Eq + Hash, V> {
    // In this order: when the last use is dropped, only the slot has the value, and drops it.
    value: Arc<V>,
    slot: Arc<Slot<K, V>>,
}

impl<K: Eq + Hash + Clone, V> Cached<K, V> {
    /// Returns the value under `key`, created by `make` if there is none. Another caller with the same key
    /// waits meanwhile; if `make` fails, that caller tries its own `make`.
    pub(super) fn get_or_try(
        cache: &Cache<K, V>,
        key: K,
        make: impl FnOnce() -> Result<V>,
    ) -> Result<Self> {
        let mut slots = lock(cache);
        let known = slots.get(&key).and_then(Weak::upgrade);
        let slot = known.unwrap_or_else(|| {
            let slot = Arc::new(Slot {
                cache: Arc::clone(cache),
                process: Generation::current(),
                key: key.clone(),
                value: Mutex::default(),
            });
            slots.insert(key, Arc::downgrade(&slot));
            slot
        });
        drop(slots);
        let mut held = lock(&slot.value);
        let value = match &*held {
            Some(value) => Arc::clone(value),
            None => Arc::clone(held.insert(Arc::new(make()?))),
        };
        drop(held);
        Ok(Self { value, slot })
    }

    /// Returns the value's key.
    pub(super) fn key(&self) -> &K {
        &self.slot.key
    }
}

impl<K: Eq + Hash, V: AsRef<V>> AsRef<V> for Cached<K, V> {
    fn as_ref(&self) -> &V {
        &self.value
    }
}

impl<K: Eq + Hash, V> Deref for Cached<K, V> {
    type Target = V;

    fn deref(&self) -> &V {
        &self.value
    }
}

#[cfg(test)]
pub(crate) mod tests {
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
                        let result = Cached::get_or_try(&cache, key, || {
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
                prop_assert_eq!(lock(&cache).len(), keys.len());
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
                    let user = Cached::get_or_try(&cache, 1, || {
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
        assert_eq!((alive.load(SeqCst), lock(&cache).len()), (0, 0));
    }

    /// Its parent's thread would unlock the cache.
    #[test]
    #[cfg(not(miri))]
    fn a_child_that_is_forked_while_the_cache_is_locked_drops_its_users() {
        let cache = Cache::<u8, ()>::default();
        let user = Cached::get_or_try(&cache, 1, || Ok(())).unwrap();
        let locked = lock(&cache);
        let mut user = Some(user);
        assert!(crate::fork_check::in_a_child(|| user.take().is_some()));
        drop(locked);
    }

    #[test]
    fn a_failure_or_a_panic_leaves_nothing() {
        let cache = Cache::<u8, Counted>::default();
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = Cached::get_or_try(&cache, 1, || panic!("on purpose"));
        }));
        assert!(panic.is_err());
        assert_eq!(lock(&cache).len(), 0);
        let alive = Arc::default();
        Cached::get_or_try(&cache, 1, || Ok(Counted::new(&alive))).unwrap();
        assert_eq!(lock(&cache).len(), 0);
    }
}
