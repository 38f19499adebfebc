//! Parsers of the kernel's texts, of those under `/proc/PID` too, without I/O.

use super::{DriverModule, Limit};
use crate::topology::CpuSet;

/// Names of limits in `/proc/self/limits`.
pub(super) const MEMLOCK: &str = "Max locked memory";
pub(super) const ADDRESS_SPACE: &str = "Max address space";

/// Parses a list such as `0-3,7` in `/proc/self/status`.
pub(super) fn list(status: &str, name: &str) -> Option<CpuSet> {
    status_field(status, name)?.parse().ok()
}

/// Parses `/etc/ld.so.preload`: names with spaces or colons between them, and comments.
pub(super) fn preloaded(text: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| line.split('#').next());
    let names = lines.flat_map(|line| line.split([' ', '\t', ':']));
    names
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Returns whether a capability is in the effective set.
pub(super) fn capability(status: &str, bit: u32) -> Option<bool> {
    let effective = u64::from_str_radix(status_field(status, "CapEff")?, 16).ok()?;
    Some(effective >> bit & 1 == 1)
}

/// Parses the line of `/proc/self/limits` with the limit `name`, which is in bytes.
pub(super) fn limit(limits: &str, name: &str) -> Option<Limit> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    let mut words = line.split_ascii_whitespace();
    let mut limit = || match words.next()? {
        "unlimited" => Some(None),
        bytes => bytes.parse().ok().map(Some),
    };
    Some(Limit {
        soft: limit()?,
        hard: limit()?,
    })
}

/// Returns the word in brackets of a setting such as `always [madvise] never`.
pub(super) fn chosen(setting: &str) -> Option<String> {
    let (_, after) = setting.split_once('[')?;
    let (word, _) = after.split_once(']')?;
    Some(word.to_owned())
}

/// Returns the first word that looks like a version in the line `NVRM version: …`.
pub(super) fn driver_module(text: &str) -> Option<DriverModule> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("NVRM version:"))?;
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    Some(DriverModule {
        version: line.split_ascii_whitespace().find(is_version)?.to_owned(),
        open: line.contains("Open Kernel Module"),
    })
}

/// Finds AT_PAGESZ in the auxiliary vector: pairs of native words.
pub(super) fn page_size(auxv: &[u8]) -> Option<u64> {
    const AT_PAGESZ: usize = 6;
    const WORD: usize = size_of::<usize>();
    let word = |bytes: &[u8]| Some(usize::from_ne_bytes(bytes.try_into().ok()?));
    auxv.chunks_exact(2 * WORD).find_map(|pair| {
        let (key, value) = pair.split_at(WORD);
        (word(key)? == AT_PAGESZ).then_some(word(value)? as u64)
    })
}

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
    fn limits_are_read() {
        let text = "Limit                     Soft Limit           Hard Limit           Units\n\
                    Max locked memory         8388608              unlimited            bytes\n";
        let found = limit(text, MEMLOCK).unwrap();
        assert_eq!((found.soft, found.hard), (Some(8 << 20), None));
        assert_eq!(limit("Max locked memory         x  y bytes", MEMLOCK), None);
        assert_eq!(limit("", MEMLOCK), None);
    }

    #[test]
    fn both_kernel_modules_are_told_apart() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.159.04  Release Build\nGCC version: 12.2.0";
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n";
        let module = driver_module(open).unwrap();
        assert_eq!((module.version.as_str(), module.open), ("580.159.04", true));
        let module = driver_module(closed).unwrap();
        assert_eq!((module.version.as_str(), module.open), ("550.54.15", false));
        assert_eq!(driver_module("GCC version: 12.2.0"), None);
    }

    #[test]
    fn capabilities_and_lists_of_the_status() {
        let status =
            "CapPrm:\tffff\nCapEff:\t0000000000800000\nMems_allowed:\t1\nMems_allowed_list:\t0\n";
        assert_eq!(capability(status, 23), Some(true));
        assert_eq!(capability(status, 14), Some(false));
        assert_eq!(capability("", 23), None);
        assert_eq!(list(status, "Mems_allowed_list").unwrap().to_string(), "0");
        assert_eq!(list(status, "Cpus_allowed_list"), None);
    }

    #[test]
    fn the_page_size_is_found_in_the_auxiliary_vector() {
        let words = [33_usize, 1, 6, 65_536, 0, 0];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(page_size(&bytes), Some(65_536));
        assert_eq!(page_size(&bytes[..20]), None);
        assert_eq!(chosen("always [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(chosen("always"), None);
    }

    proptest::proptest! {
        #[test]
        fn damaged_files_of_a_process_never_panic(text in "(CapEff|Max locked memory|NVRM version)?:?[ -~\n]{0,60}", bytes: Vec<u8>) {
            let _ = (limit(&text, MEMLOCK), driver_module(&text), capability(&text, 23), chosen(&text));
            let _ = page_size(&bytes);
        }
    }

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
