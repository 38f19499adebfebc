//! Processes of a made `/proc`.

use std::os::unix::fs::symlink;
use std::path::Path;

use super::files::Size;
use super::walk::Limits;
use super::*;
use crate::parts::possible_causes;

/// A folder that stands for `/`.
struct Tree(tempfile::TempDir);

impl Tree {
    /// Makes processes without files and mappings, in a state and with a number of threads.
    fn new(processes: &[(u32, char, u32)]) -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        for (pid, state, threads) in processes {
            let stat =
                format!("{pid} (x) {state} 1 1 1 0 -1 0 0 0 0 0 1 2 3 4 20 0 {threads} 0 77 8 9");
            tree.file(*pid, "stat", &stat);
            tree.file(*pid, "maps", "");
            std::fs::create_dir(tree.folder(*pid).join("fd")).unwrap();
        }
        tree
    }

    fn folder(&self, pid: u32) -> std::path::PathBuf {
        self.0.path().join(format!("proc/{pid}"))
    }

    fn file(&self, pid: u32, name: &str, text: &str) {
        std::fs::create_dir_all(self.folder(pid)).unwrap();
        std::fs::write(self.folder(pid).join(name), text).unwrap();
    }

    /// Returns what is found where NVML names `pids`.
    fn holders(&self, pids: &[u32]) -> Holders {
        let named = pids.iter().map(|&pid| NvmlProcess::new(pid, Some(1)));
        let gpu = NvmlGpu {
            processes: named.collect(),
            ..NvmlGpu::default()
        };
        Holders::judged(self.walk(pids, Tmpfs::default()), Ok(vec![gpu]), &[])
    }

    /// Looks at the processes for as long as it takes.
    fn walk(&self, first: &[u32], tmpfs: Tmpfs) -> Walk {
        let limits = Limits {
            process: |_| LONG,
            pages: |_| LONG,
            walk: LONG,
        };
        Walk::of(self.0.path(), first, false, tmpfs, limits)
    }
}

/// Long enough for every machine.
const LONG: Duration = Duration::from_secs(600);

/// Makes a pipe that nobody writes, which answers as little as a lock that is never given back.
fn silent(path: &Path) {
    let (kind, mode) = (rustix::fs::FileType::Fifo, 0o600.into());
    rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, 0).unwrap();
}

fn why(holders: &Holders, pid: u32) -> &[Why] {
    let mut all = holders.processes.iter();
    &all.find(|holder| holder.pid == pid).unwrap().why
}

#[test]
fn a_process_without_a_readable_stat_is_unreadable_and_not_hidden() {
    // Linux lets nobody read this file, not even root.
    let write_only = Path::new("/proc/sys/vm/compact_memory");
    let error = std::fs::read(write_only).err().map(|error| error.kind());
    if error != Some(std::io::ErrorKind::PermissionDenied) {
        println!("skipped: no file here that root may not read");
        return;
    }
    let tree = Tree::new(&[(1, 'S', 1), (30, 'S', 1)]);
    std::fs::remove_file(tree.folder(30).join("stat")).unwrap();
    symlink(write_only, tree.folder(30).join("stat")).unwrap();
    let holders = tree.holders(&[30, 31]);
    assert_eq!(holders.unreadable, 1);
    assert_eq!(why(&holders, 30), [Why::Unreadable, Why::OnGpus]);
    assert_eq!(why(&holders, 31), [Why::Hidden, Why::OnGpus]);
}

#[test]
fn a_zombie_without_threads_is_neither_unreadable_nor_one_that_holds_memory() {
    let tree = Tree::new(&[(1, 'S', 1), (30, 'Z', 1), (31, 'Z', 2)]);
    let holders = tree.holders(&[30, 31]);
    assert_eq!(why(&holders, 30), [Why::OnGpus]);
    assert_eq!(why(&holders, 31), [Why::Zombie, Why::OnGpus]);
}

