//! What the kernel tells of processes under `/proc`, and traces of container engines.

use serde::Serialize;

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
