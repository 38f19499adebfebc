//! The process's memory mappings, and how many the kernel allows it.

use crate::driver::Code;
use crate::topology::kernel::Kernel;
use crate::{Driver, DriverError, Error};

/// The file with the most mappings that a process may have.
pub(super) const LIMIT: &str = "/proc/sys/vm/max_map_count";

/// How many mappings below the limit the kernel may refuse one: a call may need several, and others may have gone since.
const SLACK: u64 = 64;

/// The process's mappings, and the most that it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mappings {
    count: u64,
    limit: u64,
}

impl Mappings {
    fn of(driver: &Driver) -> Option<Self> {
        match driver.simulated_host() {
            Some(host) => Some(Self {
                count: host.mappings,
                limit: host.max_mappings?,
            }),
            None => Self::read(&Kernel::here()),
        }
    }

    fn read(kernel: &Kernel) -> Option<Self> {
        let maps = kernel.read_bytes("/proc/self/maps")?;
        Some(Self {
            count: maps.iter().filter(|&&byte| byte == b'\n').count() as u64,
            limit: kernel.number(LIMIT)?,
        })
    }
}

/// Names the limit behind a call that the driver refused for lack of memory, if the process has as many mappings as the
/// kernel allows it.
pub fn too_many_mappings(driver: &Driver, source: DriverError) -> Option<Error> {
    if source.code != Code::OUT_OF_MEMORY {
        return None;
    }
    let Mappings { count, limit } = Mappings::of(driver)?;
    (count + SLACK >= limit).then_some(Error::TooManyMappings {
        mappings: count,
        limit,
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::NodeId;
    use crate::topology::test_tree::Tree;
    use crate::{Buffer, Growth, Machine};

    #[test]
    fn mappings_are_counted_as_the_kernel_does() {
        let tree = Tree::new();
        assert_eq!(Mappings::read(&tree.kernel()), None);
        tree.file("proc/sys/vm/max_map_count", "65530\n");
        tree.file("proc/self/maps", "1-2 r--p /a\n2-3 rw-s /dev/nvidiactl\n");
        let two = Mappings {
            count: 2,
            limit: 65_530,
        };
        assert_eq!(Mappings::read(&tree.kernel()), Some(two));
        if let Some(here) = Mappings::read(&Kernel::here()) {
            assert!(here.count > 2 && here.count < here.limit, "{here:?}");
        }
    }

    #[test]
    fn a_process_with_too_many_mappings_is_told_of_the_limit() {
        let mut machine = Machine::gh200();
        machine.max_mappings = Some(3);
        let driver = Driver::simulated(machine).unwrap();
        let growth = Growth::steady().chunk(2 << 20);
        let buffer = |bytes| {
            Buffer::on(NodeId(0))
                .bytes(bytes)
                .growth(growth)
                .allocate(&driver)
        };
        let kept = buffer(4 << 20).unwrap();
        let error = buffer(6 << 20).unwrap_err();
        let is_named = matches!(
            error,
            Error::TooManyMappings {
                mappings: 3,
                limit: 3,
                ..
            }
        );
        assert!(is_named, "{error}");
        assert!(
            error.remedy().contains("vm.max_map_count"),
            "{}",
            error.remedy()
        );
        drop(kept);
        buffer(6 << 20).unwrap();
    }
}
