//! Extracts the program's part of a backtrace.

use std::fmt::Write;

/// Returns the frames between this library's own, with which a backtrace begins, and those that started the
/// thread; all frames if there are none in between. Numbered from 0.
pub(super) fn program_part(backtrace: &str) -> String {
    let mut frames: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in backtrace.lines() {
        match (name_in(line), frames.last_mut()) {
            (Some(name), _) => frames.push((name, Vec::new())),
            (None, Some((_, places))) => places.push(line),
            (None, None) => return backtrace.into(),
        }
    }
    let end = frames
        .iter()
        .position(|(name, _)| name.contains("__rust_begin_short_backtrace"))
        .unwrap_or(frames.len());
    // The frames that take a backtrace come before our first one.
    let ours = frames.iter().skip_while(|(name, _)| !is_ours(name));
    let left = ours.skip_while(|(name, _)| is_ours(name)).count();
    let start = Some(frames.len() - left).filter(|_| left > 0);
    let part = match start.and_then(|start| frames.get(start..end)) {
        None | Some([]) => &frames[..],
        Some(part) => part,
    };
    let mut text = String::new();
    for (number, (name, places)) in part.iter().enumerate() {
        let _ = writeln!(text, "{number:4}: {name}");
        places.iter().for_each(|place| {
            text += place;
            text.push('\n');
        });
    }
    text
}

/// Returns the function in a frame's first line: `  12: alloc::vec::Vec<T>::push`.
fn name_in(line: &str) -> Option<&str> {
    let (number, name) = line.split_once(": ")?;
    number.trim_start().parse::<u32>().ok()?;
    Some(name)
}

fn is_ours(name: &str) -> bool {
    let name = name.trim_start_matches(['<', '&']);
    ["egmem::", "egmem_heap::", "egmem_core::"]
        .iter()
        .any(|ours| name.starts_with(ours))
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
        let left = "   0: theirs::push
             at ./src/main.rs:10:5
   1: egmem_heap::heap::Heap::called_back
";
        for end in [BEGINS, ""] {
            assert_eq!(program_part(&format!("{OURS}{theirs}{end}")), left);
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
