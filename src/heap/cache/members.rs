//! All threads that use a heap.

use std::ops::DerefMut;
use std::sync::Arc;

use super::biased::Biased;
use super::kept::Kept;
use super::local::{Local, Tally};
use super::member::{Home, Member};
use crate::classes::Class;
use crate::core::Outside;

/// The threads that use a heap.
#[derive(Default)]
pub(crate) struct Members {
    pub(crate) list: Vec<Arc<Member>>,
    /// Counts of threads that have left or never joined.
    pub(crate) tally: Tally,
    /// Keeps a closed heap alive for its remaining blocks.
    pub(crate) orphan: Option<Arc<dyn Home>>,
    pub(crate) closed: bool,
}

impl Members {
    /// Returns a bound of the contents of all threads' caches, without taking them: each thread may have `larger` bytes of
    /// larger blocks.
    pub(crate) fn kept(&self, larger: u64, class: Option<Class>) -> Outside {
        let kept = self.list.iter().map(|member| &*member.kept);
        Outside {
            bytes: kept.clone().map(|kept| kept.bytes(larger)).sum(),
            larger: kept.clone().any(Kept::has_larger),
            of_class: class
                .is_some_and(|class| kept.clone().any(|kept| kept.has(Kept::small(class)))),
        }
    }

    /// Takes the caches of all threads.
    pub(crate) fn hold_all(&self) -> Vec<impl DerefMut<Target = Local>> {
        Biased::hold_all(self.list.iter().map(|member| &member.local))
    }
}
