//! The host's facts as text.

use crate::facts::HostFacts;
use crate::size::Bytes;
use crate::texts::ranges;

/// Returns a label and a text for each known fact.
pub fn rows(host: &HostFacts) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    if let Some(kernel) = &host.kernel {
        let pages = host
            .page_size
            .map(|bytes| format!(", {} pages", Bytes(bytes)));
        let text = format!(
            "{kernel} {}{}",
            host.architecture,
            pages.unwrap_or_default()
        );
        rows.push(("Kernel", text));
    }
    rows.push(("Container", container(host)));
    rows.push(("Control group", control_group(host)));
    rows.push(("NUMA", numa(host)));
    rows.push(("Huge pages", huge_pages(host)));
    if let Some(memlock) = host.memlock {
        let text = match memlock.soft {
            None => "unlimited".to_owned(),
            Some(soft) => format!("at most {}", Bytes(soft)),
        };
        let exempt = match host.cap_ipc_lock {
            Some(true) => " (CAP_IPC_LOCK: no limit counts)",
            _ => "",
        };
        rows.push(("Memlock", text + exempt));
    }
    if let Some(most) = host.max_mappings {
        rows.push(("Mappings", format!("at most {most} in a process")));
    }
    if let Some(visible) = &host.cuda_visible_devices {
        rows.push(("Environment", format!("CUDA_VISIBLE_DEVICES={visible}")));
    }
    rows.retain(|(_, text)| !text.is_empty());
    rows
}

fn container(host: &HostFacts) -> String {
    let nice = match host.cap_sys_nice {
        Some(true) => ", with CAP_SYS_NICE",
        Some(false) => ", without CAP_SYS_NICE",
        None => "",
    };
    match &host.container {
        Some(container) => format!("{container}{nice}"),
        None => "none seen".to_owned(),
    }
}

fn control_group(host: &HostFacts) -> String {
    match (host.cgroup_memory_limit, host.cgroup_memory_room) {
        (Some(limit), Some(room)) => {
            let (limit, room) = (Bytes(limit), Bytes(room));
            format!("at most {limit} of memory, {room} left; registered memory counts")
        }
        (Some(limit), None) => {
            format!(
                "at most {} of memory; registered memory counts",
                Bytes(limit)
            )
        }
        (None, _) => "no memory limit".to_owned(),
    }
}

fn numa(host: &HostFacts) -> String {
    let cpus = host
        .allowed_cpus
        .as_ref()
        .map(|cpus| format!("CPUs {cpus}"));
    let nodes = host.allowed_nodes.as_ref().map(|nodes| {
        let ids: Vec<i32> = nodes.iter().map(|node| node.0).collect();
        let s = if ids.len() == 1 { "" } else { "s" };
        format!("node{s} {}", ranges(&ids))
    });
    let allowed: Vec<String> = cpus.into_iter().chain(nodes).collect();
    let mut words = Vec::new();
    if !allowed.is_empty() {
        words.push(format!("allowed: {}", allowed.join(" and ")));
    }
    if let Some(balancing) = host.numa_balancing {
        let state = if balancing { "on" } else { "off" };
        words.push(format!("balancing {state}"));
    }
    words.join("; ")
}

fn huge_pages(host: &HostFacts) -> String {
    let mut words: Vec<String> = host
        .huge_pages
        .iter()
        .filter(|pool| pool.total > 0)
        .map(|pool| {
            let (free, total) = (pool.free, pool.total);
            format!("{free} of {total} free ({})", Bytes(pool.page_bytes))
        })
        .collect();
    if words.is_empty() {
        words.push("none reserved".to_owned());
    }
    if let Some(transparent) = &host.transparent_huge_pages {
        words.push(format!("transparent: {transparent}"));
    }
    if let Some(shared) = &host.shared_huge_pages {
        words.push(format!("shared: {shared}"));
    }
    words.join(", ")
}
