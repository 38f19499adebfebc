//! Takes out of texts and JSON what identifies a machine, a user or a process.

use std::fs;

use serde_json::Value;

/// Fields that identify a GPU or its place.
const HIDDEN: [&str; 2] = ["uuid", "pci_bus_id"];

/// Fields whose texts are words of this library: a host may have such a name.
const VOCABULARY: [&str; 12] = [
    "answer",
    "api",
    "architecture",
    "backend",
    "backing",
    "call",
    "host_numa_source",
    "kind",
    "link",
    "memory",
    "path",
    "state",
];

/// Folders that are the same on every machine.
const FOLDERS: [&str; 8] = [
    "/dev/",
    "/etc/",
    "/lib/",
    "/lib64/",
    "/proc/",
    "/sys/",
    "/usr/lib/",
    "/usr/lib64/",
];

/// The names to take out.
pub(super) struct Private {
    names: Vec<String>,
}

impl Private {
    /// Finds the names of this host and user. `root` identifies nobody.
    pub(super) fn of_this_process() -> Self {
        let user = rustix::process::getuid().as_raw().to_string();
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let mut users = passwd.lines().map(|line| line.split(':'));
        let of_user = users.find_map(|mut fields| {
            let name = fields.next()?;
            (fields.nth(1)? == user).then(|| name.to_owned())
        });
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = host.trim().to_owned();
        let short = host.split('.').next().map(str::to_owned);
        let environment = ["USER", "LOGNAME", "HOSTNAME", "SUDO_USER"];
        let names = environment.into_iter().map(|name| std::env::var(name).ok());
        let names = names.chain([of_user, short, Some(host)]);
        Self::of_names(names.flatten())
    }

    fn of_names(names: impl Iterator<Item = String>) -> Self {
        let mut names: Vec<String> = names.collect();
        names.retain(|name| !name.is_empty() && name != "root");
        // A host's full name before its first part.
        names.sort_by_key(|name| std::cmp::Reverse(name.len()));
        Self { names }
    }

    /// Cleans all texts of a value, and leaves out fields that identify.
    pub(super) fn clean_json(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.clean(text),
            Value::Array(values) => values.iter_mut().for_each(|value| self.clean_json(value)),
            Value::Object(fields) => {
                fields.retain(|name, _| !HIDDEN.contains(&name.as_str()));
                for (name, value) in fields {
                    match value {
                        Value::String(text) if VOCABULARY.contains(&name.as_str()) => {
                            *text = each_word(text, pattern);
                        }
                        value => self.clean_json(value),
                    }
                }
            }
            _ => {}
        }
    }

    /// Puts a word in the place of each name, address, path, UUID and process id.
    pub(super) fn clean(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for name in &self.names {
            text = without_name(&text, name);
        }
        each_word(&text, pattern)
    }
}

/// Replaces a name where it is not a part of a longer word.
fn without_name(text: &str, name: &str) -> String {
    let is_word = |char: char| char.is_alphanumeric() || char == '_';
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(name) {
        let (before, after) = (&rest[..at], &rest[at + name.len()..]);
        let begins = before.chars().next_back().or(out.chars().next_back());
        let alone = !begins.is_some_and(is_word) && !after.starts_with(is_word);
        out += before;
        out += if alone { "<name>" } else { name };
        rest = after;
    }
    out + rest
}

/// Replaces words of a text; what is between them stays.
fn each_word(text: &str, replace: fn(&str, &str) -> Option<&'static str>) -> String {
    let is_word = |char: char| char.is_alphanumeric() || "-_./:+@~%".contains(char);
    let mut out = String::new();
    let mut rest = text;
    let mut previous = "";
    while let Some(at) = rest.find(is_word) {
        let end = rest[at..].find(|char| !is_word(char));
        let end = end.map_or(rest.len(), |end| at + end);
        let word = rest[at..end].trim_end_matches(['.', ':']);
        out += &rest[..at];
        out += replace(previous, word).unwrap_or(word);
        rest = &rest[at + word.len()..];
        if word.is_empty() {
            // Nothing but full stops and colons.
            out += &rest[..end - at];
            rest = &rest[end - at..];
        } else {
            previous = word;
        }
    }
    out + rest
}

