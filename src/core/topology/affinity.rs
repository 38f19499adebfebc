//! Binds the calling thread to a node's CPUs.

use std::io;
use std::marker::PhantomData;

use rustix::thread;

use super::kernel::Kernel;
use super::{CpuSet, Live, Topology};
use crate::driver::NodeId;
use crate::host::status_field;
use crate::{Error, Result};

/// Binds the calling thread to CPUs until dropped, and then restores the earlier CPUs.
///
/// It cannot leave the thread that it binds.
#[derive(Debug)]
#[must_use = "the thread is bound until the guard is dropped"]
pub struct ThreadBinding {
    cpus: CpuSet,
    earlier: CpuSet,
    not_send: PhantomData<*const ()>,
}

impl ThreadBinding {
    /// Binds the calling thread to those of `cpus` that the process may use.
    ///
    /// Source: `sched_setaffinity(2)`.
    ///
    /// # Errors
    /// [`Error::System`] if the system refuses, in particular if none of the CPUs is online, or if the control
    /// group (cpuset) allows none of them; and on a machine with more than 1024 CPUs.
    pub fn to(cpus: &CpuSet) -> Result<Self> {
        let what = || format!("binding the thread to CPUs {cpus}");
        let earlier = affinity().map_err(|error| Error::system(what(), &error))?;
        set_affinity(cpus).map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => {
                let allowed = allowed().unwrap_or_else(|| earlier.clone());
                Error::failed(what(), refusal(cpus, online().as_ref(), &allowed))
            }
            _ => Error::system(what(), &error),
        })?;
        Ok(Self {
            cpus: affinity().unwrap_or_else(|_| cpus.clone()),
            earlier,
            not_send: PhantomData,
        })
    }

    /// Returns the CPUs that the thread is bound to: those requested, without those not allowed.
    pub fn cpus(&self) -> &CpuSet {
        &self.cpus
    }
}

impl Drop for ThreadBinding {
    fn drop(&mut self) {
        if let Err(error) = set_affinity(&self.earlier) {
            tracing::warn!(%error, cpus = %self.earlier, "the thread's CPUs could not be restored");
        }
    }
}

impl Topology {
    /// Binds the calling thread to the CPUs of a host node until the guard is dropped: for first touch, and
    /// so that a benchmark measures this node.
    ///
    /// # Errors
    /// [`Error::NoSuchNode`] · [`Error::InvalidArgument`] if the node has no CPUs, or if the topology is
    /// simulated or of another machine, so that its CPUs are not those of this one;
    /// [`Topology::bind_thread_if_real`] returns `None` then · [`Error::System`] if the system refuses, for
    /// example because the control group allows none of the CPUs.
    pub fn bind_thread(&self, node: NodeId) -> Result<ThreadBinding> {
        let cpus = &self.node(node)?.cpus;
        if !matches!(self.live, Some(Live::Kernel)) {
            let why = "its CPUs are those of a simulated or distant machine";
            return Err(Error::invalid("node", format!("NUMA node {node}: {why}")));
        }
        if cpus.is_empty() {
            let why = format!("NUMA node {node} has no CPUs");
            return Err(Error::invalid("node", why));
        }
        ThreadBinding::to(cpus)
    }

    /// Calls [`Topology::bind_thread`] on a topology of this machine; returns `None` on any other.
    ///
    /// # Errors
    /// As for [`Topology::bind_thread`].
    pub fn bind_thread_if_real(&self, node: NodeId) -> Result<Option<ThreadBinding>> {
        if matches!(self.live, Some(Live::Kernel)) {
            self.bind_thread(node).map(Some)
        } else {
            self.node(node).map(|_| None)
        }
    }

    /// Returns the CPUs of a host node that the calling thread may use; none if the topology is not this
    /// machine's, or if the kernel does not report them.
    ///
    /// # Errors
    /// [`Error::NoSuchNode`].
    pub fn usable_cpus(&self, node: NodeId) -> Result<CpuSet> {
        let cpus = &self.node(node)?.cpus;
        Ok(if matches!(self.live, Some(Live::Kernel)) {
            affinity().unwrap_or_default().intersection(cpus)
        } else {
            CpuSet::default()
        })
    }

    /// Returns the host node of the CPU that the calling thread runs on now. The kernel may move the thread to
    /// another node at any time, unless it is [bound](Self::bind_thread).
    ///
    /// Source: `sched_getcpu(3)`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the topology is simulated or of another machine, so that its CPUs are not those
    /// of this one · [`Error::System`] if no node has that CPU.
    pub fn current_node(&self) -> Result<NodeId> {
        if !matches!(self.live, Some(Live::Kernel)) {
            let why =
                "the calling thread runs on no CPU of a simulated or distant machine: name a node";
            return Err(Error::invalid("node", why));
        }
        let what = "finding the calling thread's node";
        let cpu = thread::sched_getcpu() as u32;
        let mut nodes = self.nodes().iter();
        let own = nodes.find(|node| node.cpus.contains(cpu));
        own.map(|node| node.id)
            .ok_or_else(|| Error::failed(what, format!("no node has CPU {cpu}")))
    }
}

