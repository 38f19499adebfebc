//! What a program says about its memory: a name, and the line that a call comes from.

use std::cell::RefCell;
use std::fmt;
use std::panic::Location as Caller;
use std::sync::Arc;

use super::allocation::CallSite;
use crate::text::cut;

/// The line of a program that allocates: of Rust code, or of a program in another language that calls by a binding.
#[derive(Clone, Debug)]
pub struct Site(Inner);

#[derive(Clone, Debug)]
enum Inner {
    Unknown,
    Rust(&'static Caller<'static>),
    Given(Arc<CallSite>),
}

thread_local! {
    /// The site that [`called_from`] gives this thread's calls.
    static GIVEN: RefCell<Option<Site>> = const { RefCell::new(None) };
}

/// Calls `work`, whose allocations have `site` in place of a line of Rust: for bindings of other languages. `None` is a
/// line that nobody knows.
///
/// It holds for this thread. Options that are made in `work` keep it for allocations that follow later or in other
/// threads: a heap's chunks have the site of the call that built the heap.
pub fn called_from<T>(site: Option<CallSite>, work: impl FnOnce() -> T) -> T {
    struct Restore(Option<Site>);

    impl Drop for Restore {
        fn drop(&mut self) {
            GIVEN.set(self.0.take());
        }
    }
    let given = site.map_or(Inner::Unknown, |site| Inner::Given(Arc::new(site)));
    let _restore = Restore(GIVEN.replace(Some(Site(given))));
    work()
}

impl Site {
    /// Returns the line that [`called_from`] gave this thread, or else the caller's.
    #[track_caller]
    pub fn here() -> Self {
        // A thread that ends has no site of its own any more.
        let given = GIVEN.try_with(|given| given.borrow().clone());
        let given = given.ok().flatten();
        given.unwrap_or(Self(Inner::Rust(Caller::caller())))
    }

    /// Returns the site of memory that no call is known for.
    pub const fn unknown() -> Self {
        Self(Inner::Unknown)
    }

    /// Returns whether the site has frames of its own: a binding's language has them, not the native stack.
    pub(super) fn has_frames(&self) -> bool {
        matches!(&self.0, Inner::Given(site) if site.backtrace.is_some())
    }

    /// Returns the site's values; `None` if it is unknown.
    pub(super) fn to_call_site(&self) -> Option<CallSite> {
        match &self.0 {
            Inner::Unknown => None,
            Inner::Given(site) => Some((**site).clone()),
            Inner::Rust(caller) => Some(CallSite::new(caller.file(), caller.line())),
        }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Inner::Unknown => f.write_str("unknown"),
            Inner::Rust(caller) => caller.fmt(f),
            Inner::Given(site) => site.fmt(f),
        }
    }
}

/// A program's name for memory, such as `"kv cache"`. At most [`MAX`](Self::MAX) bytes are kept.
///
/// It is shown in the ledger, to processes of the same user, and in logs: it must not contain secrets.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Label(Arc<str>);

impl Label {
    /// The most bytes of a label; longer ones are cut between two characters.
    pub const MAX: usize = 128;

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Label {
    fn from(text: &str) -> Self {
        Self(cut(text, Self::MAX).into())
    }
}

impl From<String> for Label {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_given_line_takes_the_callers_place_until_the_scope_ends() {
        let given = |line| Some(CallSite::new("train.py", line));
        let own = line!() + 1;
        let here = || Site::here().to_call_site().unwrap().line;
        assert_eq!(here(), own);
        let inner = called_from(given(7), || {
            assert_eq!(Site::here().to_string(), "train.py:7");
            let inner = called_from(given(8), here);
            assert!(called_from(None, || Site::here().to_call_site()).is_none());
            // Another thread's calls are its own.
            assert_eq!(
                std::thread::scope(|scope| scope.spawn(here).join().unwrap()),
                own
            );
            (here(), inner)
        });
        assert_eq!((inner, here()), ((7, 8), own));
        let panics = || called_from(given(9), || panic!("expected"));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(here(), own);
    }

    #[test]
    fn long_labels_are_cut_between_characters() {
        assert_eq!(Label::from("kv cache").as_str(), "kv cache");
        let long = Label::from("ä".repeat(100) + "b");
        assert_eq!(long.as_str(), "ä".repeat(Label::MAX / 2));
        let odd = Label::from("x".to_owned() + &"ä".repeat(100));
        assert_eq!(odd.as_str().len(), Label::MAX - 1);
    }
}
