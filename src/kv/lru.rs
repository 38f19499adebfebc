//! A list of pages from the least to the most recently used one.

use crate::Result;
use crate::room::list_for;

/// No page.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

/// The evictable pages in order, each at most once. Every operation takes constant time.
#[derive(Debug)]
pub(crate) struct Lru {
    links: Vec<Option<Link>>,
    oldest: u32,
    newest: u32,
    len: usize,
}

impl Lru {
    /// Creates an empty list for pages below `pages`.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) without memory for it.
    pub(crate) fn new(pages: u32) -> Result<Self> {
        let mut links = list_for(pages as usize)?;
        links.resize(pages as usize, None);
        Ok(Self {
            links,
            oldest: NONE,
            newest: NONE,
            len: 0,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds a page as the most recently used one. A page that is in the list is moved there.
    pub(crate) fn push(&mut self, page: u32) {
        self.remove(page);
        let Some(link) = self.links.get_mut(page as usize) else {
            return;
        };
        *link = Some(Link {
            older: self.newest,
            newer: NONE,
        });
        match self.link(self.newest) {
            Some(link) => link.newer = page,
            None => self.oldest = page,
        }
        self.newest = page;
        self.len += 1;
    }

    /// Removes a page, if it is in the list.
    pub(crate) fn remove(&mut self, page: u32) {
        let slot = self.links.get_mut(page as usize);
        let Some(Link { older, newer }) = slot.and_then(Option::take) else {
            return;
        };
        match self.link(older) {
            Some(link) => link.newer = newer,
            None => self.oldest = newer,
        }
        match self.link(newer) {
            Some(link) => link.older = older,
            None => self.newest = older,
        }
        self.len -= 1;
    }

    /// Iterates from the least recently used page on.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let mut next = self.oldest;
        std::iter::from_fn(move || {
            let page = next;
            next = self.links.get(page as usize)?.as_ref()?.newer;
            Some(page)
        })
    }

    fn link(&mut self, page: u32) -> Option<&mut Link> {
        self.links.get_mut(page as usize)?.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_order_is_that_of_a_vector(steps in prop::collection::vec((any::<bool>(), 0_u32..10), 0..60)) {
            let mut list = Lru::new(10).unwrap();
            let mut model = Vec::new();
            for (adds, page) in steps {
                model.retain(|&other| other != page);
                if adds {
                    list.push(page);
                    model.push(page);
                } else {
                    list.remove(page);
                }
                prop_assert_eq!(list.iter().collect::<Vec<_>>(), &model[..]);
                prop_assert_eq!(list.len(), model.len());
            }
        }
    }
}