/// Returns why no thread of this process can be bound to `cpus`, and what to do.
fn refusal(cpus: &CpuSet, online: Option<&CpuSet>, allowed: &CpuSet) -> String {
    match online {
        Some(online) if online.intersection(cpus).is_empty() => format!(
            "none of them is online, only CPUs {online}: if the machine has changed, discover the topology again"
        ),
        _ => format!(
            "this process may use none of them, only CPUs {allowed}: its control group (cpuset) must allow more"
        ),
    }
}

/// Returns the CPUs that are online.
fn online() -> Option<CpuSet> {
    let list = Kernel::here().read("/sys/devices/system/cpu/online")?;
    list.parse().ok()
}

/// Returns the CPUs that the control group allows this process.
fn allowed() -> Option<CpuSet> {
    let status = Kernel::here().read("/proc/thread-self/status")?;
    status_field(&status, "Cpus_allowed_list")?.parse().ok()
}

/// Returns the CPUs of the calling thread. The kernel refuses on a machine with more than 1024.
fn affinity() -> io::Result<CpuSet> {
    let mask = thread::sched_getaffinity(None)?;
    let cpus = (0..thread::CpuSet::MAX_CPU).filter(|&cpu| mask.is_set(cpu));
    Ok(cpus.map(|cpu| cpu as u32).collect())
}

/// Binds the calling thread to those of the CPUs that are there.
fn set_affinity(cpus: &CpuSet) -> io::Result<()> {
    let mut mask = thread::CpuSet::new();
    for cpu in cpus.iter().map(|cpu| cpu as usize) {
        if cpu < thread::CpuSet::MAX_CPU {
            mask.set(cpu);
        }
    }
    Ok(thread::sched_setaffinity(None, &mask)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_bound_until_the_guard_goes() {
        let before = affinity().unwrap();
        let last: CpuSet = before.iter().last().into_iter().collect();
        {
            let binding = ThreadBinding::to(&last).unwrap();
            assert_eq!(binding.cpus(), &last);
            assert_eq!(affinity().unwrap(), last);
        }
        assert_eq!(affinity().unwrap(), before);
    }

    #[test]
    fn cpus_that_are_not_there_are_refused_with_those_that_are() {
        let before = affinity().unwrap();
        let missing = CpuSet::from_iter([8_000]);
        let error = ThreadBinding::to(&missing).unwrap_err();
        assert!(
            matches!(&error, Error::System { detail, .. } if detail.contains("none of them is online")),
            "{error}"
        );
        assert_eq!(affinity().unwrap(), before);
        // Where the CPU is online, or the kernel does not say, the control group is the reason.
        let allowed = CpuSet::from_iter([0, 1]);
        for online in [Some(&missing), None] {
            let text = refusal(&missing, online, &allowed);
            assert!(text.contains("only CPUs 0-1: its control group"), "{text}");
        }
    }

    #[test]
    fn usable_cpus_are_the_nodes_and_the_threads() {
        let topology = Topology::of_this_machine(&Kernel::here(), Vec::new());
        let own = affinity().unwrap();
        for node in topology.nodes() {
            let usable = topology.usable_cpus(node.id).unwrap();
            assert_eq!(usable, node.cpus.intersection(&own));
            if let Some(cpu) = usable.iter().last() {
                let one = CpuSet::from_iter([cpu]);
                let _bound = ThreadBinding::to(&one).unwrap();
                assert_eq!(topology.usable_cpus(node.id).unwrap(), one);
            }
        }
    }

    #[test]
    fn the_current_node_has_the_threads_cpu() {
        let topology = Topology::of_this_machine(&Kernel::here(), Vec::new());
        for node in topology.nodes() {
            let Ok(_bound) = topology.bind_thread(node.id) else {
                continue; // a node without CPUs, or none that this process may use
            };
            assert_eq!(topology.current_node(), Ok(node.id));
        }
        let machine = crate::Machine::gh200x4();
        let error = Topology::of_machine(&machine).unwrap().current_node();
        let error = error.unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }

    #[test]
    fn a_node_of_this_machine_can_be_bound_to() {
        let topology = Topology::of_this_machine(&Kernel::here(), Vec::new());
        let Some(node) = topology.nodes().iter().find(|node| !node.cpus.is_empty()) else {
            return; // a system without /sys
        };
        let binding = topology.bind_thread(node.id).unwrap();
        assert!(!binding.cpus().is_empty());
        assert_eq!(&binding.cpus().intersection(&node.cpus), binding.cpus());
    }
}
