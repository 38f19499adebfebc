//! The processes in `/proc`.

use std::collections::HashMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egmem_core::host::{Container, ProcessStat, status_field};

use super::Holders;
use super::files::{Fds, Inode, Maps, Shared, Size, Tmpfs};
use super::holder::{Holder, Why};
use crate::procs::{self, Late, Unanswered, read};

/// The most processes that are looked at.
const MOST: usize = 65_536;

/// The most bytes of a process's mappings that are read.
const MAPPINGS: u64 = 16 << 20;

/// The most bytes of other files of a process.
const SMALL: u64 = 64 << 10;

/// How long the processes may take.
pub(super) struct Limits {
    /// A process, to show its files and mappings.
    pub process: fn(u32) -> Duration,
    /// The kernel, to count a process's pages by node: some nanoseconds for each.
    pub pages: fn(u32) -> Duration,
    /// All of them; those that are left after it are not looked at.
    pub walk: Duration,
}

pub(super) const LIMITS: Limits = Limits {
    process: |_| Duration::from_secs(5),
    pages: |_| Duration::from_secs(10),
    walk: Duration::from_secs(60),
};

/// The file descriptors and mappings of all processes after which no further process is looked at.
const MOST_LOOKED_AT: u64 = 1_000_000;

/// The files and folders of processes that do not come, with the process's start.
static LATE: Late<(PathBuf, u64)> = Late::new();

/// The number of the first PID namespace of a machine, which Linux never changes (PROC_PID_INIT_INO).
const INITIAL: &str = "pid:[4026531836]";

/// A look at the processes, and those that there are.
pub(super) struct Walk {
    pub seen: HashMap<u32, Holder>,
    /// What is known of all of them together.
    pub holders: Holders,
    /// The number of the process that looks, 0 if there is none.
    pub own: u32,
    proc: PathBuf,
    users: HashMap<u32, String>,
    several_nodes: bool,
    /// Files there have names, and their filesystem counts them. Each thread that looks has a part in it.
    tmpfs: Arc<Tmpfs>,
    limits: Limits,
    begun: Instant,
    /// How many file descriptors and mappings were looked at.
    looked_at: u64,
}

impl Walk {
    /// Looks at the processes below `root`, those of `first` before the others; shared memory in one of `tmpfs` is not in
    /// [`Holder::files`]. It ends in the time that `limits` say.
    pub(super) fn of(
        root: &Path,
        first: &[u32],
        several_nodes: bool,
        tmpfs: Tmpfs,
        limits: Limits,
    ) -> Self {
        let proc = root.join("proc");
        let names = fs::read_dir(&proc).into_iter().flatten().flatten();
        let pids = names.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let mut pids: Vec<u32> = pids.collect();
        pids.sort_unstable_by_key(|pid| (!first.contains(pid), *pid));
        // `root` may have the processes of another namespace, with a number of its own for this one.
        let own = fs::read_link(proc.join("self")).ok();
        let own = own.and_then(|link| link.to_str()?.parse().ok());
        let namespace = |pid| fs::read_link(proc.join(pid).join("ns/pid"));
        let namespace = namespace("1").or_else(|_| namespace("self")).ok();
        let mut walk = Self {
            seen: HashMap::new(),
            holders: Holders {
                not_looked_at: pids.len().saturating_sub(MOST) as u64,
                in_namespace: namespace.map(|link| link.as_os_str() != INITIAL),
                // Each PID namespace has a process 1.
                proc_hides: !pids.is_empty() && !pids.contains(&1),
                tmpfs: tmpfs.bytes,
                ..Holders::default()
            },
            own: own.unwrap_or(0),
            users: users(root),
            several_nodes,
            tmpfs: Arc::new(tmpfs),
            limits,
            begun: Instant::now(),
            looked_at: 0,
            proc,
        };
        for &pid in pids.iter().take(MOST) {
            if let Some(holder) = walk.look(pid) {
                walk.seen.insert(pid, holder);
            }
        }
        walk
    }