#[test]
fn files_of_a_tmpfs_that_is_counted_are_not_counted_by_process() {
    let tree = Tree::new(&[(1, 'S', 1), (30, 'S', 1)]);
    let maps = "7f0000000000-7f0000800000 rw-s 00000000 00:05 9    /dev/shm/a\n\
        7f0001000000-7f0002000000 rw-s 00000000 00:06 9    /dev/shm/b\n";
    tree.file(30, "maps", maps);
    let tmpfs = Tmpfs {
        devices: [5].into(),
        bytes: None,
    };
    let holders = Holders::judged(tree.walk(&[], tmpfs), Ok(Vec::new()), &[]);
    assert_eq!(holders.shared_found, 16 << 20);
    assert_eq!(holders.processes[0].shared_mapped, 24 << 20);
}

#[test]
fn a_file_has_the_size_that_is_measured_or_else_the_smallest_estimate() {
    let estimates = Tree::new(&[(1, 'S', 1), (30, 'S', 1), (31, 'S', 1), (32, 'S', 1)]);
    // Mapped twice; and by a process that maps more of it.
    let twice = "7f0000000000-7f0000800000 rw-s 00000000 00:01 9    /memfd:a (deleted)\n\
        7f0001000000-7f0001800000 rw-s 00000000 00:01 9    /memfd:a (deleted)\n";
    let more = "7f0000000000-7f0001000000 rw-s 00000000 00:01 9    /memfd:a (deleted)\n";
    for (pid, maps) in [(30, more), (31, twice), (32, more)] {
        estimates.file(pid, "maps", maps);
    }
    assert_eq!(estimates.holders(&[]).shared_found, 8 << 20);

    let measured = Tree::new(&[(1, 'S', 1), (30, 'S', 1), (31, 'S', 1)]);
    let size = |is_estimate, bytes| Size { is_estimate, bytes };
    let mut found = measured.walk(&[], Tmpfs::default());
    for (pid, size) in [(30, size(true, 4096)), (31, size(false, 8192))] {
        let holder = found.seen.get_mut(&pid).unwrap();
        holder.files.insert((1, 9), size);
    }
    let holders = Holders::judged(found, Ok(Vec::new()), &[]);
    assert_eq!(holders.shared_found, 8192);
}

#[test]
fn a_process_whose_mappings_do_not_come_is_kept_and_the_next_one_is_looked_at() {
    let tree = Tree::new(&[(1, 'S', 1), (30, 'D', 1), (31, 'S', 1)]);
    let maps = tree.folder(30).join("maps");
    std::fs::remove_file(&maps).unwrap();
    silent(&maps);
    symlink("/dev/nvidia0", tree.folder(31).join("fd/3")).unwrap();
    let limits = Limits {
        process: |pid| if pid == 30 { Duration::ZERO } else { LONG },
        pages: |_| LONG,
        walk: LONG,
    };
    let found = Walk::of(tree.0.path(), &[], false, Tmpfs::default(), limits);
    let holders = Holders::judged(found, Ok(Vec::new()), &[]);
    assert_eq!(why(&holders, 30), [Why::Waiting]);
    assert_eq!(why(&holders, 31), [Why::OpenAlone]);
    assert_eq!((holders.unreadable, &*holders.processes[1].name), (0, "x"));
    let causes = possible_causes(&holders).join("\n");
    assert!(causes.contains("wait in the kernel, 30:"), "{causes}");
    // The next report waits for it no more, however long it might.
    assert_eq!(why(&tree.holders(&[]), 30), [Why::Waiting]);
    // Ends the thread that waits.
    std::fs::write(&maps, "").unwrap();
}

