//! On machines with several NUMA nodes, which `ci/nodes` boots under emulation: a real kernel, and the stub driver.
//!
//! `EGMEM_TEST_NODES` names the machine that the tests run on. On any other they skip: they take CPUs offline, reserve
//! huge pages and make control groups. The memory of the stub driver is none, so memory that the CPU touches is the
//! process's own, registered with the simulated driver.

mod kernel;
pub mod pages;
mod superchips;
mod three;

use egmem::driver::NodeId;
use egmem::{Driver, Machine, Topology};
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// What a node's free memory changes by at most by itself: each CPU keeps some freed pages, huge ones too.
const SLACK: u64 = 16 * MIB;

/// `on_machine!("three"; fn name() { body })`: tests whose bodies run on that machine alone.
macro_rules! on_machine {
    ($machine:literal; $($(#[$doc:meta])* fn $name:ident() $body:block)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            if $crate::nodes::is_here($machine) {
                $body
            }
        }
    )*};
}
use on_machine;

/// Returns whether this is the machine that a test is for.
fn is_here(machine: &str) -> bool {
    let here = std::env::var("EGMEM_TEST_NODES").is_ok_and(|here| here == machine);
    if !here {
        println!("skipped: it needs the machine '{machine}' of ci/nodes");
    }
    here
}

/// Returns the stub driver, whose host is this machine.
fn stub() -> Driver {
    Driver::open().expect("the stub, which ci/nodes puts into the library path")
}

/// Returns a driver that registers this process's pages. Its host is simulated.
fn registrar() -> Driver {
    Driver::simulated(Machine::h200x8()).unwrap()
}

/// Returns the topology of this machine as `driver`'s, or without GPUs.
fn discover(driver: Option<&Driver>) -> Topology {
    driver.map_or_else(Topology::of_host, |driver| {
        Topology::discover(driver).unwrap()
    })
}

/// Returns the topology that hwloc's own tool writes of this machine, as text.
fn xml() -> String {
    let mut lstopo = std::process::Command::new("lstopo-no-graphics");
    let output = lstopo.args(["--of", "xml"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns what stays the same of a topology's nodes, however it was read.
fn facts(topology: &Topology) -> Vec<Value> {
    let nodes = serde_json::to_value(topology.nodes()).unwrap();
    let mut nodes = nodes.as_array().unwrap().clone();
    for node in &mut nodes {
        let node = node.as_object_mut().unwrap();
        node.remove("memory_free");
        node.remove("gpus");
    }
    nodes
}

/// Runs the test `name` of `module` in a child process whose topology is the kernel's: hwloc, which is told to describe
/// another machine there, does not count.
fn without_hwloc(module: &str, name: &str, test: impl FnOnce()) {
    let mut child = egmem_tests::child(module, name);
    child.env("HWLOC_SYNTHETIC", "node:1 pu:1");
    egmem_tests::alone_as(child, test);
}

fn nodes(ids: &[i32]) -> Vec<NodeId> {
    ids.iter().copied().map(NodeId).collect()
}