    /// Looks at a process. `None`: it has ended, its number is another's by now, or it is a thread of the kernel.
    fn look(&mut self, pid: u32) -> Option<Holder> {
        let process = self.proc.join(pid.to_string());
        let text = match read(&process.join("stat"), SMALL) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            // With hidepid=1 /proc lists a process of another user and shows no file of it.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                self.holders.unreadable += 1;
                return Some(Holder {
                    pid,
                    is_listed: true,
                    ..Holder::default()
                });
            }
            Err(_) => return None,
        };
        let stat = ProcessStat::parse(&text)?;
        if stat.is_kernel {
            return None;
        }
        let mut holder = self.described(&process, pid, &stat);
        if !stat.has_ended() {
            self.look_inside(&process, &stat, &mut holder);
        }
        let again = self::text(&process.join("stat"))?;
        let is_same = ProcessStat::parse(&again)?.started == stat.started;
        is_same.then_some(holder)
    }

    /// Adds a process's files and mappings, as far as permitted, unless another process holds the locks that it takes to read them.
    fn look_inside(&mut self, process: &Path, stat: &ProcessStat<'_>, holder: &mut Holder) {
        let place = living(process, stat);
        let pages = place.join("numa_maps");
        let answer = if self.is_over() {
            Err(Unanswered::NotAsked)
        } else {
            let (tmpfs, mut found) = (self.tmpfs.clone(), holder.clone());
            let process = process.to_owned();
            let key = (process.clone(), stat.started);
            LATE.within(key, (self.limits.process)(holder.pid), move || {
                let looked = tmpfs.look(&place, &process, &mut found);
                (found, looked)
            })
        };
        let (found, looked) = match answer {
            Ok(answer) => answer,
            Err(Unanswered::Late) => return holder.why.push(Why::Waiting),
            Err(Unanswered::NotAsked) => {
                self.holders.not_looked_at += 1;
                return holder.why.push(Why::NotLookedAt);
            }
        };
        *holder = found;
        match looked {
            Ok(looked_at) => self.looked_at += looked_at,
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                self.holders.unreadable += 1
            }
            Err(_) => {}
        }
        // Of managed memory the addresses do not tell where the pages are.
        let has_driver = self.several_nodes && holder.driver_mapped > Some(0);
        if has_driver || holder.managed_mapped > Some(0) {
            let key = (pages.clone(), stat.started);
            let pages = move || read(&pages, MAPPINGS).unwrap_or_default();
            holder.add_pages(LATE.within(key, (self.limits.pages)(holder.pid), pages));
        }
    }

    /// Returns whether as much was looked at, or waited for, as may be.
    fn is_over(&self) -> bool {
        self.looked_at >= MOST_LOOKED_AT || self.begun.elapsed() >= self.limits.walk
    }

    /// Returns what every process may know of another, which takes no lock of its memory.
    fn described(&self, process: &Path, pid: u32, stat: &ProcessStat<'_>) -> Holder {
        let status = text(&process.join("status")).unwrap_or_default();
        let uids = status_field(&status, "Uid").unwrap_or_default();
        let uid = uids.split_ascii_whitespace().nth(1);
        let uid = uid.and_then(|uid| uid.parse().ok());
        let pids = status_field(&status, "NSpid").unwrap_or_default();
        let inner = pids.split_ascii_whitespace().skip(1).last();
        let groups = text(&process.join("cgroup")).unwrap_or_default();
        let container = Container::of_groups(&groups).map(|engine| {
            let id = Container::id_in_groups(&groups);
            id.map_or_else(|| engine.to_string(), |id| format!("{engine} {id}"))
        });
        Holder {
            pid,
            name: crate::texts::cut(stat.name, 64).to_owned(),
            user: uid.and_then(|uid| self.users.get(&uid).cloned()),
            uid,
            state: Some(stat.state),
            is_listed: true,
            has_ended: stat.has_ended(),
            container,
            inner_pid: inner.and_then(|pid| pid.parse().ok()),
            ..Holder::default()
        }
    }
}

