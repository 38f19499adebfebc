//! A map of names in order.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

/// A part of the names, in order.
#[derive(Debug)]
pub(super) struct Page<T> {
    pub items: Vec<T>,
    /// Whether there are more.
    pub more: bool,
    /// The name after which to continue, if the limit of visited names was reached.
    pub looked: Option<Arc<str>>,
}

/// Values by name.
#[derive(Debug)]
pub(super) struct Names<T> {
    things: BTreeMap<Arc<str>, T>,
}

impl<T> Default for Names<T> {
    fn default() -> Self {
        Self {
            things: BTreeMap::new(),
        }
    }
}

impl<T> Names<T> {
    pub fn get(&self, name: &str) -> Option<&T> {
        self.things.get(name)
    }

    pub fn len(&self) -> usize {
        self.things.len()
    }

    /// Inserts a value under a free name; returns whether it was free.
    pub fn insert(&mut self, name: Arc<str>, thing: T) -> bool {
        if self.things.contains_key(&name) {
            return false;
        }
        self.things.insert(name, thing);
        true
    }

    /// Removes the value under the name, if `is_it` accepts it.
    pub fn remove(&mut self, name: &str, is_it: impl FnOnce(&T) -> bool) -> Option<T> {
        if !is_it(self.things.get(name)?) {
            return None;
        }
        self.things.remove(name)
    }

    /// Returns values whose names begin with `prefix` and come after `after`, as long as `take` accepts them:
    /// it leaves out what this reader may not see (`Ok(None)`), or ends the page (`Err`). Visits at most
    /// `many`, because other tasks wait for the lock.
    pub fn page<R>(
        &self,
        prefix: &str,
        after: Option<&str>,
        many: usize,
        mut take: impl FnMut(&Arc<str>, &T) -> Result<Option<R>, ()>,
    ) -> Page<R> {
        let from = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        let mut items = Vec::new();
        let mut looked = None;
        let mut left = many;
        for (name, thing) in self.things.range::<str, _>((from, Bound::Unbounded)) {
            if !name.starts_with(prefix) {
                break;
            }
            if left == 0 {
                let more = true;
                return Page {
                    items,
                    more,
                    looked,
                };
            }
            left -= 1;
            match take(name, thing) {
                Ok(Some(item)) => items.push(item),
                Ok(None) => {}
                Err(()) => {
                    return Page {
                        items,
                        more: true,
                        looked: None,
                    };
                }
            }
            if left == 0 {
                looked = Some(Arc::clone(name));
            }
        }
        Page {
            items,
            more: false,
            looked: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(list: &[&str]) -> Names<()> {
        let mut names = Names::default();
        for &name in list {
            assert!(names.insert(name.into(), ()));
        }
        names
    }

    fn page(names: &Names<()>, prefix: &str, after: Option<&str>, limit: usize) -> Page<String> {
        let mut left = limit;
        names.page(prefix, after, usize::MAX, |name, ()| {
            left = left.checked_sub(1).ok_or(())?;
            Ok(Some(name.to_string()))
        })
    }

    #[test]
    fn a_name_is_there_once() {
        let mut names = names(&["a"]);
        assert!(!names.insert("a".into(), ()));
        assert!(names.remove("a", |()| false).is_none());
        assert!(names.remove("a", |()| true).is_some());
        assert!(names.remove("a", |()| true).is_none());
    }

    #[test]
    fn pages_begin_after_the_last_name() {
        let names = names(&["a", "b/1", "b/2", "b/3", "c"]);
        let first = page(&names, "b/", None, 2);
        assert_eq!(
            (first.items, first.more),
            (vec!["b/1".into(), "b/2".into()], true)
        );
        let rest = page(&names, "b/", Some("b/2"), 2);
        assert_eq!((rest.items, rest.more), (vec!["b/3".into()], false));
        // A name before the prefix does not lead out of it.
        assert_eq!(page(&names, "b/", Some("a"), 9).items.len(), 3);
        assert!(page(&names, "b/", Some("c"), 9).items.is_empty());
    }

    #[test]
    fn so_many_are_looked_at_for_once() {
        let names = names(&["a", "b", "c", "d", "e"]);
        let (mut after, mut seen, mut rounds) = (None, String::new(), 0);
        loop {
            let mut looked = 0;
            // This reader may see every second of them.
            let page = names.page("", after.as_deref(), 2, |name, ()| {
                looked += 1;
                Ok("bd".contains(&**name).then(|| name.to_string()))
            });
            assert!(looked <= 2);
            seen.extend(page.items);
            rounds += 1;
            after = page.looked;
            if after.is_none() {
                assert!(!page.more);
                break;
            }
        }
        assert_eq!((seen.as_str(), rounds), ("bd", 3));
    }

    proptest! {
        #[test]
        fn all_pages_together_are_what_a_filter_finds(
            list in proptest::collection::btree_set("[ab/]{1,4}", 0..30),
            prefix in "[ab/]{0,2}",
            limit in 1..7_usize,
        ) {
            let all: Vec<&str> = list.iter().map(String::as_str).collect();
            let names = names(&all);
            let mut found: Vec<String> = Vec::new();
            loop {
                let next = page(&names, &prefix, found.last().map(String::as_str), limit);
                found.extend(next.items);
                if !next.more {
                    break;
                }
            }
            let expected: Vec<_> = all.into_iter().filter(|n| n.starts_with(&prefix)).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
