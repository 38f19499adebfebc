//! Numbers of sessions or leases, each with a time at which something is due.

use std::collections::{BTreeSet, HashMap};

use crate::account::shrink;

/// Times by number, in their order.
#[derive(Debug)]
pub(super) struct Deadlines<T> {
    times: HashMap<u64, T>,
    order: BTreeSet<(T, u64)>,
}

impl<T> Default for Deadlines<T> {
    fn default() -> Self {
        Self {
            times: HashMap::new(),
            order: BTreeSet::new(),
        }
    }
}

impl<T: Copy + Ord> Deadlines<T> {
    /// Sets or removes the time of a number.
    pub fn set(&mut self, number: u64, time: impl Into<Option<T>>) {
        self.remove(number);
        if let Some(time) = time.into() {
            self.times.insert(number, time);
            self.order.insert((time, number));
        }
    }

    /// Removes the time of a number; returns whether it had one.
    pub fn remove(&mut self, number: u64) -> bool {
        let Some(time) = self.times.remove(&number) else {
            return false;
        };
        shrink(&mut self.times);
        self.order.remove(&(time, number))
    }

    pub fn get(&self, number: u64) -> Option<T> {
        self.times.get(&number).copied()
    }

    /// Returns the first time.
    pub fn first(&self) -> Option<T> {
        self.order.first().map(|&(time, _)| time)
    }

    /// Takes a number whose time has come.
    pub fn pop(&mut self, now: T) -> Option<u64> {
        let &(time, number) = self.order.first()?;
        (time <= now && self.remove(number)).then_some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_in_the_order_of_their_times() {
        let mut deadlines = Deadlines::<u8>::default();
        for (number, time) in [(1, 30), (2, 10), (3, 20), (4, 20), (2, 25)] {
            deadlines.set(number, time);
        }
        deadlines.set(4, None);
        assert_eq!((deadlines.get(2), deadlines.get(4)), (Some(25), None));
        assert_eq!((deadlines.first(), deadlines.pop(19)), (Some(20), None));
        assert_eq!((deadlines.pop(25), deadlines.pop(25)), (Some(3), Some(2)));
        assert_eq!(deadlines.pop(25), None);
        assert!(deadlines.remove(1) && !deadlines.remove(1));
        assert!(deadlines.times.is_empty() && deadlines.order.is_empty());
    }
}