impl Tmpfs {
    /// Adds the command line, open files and mappings of a process, in its folder or a thread's, as far as permitted.
    /// Returns how many files and mappings it looked at.
    fn look(&self, place: &Path, process: &Path, holder: &mut Holder) -> io::Result<u64> {
        holder.command = procs::command_in(process).unwrap_or_default();
        let fds = Fds::of(place)?;
        holder.device_fds = Some(fds.devices);
        holder.fds_in_flight = Some(fds.in_flight);
        let maps = Maps::parse(&read(&place.join("maps"), MAPPINGS)?);
        holder.driver_mapped = Some(maps.driver);
        holder.managed_mapped = Some(maps.managed);
        if maps.has_device && holder.device_fds == Some(0) {
            holder.why.push(Why::MappedAlone);
        }
        if maps.has_torch {
            holder.why.push(Why::PyTorch);
        }
        if maps.has_cupy {
            holder.why.push(Why::CuPy);
        }
        self.add_shared(process, fds.shared, maps.shared, holder);
        Ok(fds.looked_at + maps.looked_at)
    }

    /// Adds shared memory: each file once, with the bytes that exist, or else those of its addresses.
    fn add_shared(
        &self,
        process: &Path,
        mut open: HashMap<Inode, u64>,
        mapped: HashMap<Inode, Shared>,
        holder: &mut Holder,
    ) {
        for (inode, shared) in mapped {
            let place = process.join("map_files").join(shared.range);
            let exist = || Some(fs::metadata(place).ok()?.blocks().saturating_mul(512));
            let bytes = open.remove(&inode).or_else(exist);
            let is_estimate = bytes.is_none();
            let bytes = bytes.unwrap_or(shared.addresses.min(shared.end));
            holder.shared_mapped = holder.shared_mapped.saturating_add(bytes);
            if shared.is_unnamed {
                holder.unnamed_mapped = holder.unnamed_mapped.saturating_add(bytes);
            }
            holder.files.insert(inode, Size { is_estimate, bytes });
        }
        for (inode, bytes) in open {
            holder.shared_unmapped = holder.shared_unmapped.saturating_add(bytes);
            let is_estimate = false;
            holder.files.insert(inode, Size { is_estimate, bytes });
        }
        let counted = &self.devices;
        let files = &mut holder.files;
        files.retain(|(device, _), _| !counted.contains(device));
    }
}

/// Returns the folder of a thread that lives. The first one of a process may have ended before the others, which keep the
/// files open and the memory mapped; the process looks like a zombie then, and its own folder shows neither.
fn living(process: &Path, stat: &ProcessStat<'_>) -> PathBuf {
    let threads = match stat.state {
        'Z' | 'X' => fs::read_dir(process.join("task")).ok(),
        _ => None,
    };
    let lives = |thread: &PathBuf| {
        let text = text(&thread.join("stat"));
        let state = text.as_deref().and_then(ProcessStat::parse);
        state.is_some_and(|stat| !matches!(stat.state, 'Z' | 'X'))
    };
    let threads = threads.into_iter().flatten().flatten();
    let mut threads = threads.map(|thread| thread.path());
    threads.find(lives).unwrap_or_else(|| process.to_owned())
}

/// Reads a small text, which need not be UTF-8.
fn text(path: &Path) -> Option<String> {
    let bytes = read(path, SMALL).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the users' names. Directories elsewhere (LDAP) are not asked, because they may not answer.
fn users(root: &Path) -> HashMap<u32, String> {
    let passwd = read(&root.join("etc/passwd"), 1 << 20).unwrap_or_default();
    let passwd = String::from_utf8_lossy(&passwd);
    let mut users = HashMap::new();
    for line in passwd.lines() {
        let mut fields = line.split(':');
        let (name, uid) = (fields.next(), fields.nth(1));
        if let (Some(name), Some(Ok(uid))) = (name, uid.map(str::parse)) {
            users.entry(uid).or_insert_with(|| name.to_owned());
        }
    }
    users
}
