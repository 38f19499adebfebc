//! A map by address, whose ranges are looked up by the addresses in them.

use std::ops;

/// Values by address or handle, in a sorted vector. The simulator has a map of each of eight kinds of values, and a `BTreeMap`
/// of each would be a fifth of the code that the compiler makes of this crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByAddress<T>(Vec<(u64, T)>);

impl<T> Default for ByAddress<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> ByAddress<T> {
    fn find(&self, at: u64) -> Result<usize, usize> {
        self.0.binary_search_by_key(&at, |entry| entry.0)
    }

    pub fn get(&self, at: u64) -> Option<&T> {
        let index = self.find(at).ok()?;
        Some(&self.0[index].1)
    }

    pub fn get_mut(&mut self, at: u64) -> Option<&mut T> {
        let index = self.find(at).ok()?;
        Some(&mut self.0[index].1)
    }

    /// Adds a value, or replaces the one at this address.
    pub fn insert(&mut self, at: u64, value: T) {
        match self.find(at) {
            Ok(index) => self.0[index].1 = value,
            Err(index) => self.0.insert(index, (at, value)),
        }
    }

    pub fn remove(&mut self, at: u64) -> Option<T> {
        let index = self.find(at).ok()?;
        Some(self.0.remove(index).1)
    }

    /// Returns the last entry at this address or before.
    pub fn up_to(&self, at: u64) -> Option<&(u64, T)> {
        let behind = self.0.partition_point(|entry| entry.0 <= at);
        self.0[..behind].last()
    }

    fn indices(&self, range: ops::Range<u64>) -> ops::Range<usize> {
        let before = |end| self.0.partition_point(|entry| entry.0 < end);
        before(range.start)..before(range.end)
    }

    /// Returns the entries at addresses of a range.
    pub fn within(&self, range: ops::Range<u64>) -> &[(u64, T)] {
        &self.0[self.indices(range)]
    }

    pub fn remove_within(&mut self, range: ops::Range<u64>) {
        self.0.drain(self.indices(range));
    }

    /// Returns all entries, in the order of addresses.
    pub fn entries(&self) -> &[(u64, T)] {
        &self.0
    }

    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|(_, value)| value)
    }
}

impl<T> ops::Index<u64> for ByAddress<T> {
    type Output = T;

    fn index(&self, at: u64) -> &T {
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
