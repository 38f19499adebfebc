//! The simulator through the driver trait, as higher layers use it.

mod leaks;
mod own;
mod pools;
mod processes;
mod references;
mod registered;
mod streams;
mod vmm;

use std::ffi::OsString;
use std::process::{Command, ExitStatus, Stdio};

use own::{OwnCalls, OwnPools};

use super::{AttributeAnswer, Refusal, Sim};
use crate::*;
use crate::{Error, Machine};

const MIB: u64 = 1 << 20;
const GRANULE: u64 = 2 * MIB;

fn driver(machine: Machine) -> Driver {
    Driver::simulated(machine).unwrap()
}

fn h200() -> Driver {
    driver(Machine::h200x8())
}

fn sim(driver: &Driver) -> &Sim {
    driver.sim().unwrap()
}

/// Returns the result's code, `SUCCESS` for a success.
fn code<T>(result: Result<T, Error>) -> Code {
    match result {
        Ok(_) => Code::SUCCESS,
        Err(error) => error.code().unwrap(),
    }
}

fn desc(location: Location, access: Access) -> AccessDesc {
    AccessDesc { location, access }
}

/// Memory mapped for tests, which unmap it or drop the simulator.
#[derive(Clone, Copy)]
struct Mapped {
    handle: PhysicalHandle,
    ptr: DevicePtr,
    size: u64,
}

impl Mapped {
    fn new(driver: &Driver, location: Location, size: u64) -> Self {
        let handle = driver
            .mem_create(size, &AllocationProps::at(location))
            .unwrap();
        Self::of(driver, handle, size)
    }

    fn of(driver: &Driver, handle: PhysicalHandle, size: u64) -> Self {
        let ptr = driver.mem_address_reserve(size, 0, 0).unwrap();
        // SAFETY: the range is new and has no other user.
        unsafe { driver.mem_map(ptr, size, 0, handle) }.unwrap();
        Self { handle, ptr, size }
    }

    fn grant(&self, driver: &Driver, access: &[AccessDesc]) {
        // SAFETY: only this test uses the range.
        unsafe { driver.mem_set_access(self.ptr, self.size, access) }.unwrap();
    }

    fn grant_all(&self, driver: &Driver) {
        let gpus = (0..driver.device_count().unwrap()).map(Location::Device);
        let descs: Vec<_> = gpus
            .chain([Location::Host])
            .map(|location| desc(location, Access::ReadWrite))
            .collect();
        self.grant(driver, &descs);
    }

    fn give_back(self, driver: &Driver) {
        // SAFETY: the test is done with the range and the handle.
        unsafe {
            driver.mem_unmap(self.ptr, self.size).unwrap();
            driver.mem_release(self.handle).unwrap();
            driver.mem_address_free(self.ptr, self.size).unwrap();
        }
    }
}

fn peek(ptr: DevicePtr) -> u64 {
    // SAFETY: tests peek only at host memory that is mapped and granted to the host.
    unsafe { (ptr.0 as *const u64).read_volatile() }
}

fn poke(ptr: DevicePtr, value: u64) {
    // SAFETY: as above.
    unsafe { (ptr.0 as *mut u64).write_volatile(value) }
}

/// Runs one test of this program in a process of its own; the environment sets its role.
fn child(test: &str, environment: &[(&str, String)], stdin: Stdio) -> ExitStatus {
    let exe = std::env::current_exe().unwrap();
    let runner = std::env::var("EGMEM_TEST_RUNNER").unwrap_or_default();
    let mut words = runner
        .split_whitespace()
        .map(OsString::from)
        .chain([exe.into()]);
    let mut command = Command::new(words.next().unwrap());
    let output = command
        .args(words)
        .args([
            "--exact",
            &format!("sim::tests::{test}"),
            "--test-threads=1",
        ])
        .env(ROLE, "child")
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .stdin(stdin)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&output.stdout);
    assert!(words.contains("running 1 test"), "{test}: {words}");
    output.status
}

