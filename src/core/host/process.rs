//! Parsers of the files that Linux has for each process under `/proc`, without I/O.

/// The fields of `/proc/PID/stat`, or of a thread's, that this library uses. Source: proc_pid_stat(5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessStat<'a> {
    /// The process id.
    pub pid: u32,
    /// The name, which the process chooses itself and which may contain anything.
    pub name: &'a str,
    /// The state: `R`, `S`, `D`, `T`, `t`, `Z`, `X`, `I`.
    pub state: char,
    /// Whether it is a thread of the kernel.
    pub is_kernel: bool,
    /// The number of threads, with a first one that has ended.
    pub threads: u64,
    /// When it began, in clock ticks since the machine started.
    pub started: u64,
}

impl<'a> ProcessStat<'a> {
    /// Reads the file's text. `None`: it has another form.
    pub fn parse(text: &'a str) -> Option<Self> {
        const PF_KTHREAD: u64 = 0x0020_0000;
        let (pid, rest) = text.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(')')?;
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let flags: u64 = fields.nth(5)?.parse().ok()?;
        Some(Self {
            pid: pid.parse().ok()?,
            name,
            state,
            is_kernel: flags & PF_KTHREAD != 0,
            threads: fields.nth(10)?.parse().ok()?,
            started: fields.nth(1)?.parse().ok()?,
        })
    }

    /// Returns whether all its threads have ended, so that the kernel has closed its files and its parent alone keeps the
    /// number. The first thread of a process may end before the others, and looks like a zombie then.
    pub const fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.threads <= 1
    }
}

/// Returns the value of a line `name:\tvalue` of `/proc/PID/status`.
pub fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_behind_any_name() {
        let behind = "S 1 42 42 0 -1 4194560 9 0 0 0 1 2 3 4 20 0 7 0 123456 8 9";
        for name in ["sleep", "a) b (c", ") Z 2", "(a) b (c)", ""] {
            let text = format!("42 ({name}) {behind}");
            let stat = ProcessStat::parse(&text).unwrap();
            assert_eq!((stat.pid, stat.name, stat.state), (42, name, 'S'));
            assert_eq!((stat.threads, stat.started), (7, 123_456));
            assert!(!stat.is_kernel && !stat.has_ended());
        }
        let kernel = "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 3 0 0 20 0 1 0 1 0";
        assert!(ProcessStat::parse(kernel).unwrap().is_kernel);
        for (state, threads, ended) in [('Z', 1, true), ('Z', 7, false), ('T', 1, false)] {
            let text = format!("42 (x) {state} 1 1 1 0 -1 0 9 0 0 0 1 2 3 4 20 0 {threads} 0 5");
            assert_eq!(ProcessStat::parse(&text).unwrap().has_ended(), ended);
        }
        for wrong in ["", "42", "7 (x) S 1", "x (a) S", "7 x"] {
            assert_eq!(ProcessStat::parse(wrong), None, "{wrong}");
        }
    }

    proptest::proptest! {
        #[test]
        fn damaged_texts_never_panic(text in "[0-9 ()SZ-]{0,90}") {
            let _ = (ProcessStat::parse(&text), status_field(&text, "7"));
        }
    }
}
