//! Finds out why a process may hold memory.

use super::holder::Holder;
use super::nvml::NvmlGpu;
use super::why::Why;

/// The driver's memory and managed memory below which a process has none worth a word: a process that has called `cuInit`
/// alone maps 4 KiB.
const LEAST: u64 = 1 << 20;

/// What a context of its own maps: 70 MiB of the driver's memory, 2 MiB of managed memory, 8 MiB of shared pages on an H200
/// (driver 580.159.04), with room for other GPUs.
const DRIVER_OF_CONTEXT: u64 = 128 << 20;
const OTHER_OF_CONTEXT: u64 = 16 << 20;

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
    let is_hidden = !holder.is_listed;
    let uses_gpus = !holder.gpus.is_empty();
    // Without NVML it is not known who has contexts.
    let contexts = if gpus.is_empty() {
        1
    } else {
        holder.gpus.len() as u64
    };
    let exceeds = |bytes: u64, of_context: u64| bytes >= LEAST.max(contexts * of_context);
    let driver = holder.driver_mapped.unwrap_or(0);
    let managed = holder.managed_mapped.unwrap_or(0);
    let named = holder.shared_mapped.saturating_sub(holder.unnamed_mapped);
    let has_gpu = holder.has_gpu();
    let is_client = || {
        let mut all = gpus.iter().flat_map(|gpu| &gpu.processes);
        all.any(|process| process.pid == holder.pid && process.is_mps_client)
    };
    let all = [
        (Why::Reporter, holder.pid == asker.pid),
        (Why::Ledger, ledgers.contains(&holder.pid)),
        (Why::Hidden, is_hidden),
        (
            Why::Zombie,
            matches!(holder.state, Some('Z' | 'X')) && !holder.has_ended,
        ),
        (Why::Stopped, matches!(holder.state, Some('T' | 't'))),
        (Why::Waiting, holder.state == Some('D')),
        (Why::Mps, holder.name.starts_with("nvidia-cuda-mps")),
        (Why::MpsClient, is_client()),
        (Why::Namespace, holder.inner_pid.is_some()),
        (
            Why::OtherUser,
            holder.uid.is_some_and(|uid| uid != asker.uid),
        ),
        (
            Why::Unreadable,
            // One that did not answer, or was not asked, may be permitted.
            !is_hidden
                && !holder.has_ended
                && holder.device_fds.is_none()
                && ![Why::Waiting, Why::NotLookedAt]
                    .iter()
                    .any(|why| holder.why.contains(why)),
        ),
        (Why::InFlight, holder.fds_in_flight > Some(0)),
        (Why::OnGpus, uses_gpus || gpus.is_empty() && driver >= LEAST),
        (Why::Managed, exceeds(managed, OTHER_OF_CONTEXT)),
        (Why::DriverMemory, exceeds(driver, DRIVER_OF_CONTEXT)),
        (
            Why::Pinned,
            has_gpu && exceeds(holder.unnamed_mapped, OTHER_OF_CONTEXT),
        ),
        (Why::SharedUnmapped, holder.shared_unmapped > 0),
        (
            Why::Shared,
            named > 0 || !has_gpu && holder.unnamed_mapped > 0,
        ),
        (
            Why::OpenAlone,
            holder.device_fds > Some(0) && !uses_gpus && driver < LEAST && managed < LEAST,
        ),
    ];
    holder.why.extend(
        all.into_iter()
            .filter(|(_, is_so)| *is_so)
            .map(|(why, _)| why),
    );
    holder.why.sort_unstable();
    holder.why.dedup();
}
