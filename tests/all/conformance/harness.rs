//! Backends, expectations of a machine, and child processes.

use std::fmt::Debug;
use std::fs;
use std::ops::Deref;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use egmem::driver::{Code, DeviceAttribute, Location};
use egmem::{Driver, Machine, Result};

use egmem_tests::child;
use egmem_tests::drivers;

/// The driver that a case runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// A preset of the simulator.
    Preset(&'static str),
    /// This machine's driver.
    Cuda,
}

/// The facts about the machine that are known before it is asked.
#[derive(Clone, Debug)]
pub struct Expect {
    /// How many GPUs.
    pub gpus: i32,
    /// The host NUMA nodes with CPUs.
    pub nodes: Vec<i32>,
    /// HOST_NUMA_ID of GPU 0, or a node that exists.
    pub home: i32,
    /// A node id that no node has.
    pub missing: i32,
    /// Whether there is an IMEX channel, so that fabric handles are allowed.
    pub imex: bool,
    /// An H200 on x86-64, without an IMEX channel: everything measured holds to the letter.
    pub h200: bool,
    /// Whether a host pool may become a device's pool, where that is known.
    pub host_pool_for_device: Option<bool>,
    /// How many references of one memory there can be for the CPU to be granted it; `None`: any
    /// number, or not known.
    pub references: Option<u64>,
}

/// A driver, and the expectations of it.
pub struct Ctx {
    pub driver: Driver,
    pub expect: Expect,
    pub backend: Backend,
}

impl Deref for Ctx {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        &self.driver
    }
}

/// A case of the suite, or the part of one that runs in a child process.
pub type Case = fn(&Ctx);

/// One driver for all cases.
fn cuda() -> Option<Driver> {
    static CUDA: OnceLock<Driver> = OnceLock::new();
    match CUDA.get() {
        Some(driver) => Some(driver.clone()),
        None => drivers::cuda().map(|driver| CUDA.get_or_init(|| driver).clone()),
    }
}

impl Ctx {
    /// Opens the driver; `None`, with a line that says so, where there is no CUDA.
    pub fn open(backend: Backend) -> Option<Self> {
        let driver = match backend {
            Backend::Preset(name) => Driver::simulated(Machine::preset(name).unwrap()).unwrap(),
            Backend::Cuda => cuda()?,
        };
        let expect = match backend {
            Backend::Preset(name) => Expect::of_preset(&Machine::preset(name).unwrap()),
            Backend::Cuda => Expect::of_cuda(&driver),
        };
        Some(Self {
            driver,
            expect,
            backend,
        })
    }

    pub fn simulated(&self) -> bool {
        self.backend != Backend::Cuda
    }

    /// Whether it is known how often one memory can be shared.
    pub fn knows_references(&self) -> bool {
        let known = self.simulated() || self.expect.references.is_some();
        if !known {
            println!("skipped: measured on H200 alone");
        }
        known
    }

    /// Every GPU's ordinal.
    pub fn gpus(&self) -> std::ops::Range<i32> {
        0..self.expect.gpus
    }

    /// The host NUMA node next to GPU 0.
    pub fn home(&self) -> Location {
        Location::HostNuma(self.expect.home)
    }

    /// A child process that runs `role` on the same backend.
    pub fn child(&self, role: &str) -> Command {
        let backend = match self.backend {
            Backend::Preset(name) => name,
            Backend::Cuda => "cuda",
        };
        let mut command = child(super::MODULE, "child_process");
        command
            .env("EGMEM_CONFORMANCE_CHILD", format!("{backend}/{role}"))
            .stdin(Stdio::null());
        // A fault must reach the system, not a sanitizer's report.
        for sanitizer in ["ASAN_OPTIONS", "TSAN_OPTIONS"] {
            let mut options = std::env::var(sanitizer).unwrap_or_default();
            options.push_str(":handle_segv=0:handle_sigbus=0:allow_user_segv_handler=1");
            command.env(sanitizer, options);
        }
        command
    }

    /// Runs `role` in a child process, which must end well.
    #[track_caller]
    pub fn run_child(&self, role: &str) {
        let output = self.child(role).output().unwrap();
        assert!(
            output.status.success(),
            "{role}: {}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
    }
}

impl Expect {
    fn of_preset(machine: &Machine) -> Self {
        let nodes: Vec<i32> = machine.nodes.iter().map(|node| node.id).collect();
        let memories = machine.gpus.iter().map(|gpu| gpu.numa_id);
        Self {
            gpus: machine.gpus.len() as i32,
            home: machine.gpus[0].host_numa,
            missing: 1 + nodes.iter().copied().chain(memories).max().unwrap(),
            nodes,
            imex: machine.imex_channel,
            h200: machine.name == "h200x8",
            host_pool_for_device: Some(machine.host_pool_for_device),
            references: (machine.name == "h200x8").then_some(254),
        }
    }

    fn of_cuda(driver: &Driver) -> Self {
        let attribute = |attribute| driver.device_attribute(0, attribute).unwrap_or(-1);
        let listed = |file: &str| {
            let path = format!("/sys/devices/system/node/{file}");
            parse_list(&fs::read_to_string(path).unwrap_or_default())
        };
        let home = attribute(DeviceAttribute::HOST_NUMA_ID);
        let mut nodes = listed("has_cpu");
        if nodes.is_empty() {
            nodes.push(home.max(0));
        }
        let imex = fs::read_dir("/dev/nvidia-caps-imex-channels")
            .is_ok_and(|mut entries| entries.next().is_some());
        let coherent =
            attribute(DeviceAttribute::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES) == 1;
        let name = driver.device_name(0).unwrap();
        let h200 = name.contains("H200") && !name.contains("GH200") && !coherent && !imex;
        let online = listed("possible").into_iter().chain(nodes.iter().copied());
        Self {
            gpus: driver.device_count().unwrap(),
            home: if home >= 0 { home } else { nodes[0] },
            missing: 1 + online.max().unwrap(),
            nodes,
            imex,
            h200,
            host_pool_for_device: h200.then_some(false),
            references: h200.then_some(254),
        }
    }
}

/// Reads the kernel's lists: `0-3,8`.
fn parse_list(text: &str) -> Vec<i32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<i32>().ok()?..=last.trim().parse().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}

/// Runs a case on a backend.
pub fn run(backend: Backend, case: Case) {
    let Some(ctx) = Ctx::open(backend) else {
        return;
    };
    case(&ctx);
    ctx.assert_nothing_held();
}

/// Runs the role that the environment names, if this is a child process, and does not return then.
pub fn run_role(roles: &[(&str, Case)]) {
    let Ok(wanted) = std::env::var("EGMEM_CONFORMANCE_CHILD") else {
        return;
    };
    let (backend, role) = wanted.split_once('/').unwrap();
    let backend = match Machine::PRESETS.iter().find(|name| **name == backend) {
        Some(name) => Backend::Preset(name),
        None => Backend::Cuda,
    };
    let (_, case) = roles.iter().find(|(name, _)| *name == role).unwrap();
    case(&Ctx::open(backend).expect("the parent had this backend"));
    // SAFETY: the only output left to be flushed is the standard library's, which flushes it at once; leaks on
    // purpose, which a leak checker would report, stay unreported.
    unsafe { libc::_exit(0) };
}

/// The result must be this code.
#[track_caller]
pub fn fails<T: Debug>(result: Result<T>, code: Code) {
    match result {
        Ok(value) => panic!("succeeded with {value:?}, expected {code}"),
        Err(error) => assert_eq!(error.code(), Some(code), "{error}"),
    }
}
