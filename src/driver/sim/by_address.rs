//! A map by address, whose ranges are looked up by the addresses in them.

use std::ops;

/// Values by address, handle or another key, in a sorted vector. The simulator has a map of each of 13 kinds of values, and a
/// `BTreeMap` or `HashMap` of each would be a fourth of the code that the compiler makes of this crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByAddress<T, K = u64>(Vec<(K, T)>);

impl<T, K> Default for ByAddress<T, K> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, K: Copy + Ord> ByAddress<T, K> {
    fn find(&self, at: K) -> Result<usize, usize> {
        self.0.binary_search_by_key(&at, |entry| entry.0)
    }

    pub fn get(&self, at: K) -> Option<&T> {
        let index = self.find(at).ok()?;
        Some(&self.0[index].1)
    }

    pub fn get_mut(&mut self, at: K) -> Option<&mut T> {
        let index = self.find(at).ok()?;
        Some(&mut self.0[index].1)
    }

    /// Returns the value at this address, which is the default if there was none.
    pub fn get_or_default(&mut self, at: K) -> &mut T
    where
        T: Default,
    {
        let index = self.find(at).unwrap_or_else(|index| {
            self.0.insert(index, (at, T::default()));
            index
        });
        &mut self.0[index].1
    }

    /// Adds a value, or replaces the one at this address.
    pub fn insert(&mut self, at: K, value: T) {
        match self.find(at) {
            Ok(index) => self.0[index].1 = value,
            Err(index) => self.0.insert(index, (at, value)),
        }
    }

    pub fn remove(&mut self, at: K) -> Option<T> {
        let index = self.find(at).ok()?;
        Some(self.0.remove(index).1)
    }

    /// Returns the last entry at this address or before.
    pub fn up_to(&self, at: K) -> Option<&(K, T)> {
        let behind = self.0.partition_point(|entry| entry.0 <= at);
        self.0[..behind].last()
    }

    fn indices(&self, range: ops::Range<K>) -> ops::Range<usize> {
        let before = |end: K| self.0.partition_point(|entry| entry.0 < end);
        before(range.start)..before(range.end)
    }

    /// Returns the entries at addresses of a range.
    pub fn within(&self, range: ops::Range<K>) -> &[(K, T)] {
        &self.0[self.indices(range)]
    }

    pub fn remove_within(&mut self, range: ops::Range<K>) {
        self.0.drain(self.indices(range));
    }

    /// Keeps the entries for which `is_kept` says so.
    pub fn retain(&mut self, mut is_kept: impl FnMut(&K, &mut T) -> bool) {
        self.0.retain_mut(|(at, value)| is_kept(at, value));
    }

    /// Returns all entries, in the order of addresses.
    pub fn entries(&self) -> &[(K, T)] {
        &self.0
    }

    pub fn keys(&self) -> impl Iterator<Item = K> {
        self.0.iter().map(|(at, _)| *at)
    }

    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|(_, value)| value)
    }
}

impl<T, K: Copy + Ord> ops::Index<K> for ByAddress<T, K> {
    type Output = T;

    fn index(&self, at: K) -> &T {
        self.get(at).expect("the address has a value")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_answers_as_a_tree_does(changes in prop::collection::vec((0_u64..40, any::<bool>()), 0..80)) {
            let (mut map, mut model) = (ByAddress::default(), BTreeMap::new());
            for (step, (at, is_new)) in changes.into_iter().enumerate() {
                if is_new {
                    map.insert(at, step);
                    model.insert(at, step);
                } else {
                    prop_assert_eq!(map.remove(at), model.remove(&at));
                }
                prop_assert_eq!(map.get(at), model.get(&at));
                let before = model.range(..=at).next_back();
                prop_assert_eq!(map.up_to(at).map(|(at, step)| (at, step)), before);
            }
            let entries = |range| model.range(range).map(|(&at, &step)| (at, step)).collect::<Vec<_>>();
            prop_assert_eq!(map.entries(), entries(0..40));
            prop_assert_eq!(map.within(10..20), entries(10..20));
            map.remove_within(10..20);
            prop_assert_eq!(map.entries(), [entries(0..10), entries(20..40)].concat());
        }
    }
}
