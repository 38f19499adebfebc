//! Parsers of the kernel's texts, without I/O.

use super::process::status_field as field;
use super::{DriverModule, Limit};
use crate::topology::CpuSet;

/// Names of limits in `/proc/self/limits`.
pub(super) const MEMLOCK: &str = "Max locked memory";
pub(super) const ADDRESS_SPACE: &str = "Max address space";

/// Parses a list such as `0-3,7` in `/proc/self/status`.
pub(super) fn list(status: &str, name: &str) -> Option<CpuSet> {
    field(status, name)?.parse().ok()
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
    let effective = u64::from_str_radix(field(status, "CapEff")?, 16).ok()?;
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
        fn damaged_texts_never_panic(text in "(CapEff|Max locked memory|NVRM version)?:?[ -~\n]{0,60}", bytes: Vec<u8>) {
            let _ = (limit(&text, MEMLOCK), driver_module(&text), capability(&text, 23), chosen(&text));
            let _ = page_size(&bytes);
        }
    }
}
