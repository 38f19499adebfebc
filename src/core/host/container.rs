//! Detects whether this process runs in a container, from traces that container engines leave.

use serde::Serialize;

use crate::topology::kernel::Kernel;

/// A container engine, as far as its traces show.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Container {
    /// A Kubernetes pod, with any engine.
    Kubernetes,
    /// Docker.
    Docker,
    /// Podman.
    Podman,
    /// Apptainer or Singularity.
    Apptainer,
    /// Another engine, with its own name for itself.
    Other(String),
}

crate::driver::display_texts! {
    Container {
        Self::Kubernetes => "Kubernetes",
        Self::Docker => "Docker",
        Self::Podman => "Podman",
        Self::Apptainer => "Apptainer",
        Self::Other(name) => name,
    }
}

impl Container {
    pub(super) fn find(kernel: &Kernel) -> Option<Self> {
        let groups = kernel.read("/proc/self/cgroup").unwrap_or_default();
        let root = kernel.list("/");
        let has = |name: &str| root.iter().any(|entry| entry == name);
        // systemd's interface for containers; engines unknown here set it as well.
        let said = kernel.read("/run/systemd/container");
        let service_account = !kernel.list("/var/run/secrets/kubernetes.io").is_empty();
        match Self::of_groups(&groups) {
            _ if service_account => Some(Self::Kubernetes),
            Some(container) => Some(container),
            None if has(".dockerenv") => Some(Self::Docker),
            None if kernel.read("/run/.containerenv").is_some() => Some(Self::Podman),
            None if has(".singularity.d") => Some(Self::Apptainer),
            None => {
                let name = said?.trim().to_owned();
                (!name.is_empty()).then_some(Self::Other(name))
            }
        }
    }

    /// Detects the engine of a process from the names of its control groups, `/proc/PID/cgroup`; a control group namespace
    /// hides them.
    pub fn of_groups(groups: &str) -> Option<Self> {
        let names = [
            ("kubepods", Self::Kubernetes),
            ("libpod", Self::Podman),
            ("docker", Self::Docker),
            ("containerd", Self::Other("containerd".into())),
            ("lxc", Self::Other("lxc".into())),
        ];
        let found = |part: &str| names.iter().find(|(name, _)| part.starts_with(name));
        parts(groups).find_map(|part| found(part).map(|(_, container)| container.clone()))
    }

    /// Returns the first 12 characters of the container's id in `/proc/PID/cgroup`, as engines show it.
    pub fn id_in_groups(groups: &str) -> Option<&str> {
        let is_id =
            |word: &&str| word.len() >= 32 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
        let words = parts(groups).flat_map(|part| part.split(['-', '.', ':']));
        words.filter(is_id).last().and_then(|id| id.get(..12))
    }
}

/// Returns the names in the paths of control groups. Only a container's own group has an engine's name; that of docker's
/// daemon is a service.
fn parts(groups: &str) -> impl Iterator<Item = &str> {
    let paths = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let parts = paths.flat_map(|path| path.split('/'));
    parts.filter(|part| !part.ends_with(".service") && !part.ends_with(".socket"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::test_tree::Tree;

    #[test]
    fn group_names_tell_the_engine() {
        for (groups, container) in [
            ("0::/\n", None),
            ("0::/user.slice/user-1000.slice/session-2.scope\n", None),
            ("0::/system.slice/docker.service\n", None),
            ("12:memory:/docker/0123abc\n", Some(Container::Docker)),
            (
                "0::/system.slice/docker-0123abc.scope\n",
                Some(Container::Docker),
            ),
            (
                "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope\n",
                Some(Container::Kubernetes),
            ),
            (
                "0::/machine.slice/libpod-77.scope/container\n",
                Some(Container::Podman),
            ),
        ] {
            assert_eq!(Container::of_groups(groups), container, "{groups}");
        }
    }

    #[test]
    fn ids_are_the_last_long_number_of_the_path() {
        let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        for groups in [
            format!("0::/docker/{id}\n"),
            format!("0::/system.slice/docker-{id}.scope\n"),
            format!("0::/kubepods.slice/kubepods-pod7.slice/cri-containerd-{id}.scope\n"),
        ] {
            assert_eq!(Container::id_in_groups(&groups), Some("0123456789ab"));
        }
        assert_eq!(
            Container::id_in_groups("0::/user.slice/session-2.scope\n"),
            None
        );
    }

    #[test]
    fn files_tell_it_where_groups_do_not() {
        let tree = Tree::new();
        assert_eq!(Container::find(&tree.kernel()), None);
        tree.file("run/systemd/container", "systemd-nspawn\n");
        assert_eq!(
            Container::find(&tree.kernel()).unwrap().to_string(),
            "systemd-nspawn"
        );
        tree.file("run/.containerenv", "");
        assert_eq!(Container::find(&tree.kernel()), Some(Container::Podman));
        tree.file(".dockerenv", "");
        assert_eq!(Container::find(&tree.kernel()), Some(Container::Docker));
        tree.file("var/run/secrets/kubernetes.io/serviceaccount/token", "");
        assert_eq!(Container::find(&tree.kernel()), Some(Container::Kubernetes));
    }
}
