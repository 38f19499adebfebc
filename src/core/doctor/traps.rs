//! Known faults of drivers, by the version of the kernel module.
//!
//! All are reports of others, which were not reproduced here. docs/driver-versions.md has the same table with sources.

use crate::capability::ImexChannel;
use crate::host::HostFacts;
use crate::topology::Topology;

/// The machine as far as faults depend on it.
pub(super) struct Machine<'a> {
    pub(super) host: &'a HostFacts,
    pub(super) topology: &'a Topology,
    pub(super) imex: &'a ImexChannel,
}

/// A fault of drivers.
pub(super) struct Trap {
    /// The first version with it, and the first one without it again, as far as they are known.
    versions: (Option<Version>, Option<Version>),
    /// Whether a machine with such a driver meets it.
    applies: fn(&Machine<'_>) -> bool,
    /// The symptom.
    pub(super) finding: &'static str,
    /// The remedy.
    pub(super) remedy: &'static str,
}

/// The first two numbers of a kernel module's version.
type Version = (u32, u32);

const GIB: u64 = 1 << 30;

pub(super) const TRAPS: &[Trap] = &[
    Trap {
        versions: (None, Some((595, 0))),
        applies: |_| true,
        finding: "drivers before 595 were reported to crash inside cuMemCreate for host memory",
        remedy: "try the calls that a program needs in a child process first, as `egmem doctor` does, or install 595 or newer",
    },
    Trap {
        versions: (Some((580, 0)), Some((590, 0))),
        applies: |machine| {
            let nodes = machine.topology.nodes().iter();
            nodes.map(|node| node.memory_total).sum::<u64>() >= 512 * GIB
        },
        finding: "drivers 580 were reported to fail for 512 GiB or more of host memory in one call",
        remedy: "allocate in chunks, as buffers and heaps do by default",
    },
    Trap {
        versions: (Some((590, 44)), None),
        applies: |machine| {
            machine.host.architecture == "aarch64" && machine.host.page_size == Some(64 << 10)
        },
        finding: "drivers from 590.44 on were reported to fault below each 4 GiB boundary of one allocation, with pages of 64 KiB",
        remedy: "keep allocations of physical memory below 4 GiB, as buffers and heaps do",
    },
    Trap {
        versions: (Some((615, 0)), None),
        applies: |machine| matches!(machine.imex, ImexChannel::Accessible { .. }),
        finding: "drivers from 615 on were reported not to rebuild fabric state when a checkpoint of a process is restored",
        remedy: "export and import memory by fabric handles again after a restore",
    },
    Trap {
        versions: (None, None),
        applies: |machine| {
            let gpus = machine.topology.gpus().iter();
            let twice = gpus.map(|gpu| gpu.memory.saturating_mul(2)).max();
            let limit = machine.host.address_space.and_then(|limit| limit.soft);
            limit.zip(twice).is_some_and(|(limit, twice)| limit < twice)
        },
        finding: "a pool without a largest size was reported to reserve twice a GPU's memory in addresses, and this process may not have as many",
        remedy: "set max_size on pools, or raise the limit (ulimit -v unlimited)",
    },
];

/// Returns the faults that a machine's driver may have.
pub(super) fn found<'a>(machine: &'a Machine<'a>) -> impl Iterator<Item = &'static Trap> + 'a {
    let module = machine.host.driver_module.as_ref();
    let version = module.and_then(|module| version(&module.version));
    let has = move |trap: &&Trap| match version {
        Some(version) => {
            let (since, until) = trap.versions;
            since.is_none_or(|since| version >= since) && until.is_none_or(|until| version < until)
        }
        None => false,
    };
    TRAPS
        .iter()
        .filter(has)
        .filter(|trap| (trap.applies)(machine))
}

/// Parses `580.159.04`.
fn version(text: &str) -> Option<Version> {
    let mut numbers = text.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_two_numbers() {
        assert_eq!(version("580.159.04"), Some((580, 159)));
        assert_eq!(version("590.44"), Some((590, 44)));
        for text in ["", "580", "580.x", "x.1"] {
            assert_eq!(version(text), None, "{text}");
        }
    }

    #[test]
    fn the_documentation_has_every_trap() {
        let text = include_str!("../../../docs/driver-versions.md");
        for trap in TRAPS {
            let row = format!("| {} | {} |", trap.finding, trap.remedy);
            assert!(text.contains(&row), "docs/driver-versions.md lacks\n{row}");
        }
    }
}
