//! Where in the program something was done, and by which thread.

use std::backtrace::Backtrace;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::trace::program_part;

/// Where in the program something was done, and by which thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Site {
    /// The call's file, line and column, as `src/main.rs:10:5`. Not known of a drop, nor where GPU work
    /// or the heap itself is the reason; a collection's is within the collection.
    pub place: Option<String>,
    /// The thread's name, or its number where it has none.
    pub thread: String,
    /// Whether it is a collection's memory: `place` is within the collection, and only `backtrace` tells
    /// whose that is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_collection: bool,
    /// How the program came there, if [that was wanted](super::DebugOptions::backtraces), without what this
    /// library and the thread's begin add to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backtrace: Option<String>,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "at {place} ")?;
        }
        write!(f, "by thread {}", self.thread)?;
        match &self.backtrace {
            Some(backtrace) => write!(f, "\n{backtrace}"),
            None => Ok(()),
        }
    }
}

/// A site as it is noted: nothing is put into words that nobody may ask for.
#[derive(Clone, Debug)]
pub(in crate::heap) struct Origin {
    place: Option<&'static Location<'static>>,
    in_collection: bool,
    thread: Arc<str>,
    backtrace: Option<Arc<Backtrace>>,
}

impl Origin {
    /// The calling thread, now.
    pub(super) fn here(place: Option<&'static Location<'static>>, backtrace: bool) -> Self {
        Self {
            place,
            in_collection: false,
            thread: thread(),
            // Nobody else's frames among this library's: see `program_part`.
            backtrace: match backtrace {
                true => Some(Arc::new(Backtrace::force_capture())),
                false => None,
            },
        }
    }

    /// The line of the program.
    pub(super) fn place(&self) -> Option<&'static Location<'static>> {
        self.place
    }

    /// Notes that the line is a collection's, not the program's.
    #[cfg(any(feature = "allocator-api2", feature = "nightly"))]
    pub(super) fn set_in_collection(&mut self) {
        self.in_collection = true;
    }

    pub(super) fn site(&self) -> Site {
        Site {
            place: self.place.map(ToString::to_string),
            in_collection: self.in_collection,
            thread: self.thread.to_string(),
            backtrace: self
                .backtrace
                .as_ref()
                .map(|all| program_part(&all.to_string())),
        }
    }
}

fn thread() -> Arc<str> {
    thread_local! {
        static NAME: Arc<str> = {
            let thread = std::thread::current();
            match thread.name() {
                Some(name) => name.into(),
                None => format!("{:?}", thread.id()).into(),
            }
        };
    }
    // Blocks are freed by threads at their very end too.
    let name = NAME.try_with(Arc::clone);
    name.unwrap_or_else(|_| "that has ended".into())
}
