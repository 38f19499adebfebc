//! Libraries that decide how the driver answers.

use serde::{Deserialize, Serialize};

use crate::topology::kernel::Kernel;

/// The libraries in the address space of a process that has opened the driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Libraries {
    /// The driver library's file.
    #[serde(rename = "library")]
    pub driver: Option<String>,
    /// The files of libraries that share GPUs between containers and answer driver calls in the driver's place:
    /// `libvgpu.so`.
    pub shims: Vec<String>,
}

impl Libraries {
    /// Finds the libraries of this process. Source: `/proc/self/maps`.
    pub fn of_this_process() -> Self {
        let maps = Kernel::here().read("/proc/self/maps");
        Self::of_maps(&maps.unwrap_or_default())
    }

    fn of_maps(maps: &str) -> Self {
        let paths = || {
            maps.lines()
                .filter_map(|line| line.find('/').map(|at| &line[at..]))
        };
        let named = |path: &&str, name: &str| {
            path.rsplit('/')
                .next()
                .is_some_and(|file| file.starts_with(name))
        };
        let mut shims: Vec<String> = paths()
            .filter(|path| named(path, "libvgpu.so"))
            .map(str::to_owned)
            .collect();
        shims.dedup();
        Self {
            driver: paths()
                .find(|path| named(path, "libcuda.so"))
                .map(str::to_owned),
            shims,
        }
    }

    /// Returns the driver library's file, its folder, and the version in its name, if it has one.
    pub(super) fn driver_file(&self) -> Option<(&str, &str, Option<&str>)> {
        let path = self.driver.as_deref()?;
        let (folder, file) = path.rsplit_once('/')?;
        let version = file.strip_prefix("libcuda.so.");
        Some((
            path,
            folder,
            version.filter(|version| version.contains('.')),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_by_the_names_of_their_files() {
        let maps = "\
7f10-7f20 r-xp 0 08:01 5  /usr/lib/libvgpu.so.d/libc.so.6
7f20-7f30 r--p 0 08:01 7  /usr/local/vgpu/libvgpu.so
7f30-7f40 r-xp 0 08:01 7  /usr/local/vgpu/libvgpu.so
7f40-7f50 rw-p 0 00:00 0
7f50-7f60 r-xp 0 08:01 9  /usr/local/cuda/compat/libcuda.so.560.28.03
7f60-7f70 r-xp 0 08:01 8  /usr/lib/libcuda.so.580.1
";
        let found = Libraries::of_maps(maps);
        assert_eq!(found.shims, ["/usr/local/vgpu/libvgpu.so"]);
        let folder = "/usr/local/cuda/compat";
        let path = format!("{folder}/libcuda.so.560.28.03");
        assert_eq!(
            found.driver_file(),
            Some((&*path, folder, Some("560.28.03")))
        );
        let none = Libraries::of_maps("");
        assert_eq!((&none, none.driver_file()), (&Libraries::default(), None));
    }
}
