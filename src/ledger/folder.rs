//! The folder of the sockets at which processes offer their ledgers.

use std::path::PathBuf;

/// The folders that processes of this user may use, the preferred one first: a process may lack the environment
/// variable that another has.
pub(crate) fn places() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let runtime = runtime.filter(|path| path.is_absolute());
    let user = rustix::process::geteuid().as_raw();
    let temporary = PathBuf::from(format!("/tmp/egmem-{user}"));
    let runtime = runtime.map(|path| path.join("egmem"));
    runtime.into_iter().chain([temporary]).collect()
}

/// Returns the name of a process's socket.
pub(crate) fn name(pid: u32, instance: &str) -> String {
    let instance: String = instance.chars().take(12).collect();
    format!("ps-{pid}-{instance}.sock")
}

/// Returns the process id in a socket's name.
pub(crate) fn pid_of(name: &str) -> Option<u32> {
    let rest = name.strip_prefix("ps-")?.strip_suffix(".sock")?;
    rest.split_once('-')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_process() {
        let name = name(77, "0123456789abcdef");
        assert_eq!(name, "ps-77-0123456789ab.sock");
        assert_eq!(pid_of(&name), Some(77));
        for wrong in [
            "ps-77.sock",
            "ps-x-1.sock",
            "77-1.sock",
            "ps-77-1.sock.lock",
        ] {
            assert_eq!(pid_of(wrong), None);
        }
    }
}
