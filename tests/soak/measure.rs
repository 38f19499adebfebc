//! A service process as the kernel sees it, and as it sees itself.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use crate::service::Service;

/// One look at a service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Resident bytes of its own: heap, stacks.
    pub anonymous: u64,
    /// All resident bytes, those of programs and of simulated device memory too.
    pub resident: u64,
    /// File descriptors other than of simulated device memory.
    pub fds: u64,
    /// File descriptors of simulated device memory, and that memory's bytes.
    pub memory_fds: u64,
    pub memory_bytes: u64,
    /// All threads but the runtime's idle ones, which end after ten seconds.
    pub threads: u64,
    pub idle_threads: u64,
    /// Its gauges, summed over nodes, without the prefix `egmem_`.
    pub gauges: BTreeMap<String, u64>,
    /// Its counters, likewise, without `_total`.
    pub counters: BTreeMap<String, u64>,
}

impl Look {
    /// Looks at a service.
    ///
    /// # Errors
    /// The kernel's, where something went while it was looked at.
    pub fn at(service: &Service) -> io::Result<Self> {
        let mut look = Self::default();
        look.read_metrics(&service.metrics()?);
        let process = format!("/proc/{}", service.pid());
        look.read_memory(&fs::read_to_string(format!("{process}/smaps_rollup"))?);
        look.read_fds(&format!("{process}/fd"))?;
        look.read_threads(&format!("{process}/task"))?;
        Ok(look)
    }

    /// A gauge's value.
    pub fn gauge(&self, name: &str) -> u64 {
        self.gauges.get(name).copied().unwrap_or(0)
    }

    fn read_metrics(&mut self, text: &str) {
        let mut kinds = HashMap::new();
        for line in text.lines() {
            if let Some((name, kind)) = line
                .strip_prefix("# TYPE egmem_")
                .and_then(|rest| rest.split_once(' '))
            {
                kinds.insert(name.to_owned(), kind.to_owned());
            }
            let Some((name, value)) = line
                .strip_prefix("egmem_")
                .and_then(|rest| rest.rsplit_once(' '))
            else {
                continue;
            };
            let name = name.split('{').next().unwrap_or(name);
            let value: u64 = value.parse().unwrap_or(0);
            match name.strip_suffix("_total") {
                Some(counter) => *self.counters.entry(counter.to_owned()).or_default() += value,
                None if kinds.get(name).is_some_and(|kind| kind == "gauge") => {
                    *self.gauges.entry(name.to_owned()).or_default() += value;
                }
                None => {}
            }
        }
    }

    fn read_memory(&mut self, rollup: &str) {
        let kilobytes = |key: &str| {
            let line = rollup.lines().find_map(|line| line.strip_prefix(key));
            let word = line.and_then(|rest| rest.split_whitespace().next());
            word.and_then(|word| word.parse::<u64>().ok()).unwrap_or(0)
        };
        self.anonymous = kilobytes("Anonymous:") << 10;
        self.resident = kilobytes("Rss:") << 10;
    }

    fn read_fds(&mut self, folder: &str) -> io::Result<()> {
        let mut memories = HashMap::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let Ok(target) = fs::read_link(&path) else {
                continue;
            };
            if !target.to_string_lossy().starts_with("/memfd:egmem-sim") {
                self.fds += 1;
                continue;
            }
            self.memory_fds += 1;
            if let Ok(file) = fs::metadata(&path) {
                memories.insert(file.ino(), file.len());
            }
        }
        self.memory_bytes = memories.values().sum();
        Ok(())
    }

    /// A process's files other than simulated device memory, and its sockets as the kernel lists them.
    pub fn open_files(pid: u32) -> String {
        let mut text = String::new();
        let targets = fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten();
        let targets = targets.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        let sockets: Vec<String> = ["tcp", "unix"]
            .map(|kind| fs::read_to_string(format!("/proc/{pid}/net/{kind}")).unwrap_or_default())
            .iter()
            .flat_map(|table| table.lines().map(str::to_owned))
            .collect();
        for target in targets {
            let target = target.to_string_lossy().into_owned();
            if target.starts_with("/memfd:egmem-sim") {
                continue;
            }
            let inode = target
                .strip_prefix("socket:[")
                .and_then(|rest| rest.strip_suffix(']'));
            let line = inode.and_then(|inode| {
                let of_inode = |line: &&String| line.split_whitespace().any(|word| word == inode);
                sockets.iter().find(of_inode)
            });
            let line = line.map_or("", |line| line.trim());
            let _ = writeln!(text, "{target} {line}");
        }
        text
    }

    /// The runtime starts its workers first: its other threads are for blocking calls.
    fn read_threads(&mut self, folder: &str) -> io::Result<()> {
        let mut workers = std::thread::available_parallelism().map_or(1, |count| count.get());
        let mut threads: Vec<u32> = fs::read_dir(folder)?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .collect();
        threads.sort_unstable();
        for thread in threads {
            let name = fs::read_to_string(format!("{folder}/{thread}/comm")).unwrap_or_default();
            if !name.starts_with("tokio") {
                self.threads += 1;
            } else if workers > 0 {
                workers -= 1;
                self.threads += 1;
            } else {
                self.idle_threads += 1;
            }
        }
        Ok(())
    }

    /// Returns the differences from the baseline, if any; resident bytes are compared elsewhere.
    pub fn differs(&self, baseline: &Self, idle_threads: bool) -> Option<String> {
        let mut differences = Vec::new();
        let mut compare = |what: &str, now: u64, then: u64| {
            if now != then {
                differences.push(format!("{what}: {now}, in the baseline {then}"));
            }
        };
        // The connection of the look before may have been open in the baseline: fewer are no difference.
        compare("fds", self.fds.max(baseline.fds), baseline.fds);
        compare("threads", self.threads, baseline.threads);
        if idle_threads {
            compare("idle threads", self.idle_threads, 0);
        }
        for gauge in [
            "ready",
            "draining",
            "connections",
            "handshakes",
            "sessions",
            "fds",
            "leases",
            "names",
            "published_bytes",
            "owners",
            "unconfirmed_bytes",
            "dirty_bytes",
        ] {
            compare(gauge, self.gauge(gauge), baseline.gauge(gauge));
        }
        let own = |look: &Self| {
            look.gauge("pinned_bytes")
                .wrapping_sub(look.gauge("kept_bytes"))
        };
        compare("pinned bytes but for kept ones", own(self), own(baseline));
        compare(
            "bytes of memory fds",
            self.memory_bytes,
            self.gauge("pinned_bytes"),
        );
        (!differences.is_empty()).then(|| differences.join("; "))
    }
}