const ROLE: &str = "EGMEM_SIM_TEST_ROLE";

fn is_child() -> bool {
    std::env::var_os(ROLE).is_some()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the 64 bytes that the parent put into the environment.
fn bytes_of(name: &str) -> [u8; 64] {
    let text = std::env::var(name).unwrap();
    std::array::from_fn(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap())
}

#[test]
fn the_preset_answers_as_measured() {
    let driver = h200();
    assert_eq!(driver.name(), "simulated");
    assert!(driver.is_simulated());
    assert_eq!(driver.driver_version().unwrap(), CudaVersion(13000));
    assert_eq!(driver.device_count().unwrap(), 8);
    assert_eq!(driver.device_name(7).unwrap(), "NVIDIA H200");
    assert_eq!(code(driver.device_name(8)), Code::INVALID_DEVICE);
    assert!(driver.device_can_access_peer(0, 7).unwrap());
    assert_ne!(
        driver.device_uuid(0).unwrap(),
        driver.device_uuid(1).unwrap()
    );
    for (attribute, value) in [
        (DeviceAttribute::HOST_NUMA_ID, 0),
        (DeviceAttribute::NUMA_ID, -1),
        (
            DeviceAttribute::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            1,
        ),
        (DeviceAttribute::HOST_NUMA_MEMORY_POOLS_SUPPORTED, 1),
        (DeviceAttribute::HOST_NUMA_MULTINODE_IPC_SUPPORTED, 0),
        (
            DeviceAttribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            1,
        ),
        (DeviceAttribute::HANDLE_TYPE_FABRIC_SUPPORTED, 1),
        (DeviceAttribute::MEMPOOL_SUPPORTED_HANDLE_TYPES, 9),
        (DeviceAttribute::DMA_BUF_SUPPORTED, 1),
        (DeviceAttribute::PAGEABLE_MEMORY_ACCESS, 0),
    ] {
        assert_eq!(
            driver.device_attribute(7, attribute).unwrap(),
            value,
            "{attribute:?}"
        );
    }
}

#[test]
fn old_drivers_lack_what_came_later() {
    let mut machine = Machine::gh200();
    machine.driver_version = CudaVersion(12060);
    let refused = Refusal::InvalidValue;
    machine
        .attributes
        .insert(134, AttributeAnswer::Refused(refused));
    machine.attributes.insert(16, AttributeAnswer::Value(7));
    let driver = driver(machine);
    let attribute = |attribute| driver.device_attribute(0, attribute);
    let pools = DeviceAttribute::HOST_NUMA_MEMORY_POOLS_SUPPORTED;
    assert_eq!(code(attribute(pools)), Code::INVALID_VALUE);
    assert_eq!(
        code(attribute(DeviceAttribute::HOST_NUMA_ID)),
        Code::INVALID_VALUE
    );
    assert_eq!(attribute(DeviceAttribute::MULTIPROCESSOR_COUNT).unwrap(), 7);
    let host = driver.mem_create(GRANULE, &AllocationProps::at(Location::Host));
    assert_eq!(code(host), Code::INVALID_VALUE);
    let node = driver.mem_create(GRANULE, &AllocationProps::at(Location::HostNuma(0)));
    assert_eq!(code(node), Code::SUCCESS);
}

#[test]
fn calls_are_counted_until_the_counts_are_reset() {
    let driver = h200();
    let sim = sim(&driver);
    sim.reset_counts();
    assert!(sim.calls().is_empty());
    driver.mem_address_reserve(GRANULE, 0, 0).unwrap();
    driver.mem_address_reserve(GRANULE, 0, 0).unwrap();
    assert_eq!(sim.count(Call::MemAddressReserve), 2);
    assert_eq!(sim.count(Call::MemAddressFree), 0);
    assert_eq!(sim.calls().len(), 1);
    sim.reset_counts();
    assert!(sim.calls().is_empty());
}
