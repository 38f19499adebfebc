//! Processes without a ledger: in a made `/proc`, and real ones, which this program starts in the roles below.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use egmem::ledger::{Cause, Holder, Holders, NvmlGpu, NvmlProcess, Report, Why};
use rustix::net::{self, SendAncillaryBuffer, SendAncillaryMessage};

use crate::ledger::MIB;
use crate::stub_driver::harness::{nothing, stubbed};

const ROLE: &str = "EGMEM_HOLDERS_ROLE";
const NOBODY: u32 = 65_534;

/// A folder that stands for `/`.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        tree.file(
            "etc/passwd",
            "root:x:0:0::/root:/bin/sh\nada:x:1000:1000::/:/bin/sh\n",
        );
        tree.process(1, "init", 'S', 0);
        tree.link("proc/self/ns/pid", "pid:[4026531836]");
        tree
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    /// Adds a process of user 1000 with one thread, or of a zombie two.
    fn process(&self, pid: u32, name: &str, state: char, flags: u32) {
        let threads = if state == 'Z' { 2 } else { 1 };
        let stat = |state| {
            format!(
                "{pid} ({name}) {state} 1 1 1 0 -1 {flags} 0 0 0 0 1 2 3 4 20 0 {threads} 0 77 8 9"
            )
        };
        self.file(&format!("proc/{pid}/stat"), &stat(state));
        self.file(
            &format!("proc/{pid}/cmdline"),
            &format!("/usr/bin/{name}\0--serve\0"),
        );
        self.file(
            &format!("proc/{pid}/status"),
            "Uid:\t1000\t1000\t1000\t1000\n",
        );
        self.file(&format!("proc/{pid}/maps"), "");
        self.file(&format!("proc/{pid}/task/{pid}/stat"), &stat(state));
        std::fs::create_dir_all(self.0.path().join(format!("proc/{pid}/fd"))).unwrap();
    }

    fn holders(&self, nvml: Result<Vec<NvmlGpu>, String>) -> Holders {
        Holders::of(self.0.path(), nvml, [50], false)
    }
}

fn gpu(processes: Vec<NvmlProcess>) -> NvmlGpu {
    let mut gpu = NvmlGpu::default();
    gpu.uuid = Some("GPU-00112233-4455-6677-8899-aabbccddeeff".into());
    gpu.processes = processes;
    gpu
}

fn find(holders: &Holders, pid: u32) -> &Holder {
    let mut all = holders.processes.iter();
    all.find(|holder| holder.pid == pid)
        .unwrap_or_else(|| panic!("{pid} in {holders:?}"))
}

const MAPPED: &str = "\
    200000000-220000000 rw-s 00000000 00:06 506    /dev/nvidiactl\n\
    7f0000000000-7f0001000000 rw-s 00000000 00:06 520    /dev/nvidia-uvm\n";