#[test]
fn a_process_whose_pages_by_node_do_not_come_is_looked_at_and_says_so() {
    let tree = Tree::new(&[(1, 'S', 1), (30, 'S', 1), (31, 'S', 1)]);
    for pid in [30, 31] {
        let maps = "7f0000000000-7f0010000000 rw-s 00000000 00:05 9    /dev/nvidiactl\n";
        tree.file(pid, "maps", maps);
    }
    let pages = tree.folder(30).join("numa_maps");
    silent(&pages);
    let counted = "7f0000000000 default file=/dev/nvidiactl mapped=2 N1=2 kernelpagesize_kB=4\n";
    tree.file(31, "numa_maps", counted);
    let limits = Limits {
        process: |_| LONG,
        pages: |pid| if pid == 30 { Duration::ZERO } else { LONG },
        walk: LONG,
    };
    let found = Walk::of(tree.0.path(), &[], true, Tmpfs::default(), limits);
    let holders = Holders::judged(found, Ok(Vec::new()), &[]);
    let reasons = [
        Why::NodesUnknown,
        Why::MappedAlone,
        Why::OnGpus,
        Why::DriverMemory,
    ];
    assert_eq!(why(&holders, 30), reasons);
    assert_eq!(why(&holders, 31), &reasons[1..]);
    let bytes = |pid| {
        let mut all = holders.processes.iter();
        let holder = all.find(|holder| holder.pid == pid).unwrap();
        holder.by_node.values().sum::<u64>()
    };
    assert_eq!((bytes(30), bytes(31)), (0, 8192));
    assert_eq!(holders.not_looked_at, 0);
    let causes = possible_causes(&holders).join("\n");
    assert!(causes.contains("did not tell, of 30:"), "{causes}");
    // Ends the thread that waits.
    std::fs::write(&pages, "").unwrap();
}

#[test]
fn pages_that_the_kernel_was_not_asked_for_have_the_reason_of_those_that_come_late() {
    for unanswered in [Unanswered::Late, Unanswered::NotAsked] {
        let mut holder = Holder::default();
        holder.add_pages(Err(unanswered));
        assert_eq!(holder.why, [Why::NodesUnknown]);
        assert!(holder.by_node.is_empty());
    }
}

#[test]
fn processes_that_are_left_when_a_walk_takes_too_long_are_not_looked_at() {
    let tree = Tree::new(&[(1, 'S', 1), (30, 'S', 1), (31, 'Z', 1)]);
    let limits = Limits {
        process: |_| LONG,
        pages: |_| LONG,
        walk: Duration::ZERO,
    };
    let found = Walk::of(tree.0.path(), &[], false, Tmpfs::default(), limits);
    let gpu = NvmlGpu {
        processes: vec![NvmlProcess::new(30, Some(1))],
        ..NvmlGpu::default()
    };
    let holders = Holders::judged(found, Ok(vec![gpu]), &[]);
    assert_eq!(why(&holders, 30), [Why::NotLookedAt, Why::OnGpus]);
    assert_eq!((holders.processes.len(), holders.not_looked_at), (1, 2));
    let causes = possible_causes(&holders).join("\n");
    assert!(causes.contains("not looked at: 2 processes"), "{causes}");
}

#[test]
fn a_walk_ends_after_a_million_mappings_and_begins_with_those_that_have_memory() {
    let tree = Tree::new(&[(1, 'S', 1), (30, 'S', 1), (31, 'S', 1), (32, 'S', 1)]);
    tree.file(30, "maps", &"\n".repeat(1_000_000));
    for pid in [31, 32] {
        symlink("/dev/nvidia0", tree.folder(pid).join("fd/3")).unwrap();
    }
    let holders = tree.holders(&[32]);
    assert_eq!((holders.omitted, holders.not_looked_at), (0, 1));
    assert_eq!(holders.processes.len(), 1);
    assert_eq!(why(&holders, 32), [Why::OnGpus]);
}

#[test]
fn this_process_has_the_number_that_proc_gives_it() {
    let tree = Tree::new(&[(1, 'S', 1), (30, 'S', 1)]);
    symlink("30", tree.0.path().join("proc/self")).unwrap();
    for (pid, namespace) in [(1, "pid:[4026531836]"), (30, "pid:[4026532000]")] {
        std::fs::create_dir(tree.folder(pid).join("ns")).unwrap();
        symlink(namespace, tree.folder(pid).join("ns/pid")).unwrap();
    }
    let holders = tree.holders(&[30]);
    assert_eq!(why(&holders, 30), [Why::Reporter, Why::OnGpus]);
    assert_eq!(holders.in_namespace, Some(false));
}
