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
        match of_groups(&groups) {
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
}

/// Detects an engine from the names of the control groups; a control group namespace hides them.
fn of_groups(groups: &str) -> Option<Container> {
    let names = [
        ("kubepods", Container::Kubernetes),
        ("libpod", Container::Podman),
        ("docker", Container::Docker),
        ("containerd", Container::Other("containerd".into())),
        ("lxc", Container::Other("lxc".into())),
    ];
    // Only a container's own group has such a name; that of docker's daemon is a service.
    let mut parts = groups
        .lines()
        .filter_map(|line| line.splitn(3, ':').nth(2))
        .flat_map(|path| path.split('/'))
        .filter(|part| !part.ends_with(".service") && !part.ends_with(".socket"));
    let found = |part: &str| names.iter().find(|(name, _)| part.starts_with(name));
    parts.find_map(|part| found(part).map(|(_, container)| container.clone()))
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
            assert_eq!(of_groups(groups), container, "{groups}");
        }
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
