//! Records where in the program something happened, and in which thread.

use std::backtrace::Backtrace;
use std::panic::Location;
use std::sync::Arc;

use crate::error::Site;

/// A recorded site; it is formatted only when a report needs it.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    /// The line of the program.
    pub(super) place: Option<&'static Location<'static>>,
    /// Whether the line belongs to a collection, not to the program.
    pub(super) in_collection: bool,
    thread: Arc<str>,
    backtrace: Option<Arc<Backtrace>>,
}

impl Origin {
    /// Returns the calling thread's site, now.
    pub(super) fn here(place: Option<&'static Location<'static>>, backtrace: bool) -> Self {
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
        let thread = NAME.try_with(Arc::clone);
        Self {
            place,
            in_collection: false,
            thread: thread.unwrap_or_else(|_| "that has ended".into()),
            // Not in a closure: its caller's frame would lie between this library's. See `program_part`.
            backtrace: if backtrace {
                Some(Arc::new(Backtrace::force_capture()))
            } else {
                None
            },
        }
    }

    pub(super) fn site(&self) -> Site {
        let backtrace = self.backtrace.as_ref();
        Site {
            place: self.place.map(ToString::to_string),
            in_collection: self.in_collection,
            thread: self.thread.to_string(),
            backtrace: backtrace.map(|all| program_part(&all.to_string())),
        }
    }
}

/// Returns the frames between this library's own, with which a backtrace begins, and those that started the
/// thread; all frames if there are none in between.
fn program_part(backtrace: &str) -> String {
    let lines: Vec<&str> = backtrace.lines().collect();
    // A frame's first line is `  12: alloc::vec::Vec<T>::push`; the others are places.
    let frames = lines.iter().enumerate().filter_map(|(at, line)| {
        let (number, name) = line.split_once(": ")?;
        number.trim_start().parse::<u32>().ok()?;
        Some((at, name))
    });
    // The frames that take a backtrace come before this library's first.
    let mut frames = frames.skip_while(|(_, name)| !is_ours(name));
    let starts = |name: &str| name.contains("__rust_begin_short_backtrace");
    match frames.find(|(_, name)| !is_ours(name)) {
        Some((first, name)) if !starts(name) => {
            let end = frames.find(|(_, name)| starts(name));
            let end = end.map_or(lines.len(), |(at, _)| at);
            lines[first..end].join("\n") + "\n"
        }
        _ => backtrace.into(),
    }
}

fn is_ours(name: &str) -> bool {
    let name = name.trim_start_matches(['<', '&']);
    let crates = ["egmem::", "egmem_heap::", "egmem_core::"];
    crates.iter().any(|ours| name.starts_with(ours))
}

#[cfg(test)]
mod tests {
    use super::program_part;

    const OURS: &str = "   0: <std::backtrace::Backtrace>::create
   1: egmem_heap::debug::site::Origin::here
             at ./src/heap/debug/site.rs:50:46
   2: <&egmem_heap::heap::Heap as allocator_api2::Allocator>::allocate
";
    const BEGINS: &str = "  99: std::sys::backtrace::__rust_begin_short_backtrace::<f, ()>
             at /rustc/library/std/src/sys/backtrace.rs:166:18
 100: main
";

    #[test]
    fn the_programs_frames_are_left() {
        let theirs = "   3: theirs::push
             at ./src/main.rs:10:5
   4: egmem_heap::heap::Heap::called_back
";
        for end in [BEGINS, ""] {
            assert_eq!(program_part(&format!("{OURS}{theirs}{end}")), theirs);
        }
    }

    #[test]
    fn where_nothing_would_be_left_all_is() {
        for text in [
            "disabled backtrace",
            "",
            "   0: <unknown>\n",
            OURS,
            &format!("{OURS}{}", BEGINS.replace("99", " 3").replace("100", "  4")),
        ] {
            assert_eq!(program_part(text), text);
        }
    }
}