#[test]
fn a_made_proc_shows_each_cause() {
    let tree = Tree::new();
    // An ordinary program, a thread of the kernel, and one that has ended: none holds anything.
    tree.process(20, "sh", 'S', 0);
    tree.process(21, "kworker", 'I', 0x0020_0000);
    tree.link("proc/21/fd/3", "/dev/nvidia0");
    tree.file(
        "proc/22/stat",
        "22 (gone) Z 1 1 1 0 -1 0 0 0 0 0 1 2 3 4 20 0 1 0 77 8 9",
    );
    // Fds alone; mappings alone; both in a container.
    for (pid, name) in [
        (30, "handles"),
        (31, "closed"),
        (32, "contained"),
        (50, "offers"),
    ] {
        tree.process(pid, name, 'S', 0);
    }
    for pid in [30, 32, 50] {
        tree.link(&format!("proc/{pid}/fd/3"), "/dev/nvidiactl");
        tree.link(&format!("proc/{pid}/fd/4"), "/dev/nvidia-uvm");
    }
    tree.file("proc/31/maps", MAPPED);
    tree.file("proc/32/maps", MAPPED);
    tree.file("proc/32/status", "Uid:\t1000\t4711\t0\t0\nNSpid:\t32\t7\n");
    let id = "0123456789abcdef0123456789abcdef";
    tree.file(
        "proc/32/cgroup",
        &format!("0::/system.slice/docker-{id}.scope\n"),
    );
    // A stopped one, whose socket has fds that nobody has received.
    tree.process(33, "stopped", 'T', 0);
    tree.link("proc/33/fd/5", "socket:[99]");
    tree.file("proc/33/fdinfo/5", "pos:\t0\nflags:\t02\nscm_fds: 2\n");
    // The first thread has ended, the second is in the kernel.
    tree.process(34, "killed", 'Z', 0);
    tree.file(
        "proc/34/task/35/stat",
        "35 (killed) D 1 1 1 0 -1 0 0 0 0 0 1 2 3 4 20 0 2 0 78 8 9",
    );
    tree.link("proc/34/task/35/fd/3", "/dev/nvidia0");
    tree.file("proc/34/task/35/maps", "");
    // PyTorch, with a memfd; MPS.
    tree.process(36, "python3", 'S', 0);
    tree.file(
        "proc/36/maps",
        "7f00-7f10 r-xp 0 08:01 11  /opt/libtorch_cuda.so\n7f00000000-7f40000000 rw-s 0 00:01 9  /memfd:a (deleted)\n",
    );
    tree.process(37, "nvidia-cuda-mps", 'S', 0);
    tree.link("proc/37/fd/3", "/dev/nvidiactl");
    // Pinned memory, of a process that has a GPU open and of another one.
    for pid in [38, 39] {
        tree.process(pid, "pins", 'S', 0);
        let zero = "7f0000000000-7f0004000000 rw-s 00000000 00:01 8  /dev/zero (deleted)\n";
        tree.file(&format!("proc/{pid}/maps"), zero);
    }
    tree.link("proc/38/fd/3", "/dev/nvidiactl");

    let mut client = NvmlProcess::new(36, Some(300 * MIB));
    client.is_mps_client = true;
    let named = vec![
        client,
        NvmlProcess::new(999, None),
        NvmlProcess::new(37, Some(MIB)),
    ];
    let holders = tree.holders(Ok(vec![gpu(named)]));
    let why = |pid| find(&holders, pid).why.clone();
    assert_eq!(why(30), [Why::OtherUser, Why::OpenAlone]);
    assert_eq!(
        why(31),
        [
            Why::OtherUser,
            Why::MappedAlone,
            Why::Managed,
            Why::DriverMemory
        ]
    );
    assert_eq!(
        why(32),
        [
            Why::Namespace,
            Why::OtherUser,
            Why::Managed,
            Why::DriverMemory
        ]
    );
    assert_eq!(why(33), [Why::Stopped, Why::OtherUser, Why::InFlight]);
    assert_eq!(why(34), [Why::Zombie, Why::OtherUser, Why::OpenAlone]);
    assert_eq!(
        why(36),
        [
            Why::MpsClient,
            Why::OtherUser,
            Why::PyTorch,
            Why::OnGpus,
            Why::Shared
        ]
    );
    assert_eq!(why(37), [Why::Mps, Why::OtherUser, Why::OnGpus]);
    assert_eq!(why(50), [Why::Ledger, Why::OtherUser, Why::OpenAlone]);
    assert_eq!(why(38), [Why::OtherUser, Why::Pinned, Why::OpenAlone]);
    assert_eq!(why(39), [Why::OtherUser, Why::Shared]);
    assert_eq!(find(&holders, 38).unnamed_mapped, 64 * MIB);
    assert_eq!(why(999), [Why::Hidden, Why::OnGpus]);
    assert_eq!(holders.processes.len(), 11, "{holders:?}");

    let contained = find(&holders, 32);
    assert_eq!(contained.container.as_deref(), Some("Docker 0123456789ab"));
    assert_eq!((contained.inner_pid, contained.uid), (Some(7), Some(4711)));
    assert_eq!(contained.driver_mapped, Some(512 * MIB));
    assert_eq!(contained.managed_mapped, Some(16 * MIB));
    let handles = find(&holders, 30);
    assert_eq!(handles.user.as_deref(), Some("ada"));
    assert_eq!(
        (handles.device_fds, handles.command.as_str()),
        (Some(2), "handles --serve")
    );
    assert_eq!(find(&holders, 36).gpus[0].bytes, Some(300 * MIB));
    assert_eq!(find(&holders, 36).shared_mapped, 1 << 30);
    let found = (1 << 30) + 64 * MIB;
    assert_eq!((holders.shared_found, holders.unreadable), (found, 0));
    assert_eq!(
        (holders.in_namespace, holders.proc_hides),
        (Some(false), false)
    );
    assert_eq!(find(&holders, 33).fds_in_flight, Some(2));
    let json = serde_json::to_string(&holders).unwrap();
    let read: Holders = serde_json::from_str(&json).unwrap();
    assert_eq!(
        read.processes[0].pid, 36,
        "the one with most memory: {json}"
    );
}