/// Returns what a word of this form must not be shown as.
fn pattern(previous: &str, word: &str) -> Option<&'static str> {
    let is_hex = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    let lower = word.to_ascii_lowercase();
    let groups: Vec<&str> = lower.split('-').collect();
    let uuid = groups.windows(5).any(|groups| {
        let lengths = groups.iter().map(|group| group.len());
        groups.iter().all(|group| is_hex(group)) && lengths.eq([8, 4, 4, 4, 12])
    });
    // A UUID may be shortened.
    let is_short =
        |pair: &[&str]| matches!(pair, ["gpu" | "mig", id] if id.len() >= 4 && is_hex(id));
    let short = groups.windows(2).any(is_short);
    // Between `::` IPv6 has nothing.
    let colons: Vec<&str> = lower.split([':', '.']).collect();
    let pci = lower.matches(':').count() >= if lower.contains('.') { 1 } else { 2 }
        && colons.iter().all(|part| part.is_empty() || is_hex(part))
        && colons.iter().any(|part| !part.is_empty());
    let dots: Vec<&str> = lower.split('.').collect();
    let internet = dots.len() == 4 && dots.iter().all(|part| is_number(part));
    let long = lower.len() >= 8 && is_hex(&lower) && !is_number(&lower);
    // Not the `0x` of gh200x4.
    let number = |at: usize| !lower[..at].ends_with(|char: char| char.is_alphanumeric());
    let hex = lower.match_indices("0x").any(|(at, _)| number(at));
    if uuid || short {
        Some("<uuid>")
    } else if hex || pci || internet || long || lower.contains('@') {
        Some("<address>")
    } else if lower.contains('/') && !lower.split(':').all(is_public_path) {
        Some("<path>")
    } else if lower.starts_with('/') {
        // Each part of a path that many machines have, too.
        let parts = lower.split(['/', ':']).filter(|part| !part.is_empty());
        let parts: Vec<&str> = parts.collect();
        parts.windows(2).find_map(|pair| match pair {
            ["proc", id] if is_number(id) => Some("<path>"),
            pair => pattern("", pair[1]),
        })
    } else if is_pid(previous, &lower) {
        Some("<pid>")
    } else {
        None
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns whether a word is a process id: `pid 12`, `PID: 12`, `pid:12`.
fn is_pid(previous: &str, word: &str) -> bool {
    let previous = previous.trim_end_matches(':').to_ascii_lowercase();
    let follows = matches!(&*previous, "pid" | "process").then_some(word);
    word.strip_prefix("pid:").or(follows).is_some_and(is_number)
}

/// Returns whether a word with a slash is a path that many machines have, or none.
fn is_public_path(word: &str) -> bool {
    match word.find('/') {
        Some(0) => FOLDERS.iter().any(|folder| word.starts_with(folder)),
        // `GB/s`; `~/x` and `file:/x` are paths.
        Some(at) => word[..at].bytes().all(|byte| byte.is_ascii_alphanumeric()),
        None => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn private() -> Private {
        let names = ["ada", "node17", "node17.example.org"];
        Private::of_names(names.map(str::to_owned).into_iter())
    }

    #[test]
    fn names_addresses_paths_and_ids_are_taken_out() {
        for (text, clean) in [
            (
                "ada on node17.example.org: node17,",
                "<name> on <name>: <name>,",
            ),
            (
                "ada2 and adage stay, node 17 too",
                "ada2 and adage stay, node 17 too",
            ),
            ("at 0x7f00deadbeef.", "at <address>."),
            (
                "range 7f00deadbeef to 4294967296 bytes",
                "range <address> to 4294967296 bytes",
            ),
            ("GPU-12345678-9abc-def0-1234-56789abcdef0", "<uuid>"),
            ("=GPU-12345678-9abc-def0-1234-56789abcdef0,1", "=<uuid>,1"),
            ("GPU 0000:01:00.0 at 10.0.0.7", "GPU <address> at <address>"),
            ("/home/x/lib.so, /tmp/a, ~/b", "<path>, <path>, <path>"),
            (
                "/dev/nvidia0 /usr/lib/libcuda.so.580.1",
                "/dev/nvidia0 /usr/lib/libcuda.so.580.1",
            ),
            (
                "5.5 GB/s, 580.159.04, CUDA 13.0 ...",
                "5.5 GB/s, 580.159.04, CUDA 13.0 ...",
            ),
            (
                "process 4711 and pid 12 of 13",
                "process <pid> and pid <pid> of 13",
            ),
            ("gh200x4, node:0x12", "gh200x4, <address>"),
            ("/usr/lib/a.so:/opt/x/project/b.so", "<path>"),
            ("GPU-8932f937 MIG-89ab", "<uuid> <uuid>"),
            ("fe80::1 and 2001:db8::7", "<address> and <address>"),
            (
                "PID 7, pid:8, process: 9",
                "PID <pid>, <pid>, process: <pid>",
            ),
            (
                "/sys/bus/pci/devices/0000:09:00.0/numa_node /proc/4711/maps",
                "<path> <path>",
            ),
            ("take 3 of 4: all", "take 3 of 4: all"),
        ] {
            assert_eq!(private().clean(text), clean);
        }
    }

    #[test]
    fn json_loses_fields_that_identify_and_keeps_words_of_the_library() {
        let names = ["vmm"].map(str::to_owned).into_iter();
        let mut value = serde_json::json!({
            "uuid": "GPU-1", "pci_bus_id": "0", "memory": "vmm", "rows": [{"what": "vmm", "n": 1}],
        });
        Private::of_names(names).clean_json(&mut value);
        let clean = serde_json::json!({"memory": "vmm", "rows": [{"what": "<name>", "n": 1}]});
        assert_eq!(value, clean);
    }
}
