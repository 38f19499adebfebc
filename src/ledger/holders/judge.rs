//! Finds out why a process may hold memory.

use super::holder::Holder;
use super::nvml::NvmlGpu;
use super::why::Why;

/// The process that looks.
#[derive(Debug)]
pub(super) struct Asker {
    pub pid: u32,
    pub uid: u32,
    pub in_namespace: Option<bool>,
    pub proc_hides: bool,
}

/// Adds the reasons to a process, the strongest first.
pub(super) fn judge(holder: &mut Holder, asker: &Asker, ledgers: &[u32], gpus: &[NvmlGpu]) {
    let is_hidden = holder.state.is_none();
    let (maps_driver, maps_managed) = (
        holder.driver_mapped > Some(0),
        holder.managed_mapped > Some(0),
    );
    let uses_gpus = !holder.gpus.is_empty();
    let is_client = || {
        let mut all = gpus.iter().flat_map(|gpu| &gpu.processes);
        all.any(|process| process.pid == holder.pid && process.is_mps_client)
    };
    let all = [
        (Why::Reporter, holder.pid == asker.pid),
        (Why::Ledger, ledgers.contains(&holder.pid)),
        (Why::Hidden, is_hidden),
        (Why::Zombie, matches!(holder.state, Some('Z' | 'X'))),
        (Why::Stopped, matches!(holder.state, Some('T' | 't'))),
        (Why::Waiting, holder.state == Some('D')),
        (Why::Mps, holder.name.starts_with("nvidia-cuda-mps")),
        (Why::MpsClient, is_client()),
        (Why::Namespace, holder.inner_pid.is_some()),
        (
            Why::OtherUser,
            holder.uid.is_some_and(|uid| uid != asker.uid),
        ),
        (Why::Unreadable, !is_hidden && holder.device_fds.is_none()),
        (Why::InFlight, holder.fds_in_flight > Some(0)),
        (Why::OnGpus, uses_gpus),
        (Why::Managed, maps_managed),
        (Why::DriverMemory, maps_driver),
        (Why::SharedUnmapped, holder.shared_unmapped > 0),
        (Why::Shared, holder.shared_mapped > 0),
        (
            Why::OpenAlone,
            holder.device_fds > Some(0) && !uses_gpus && !maps_driver && !maps_managed,
        ),
    ];
    holder.why.extend(
        all.into_iter()
            .filter(|(_, is_so)| *is_so)
            .map(|(why, _)| why),
    );
    holder.why.sort_unstable();
}