#[test]
fn what_cannot_be_seen_is_told() {
    let tree = Tree::new();
    for pid in 100..500 {
        tree.process(pid, "many", 'S', 0);
        tree.link(&format!("proc/{pid}/fd/3"), "/dev/nvidia0");
    }
    std::fs::remove_dir_all(tree.0.path().join("proc/1")).unwrap();
    let link = tree.0.path().join("proc/self/ns/pid");
    std::fs::remove_file(&link).unwrap();
    symlink("pid:[4026532000]", &link).unwrap();
    let holders = tree.holders(Err("libnvidia-ml.so.1 is not here".into()));
    assert_eq!((holders.processes.len(), holders.omitted), (256, 144));
    assert_eq!(
        (holders.proc_hides, holders.in_namespace),
        (true, Some(true))
    );
    assert_eq!(
        holders.nvml.as_deref(),
        Some("libnvidia-ml.so.1 is not here")
    );
    let nothing = Holders::of(Path::new("/no/such/folder"), Ok(Vec::new()), [], false);
    assert!(nothing.processes.is_empty() && nothing.in_namespace.is_none());
}

stubbed! {
    fn nvml_names_processes_that_proc_does_not_show(nothing().stub("libnvidia-ml.so.1", "nvml.c")) {
        let report = Report::gather(None);
        let holders = report.holders.as_ref().unwrap();
        assert_eq!((holders.nvml.as_ref(), holders.gpus.len()), (None, 1));
        assert_eq!(holders.gpus[0].reserved, Some(600 * MIB));
        let own = find(holders, std::process::id());
        assert_eq!(own.gpus[0].bytes, Some(512 * MIB));
        assert!(own.why.contains(&Why::MpsClient), "{own:?}");
        let hidden = find(holders, 4_194_304);
        assert_eq!((hidden.why[0], hidden.gpus[0].bytes), (Why::Hidden, None));
        let text = report.to_text();
        let row = text.lines().find(|line| line.starts_with("4194304 ")).unwrap();
        assert!(row.contains("0: unknown") && row.contains("not in /proc"), "{text}");
        assert!(text.contains("nvidia-smi, outside of containers; ps -p PID"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    }

    fn what_nvml_lacks_is_told(
        nothing().stub("libnvidia-ml.so.1", "nvml.c").without("nvmlDeviceGetMPSComputeRunningProcesses_v3")
    ) {
        let holders = Report::gather(None).holders.unwrap();
        assert_eq!(find(&holders, std::process::id()).gpus[0].bytes, Some(512 * MIB));
        let why = holders.nvml.unwrap();
        assert!(why.contains("MPS"), "{why}");
    }

    fn nvml_that_does_not_start_hides_nothing_else(
        nothing().stub("libnvidia-ml.so.1", "nvml.c").without("nvmlInit_v2")
    ) {
        let report = Report::gather(None);
        let why = report.holders.as_ref().unwrap().nvml.clone().unwrap();
        assert!(why.starts_with("NVML does not start: "), "{why}");
        for node in &report.nodes {
            let of_node = report.parts.iter().filter(|part| part.location == node.node.into());
            let causes: Vec<Cause> = of_node.map(|part| part.cause).collect();
            assert!(causes.contains(&Cause::Programs), "{causes:?}");
        }
    }

    fn a_broken_nvml_is_told(nothing().garbage("libnvidia-ml.so.1")) {
        let why = Report::gather(None).holders.unwrap().nvml.unwrap();
        assert!(why.contains("libnvidia-ml.so.1"), "{why}");
    }
}

/// A process in a role, which is killed when it is dropped.
struct Role {
    child: Child,
    /// The process that holds the memory.
    pid: u32,
}

impl Drop for Role {
    fn drop(&mut self) {
        // A child of its own ends with its standard input.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(role: &str) -> Command {
    let mut command = egmem_tests::child(module_path!(), "holds_in_its_role");
    command.env(ROLE, role);
    command
}

/// Starts a role and waits until it says that it is ready.
fn start(mut command: Command) -> Role {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // Of a child of its own whose output nobody reads any more.
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let mut lines = output.lines();
    let ready = lines.find_map(|line| Some(line.unwrap().strip_prefix("ready ")?.to_owned()));
    let pid = ready.unwrap_or_else(|| panic!("{:?}", child.wait()));
    Role {
        pid: pid.parse().unwrap(),
        child,
    }
}

fn memfd() -> OwnedFd {
    let fd = rustix::fs::memfd_create("egmem-holders", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = std::fs::File::from(fd);
    file.write_all(&vec![1; 8 * MIB as usize]).unwrap();
    file.into()
}

fn wait_for_the_end() {
    println!("\nready {}", std::process::id());
    std::io::stdout().flush().unwrap();
    std::io::stdin().lines().count();
}

/// Leaves a process whose first thread has ended, and whose second one waits.
fn leave_a_zombie() {
    // SAFETY: the child's only thread starts another one and ends; the other one waits and ends the process.
    if unsafe { libc::fork() } != 0 {
        return;
    }
    std::thread::spawn(|| {
        let stat = || std::fs::read_to_string("/proc/self/stat").unwrap();
        while !stat().contains(") Z ") {
            std::thread::yield_now();
        }
        wait_for_the_end();
        // SAFETY: ends this process, with all its threads.
        unsafe { libc::_exit(0) }
    });
    // SAFETY: the call ends this thread without running destructors, and the other one uses nothing of its stack.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
}

/// Not a test of its own: the code of a process that was started in a role.
#[test]
fn holds_in_its_role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let _held = memfd();
    match role.as_str() {
        "asker" => println!("\nholders {}", serde_json::to_string(&here()).unwrap()),
        "zombie" => {
            leave_a_zombie();
            std::io::stdin().lines().count();
        }
        _ => wait_for_the_end(),
    }
}

fn here() -> Holders {
    Holders::of(Path::new("/"), Err(String::new()), [], false)
}

/// Returns what another process sees that looks at all.
fn seen_by(mut asker: Command) -> Option<Holders> {
    let output = asker.output().ok()?;
    let text = String::from_utf8(output.stdout).unwrap();
    let (_, json) = text.lines().find_map(|line| line.split_once("holders "))?;
    Some(serde_json::from_str(json).unwrap())
}

#[test]
fn a_memfd_and_a_zombie_that_keeps_one_are_seen() {
    let role = start(command("memfd"));
    let zombie = start(command("zombie"));
    let holders = here();
    let holder = find(&holders, role.pid);
    assert_eq!(holder.shared_unmapped, 8 * MIB);
    assert!(holder.why.contains(&Why::SharedUnmapped), "{holder:?}");
    let zombie = find(&holders, zombie.pid);
    assert_eq!((zombie.state, zombie.shared_unmapped), (Some('Z'), 8 * MIB));
    assert_eq!(zombie.why[0], Why::Zombie);
    assert!(holders.shared_found >= 16 * MIB);
}

#[test]
fn fds_on_their_way_are_seen_at_the_socket_that_has_them() {
    let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
    let fds = [memfd(), memfd()];
    let borrowed = fds.each_ref().map(AsFd::as_fd);
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    let message = [std::io::IoSlice::new(b"x")];
    net::sendmsg(&one, &message, &mut control, net::SendFlags::empty()).unwrap();
    drop((one, fds));
    let holders = here();
    let holder = find(&holders, std::process::id());
    assert!(holder.fds_in_flight >= Some(2), "{holder:?}");
    assert!(holder.why.contains(&Why::InFlight) && holder.why.contains(&Why::Reporter));
    drop(other);
}

/// Returns whether this process may start others as another user.
fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root starts processes of other users and namespaces");
    }
    is_root
}

#[test]
fn other_users_and_namespaces_are_named() {
    if !is_root() {
        return;
    }
    let mut theirs = command("memfd");
    theirs.uid(NOBODY).gid(NOBODY);
    let inside = command("memfd");
    let mut unshared = Command::new("unshare");
    unshared
        .args(["--pid", "--fork"])
        .arg(inside.get_program())
        .args(inside.get_args());
    unshared.env(ROLE, "memfd");
    let (theirs, unshared) = (start(theirs), start(unshared));
    let holders = here();
    let theirs = find(&holders, theirs.pid);
    assert_eq!((theirs.uid, theirs.why[0]), (Some(NOBODY), Why::OtherUser));
    let children = format!("/proc/{0}/task/{0}/children", unshared.child.id());
    let children = std::fs::read_to_string(children).unwrap();
    let child: u32 = children.trim().parse().unwrap();
    let child = find(&holders, child);
    assert_eq!((child.inner_pid, child.why[0]), (Some(1), Why::Namespace));

    let mut asker = command("asker");
    asker.uid(NOBODY).gid(NOBODY);
    let seen = seen_by(asker).unwrap();
    assert!(seen.unreadable > 0, "{seen:?}");
    let theirs = find(&seen, theirs.pid);
    assert!(!theirs.why.contains(&Why::OtherUser) && theirs.shared_unmapped == 8 * MIB);
    let asker = command("asker");
    let mut unshared = Command::new("unshare");
    unshared.args(["--pid", "--fork", "--mount-proc"]);
    unshared
        .arg(asker.get_program())
        .args(asker.get_args())
        .env(ROLE, "asker");
    let seen = seen_by(unshared).unwrap();
    assert_eq!(seen.in_namespace, Some(true));
    assert!(seen.processes.iter().all(|holder| holder.pid != child.pid));
}
