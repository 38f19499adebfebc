//! How many files a process has open, and may open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Returns the numbers of this process's open files, but for the one that reads them.
fn numbers() -> Vec<u64> {
    let folder = std::fs::read_dir("/proc/self/fd").unwrap();
    let number = |entry: std::io::Result<std::fs::DirEntry>| -> u64 {
        entry
            .unwrap()
            .file_name()
            .to_str()
            .unwrap()
            .parse()
            .unwrap()
    };
    let mut numbers: Vec<u64> = folder.map(number).collect();
    // The folder is closed by now.
    numbers.retain(|number| std::fs::read_link(format!("/proc/self/fd/{number}")).is_ok());
    numbers
}

/// Returns how many files this process has open.
pub fn open_files() -> usize {
    numbers().len()
}

/// Lets this process open `more` files beside those that it has open, and no more; returns the limit from before.
///
/// The limit is one of numbers, and a GPU's driver holds many files: so the free numbers are counted.
pub fn leave_files(more: u64) -> Rlimit {
    let open = numbers();
    let free = (0..).filter(|number| !open.contains(number));
    let last = free.take(more as usize).last();
    let limit = getrlimit(Resource::Nofile);
    let current = Some(last.map_or(0, |number| number + 1));
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    limit
}

/// Sets this process's limit of files again.
pub fn set_file_limit(limit: Rlimit) {
    setrlimit(Resource::Nofile, limit).unwrap();
}
