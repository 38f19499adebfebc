//! Records where in the program something happened, and in which thread.

use std::backtrace::Backtrace;
use std::panic::Location;
use std::sync::Arc;

use super::trace::program_part;
use crate::error::Site;

/// A recorded site; it is formatted only when a report needs it.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    place: Option<&'static Location<'static>>,
    in_collection: bool,
    thread: Arc<str>,
    backtrace: Option<Arc<Backtrace>>,
}

impl Origin {
    /// Returns the calling thread's site, now.
    pub(super) fn here(place: Option<&'static Location<'static>>, backtrace: bool) -> Self {
        Self {
            place,
            in_collection: false,
            thread: thread(),
            // The program's frames come before or after this library's, never between: see `program_part`.
            backtrace: match backtrace {
                true => Some(Arc::new(Backtrace::force_capture())),
                false => None,
            },
        }
    }

    /// Returns the line of the program.
    pub(super) fn place(&self) -> Option<&'static Location<'static>> {
        self.place
    }

    /// Notes that the line belongs to a collection, not to the program.
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
    // Threads free blocks also at their very end.
    let name = NAME.try_with(Arc::clone);
    name.unwrap_or_else(|_| "that has ended".into())
}
