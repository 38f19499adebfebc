//! Parts of `egm-demo`: that its proofs can fail, and how it draws and counts figures made up for
//! the purpose.

#[allow(dead_code)]
#[path = "../../examples/egm-demo/heatmap.rs"]
mod heatmap;

use egmem::doctor::measure::{
    Bandwidth, BandwidthRow, Kind, OPERATIONS, Proof, Proofs, Rate, Rates,
};
use egmem::driver::{Call, Code, NodeId};
use egmem::{Driver, Machine, Topology};

fn rate(median: f64) -> Option<Rate> {
    Some(Rate {
        median,
        min: median,
        max: median,
    })
}

/// Two nodes, three GPUs; kernels cannot reach pageable memory.
fn made_up() -> Bandwidth {
    let mut rows = Vec::new();
    for node in [0, 1] {
        for gpu in [0, 1, 5] {
            let kinds = [Kind::Vmm, Kind::Pool, Kind::HostAlloc, Kind::Pageable];
            for (index, memory) in kinds.into_iter().enumerate() {
                let base = 10.0 * f64::from(node + 1) + f64::from(gpu) + index as f64 / 10.0;
                let kernel = if memory == Kind::Pageable {
                    None
                } else {
                    rate(base)
                };
                rows.push(BandwidthRow {
                    node,
                    gpu,
                    memory,
                    copy_to_gpu: rate(base),
                    copy_to_host: rate(2.0 * base),
                    kernel_read: kernel,
                    kernel_write: kernel,
                });
            }
        }
    }
    Bandwidth {
        unit: "GB/s",
        bytes: 1 << 30,
        repeats: 9,
        worst_ratio_to_cuda_host_alloc: None,
        rows,
    }
}

#[test]
fn the_heat_map_has_a_labelled_cell_for_every_figure() {
    let svg = heatmap::draw(&made_up(), "made up <figures> & co");
    if let Ok(folder) = std::env::var("EGMEM_KEEP_PLOT") {
        std::fs::write(format!("{folder}/made-up.svg"), &svg).expect("written");
    }
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert!(
        svg.contains("made up &lt;figures&gt; &amp; co"),
        "text is escaped"
    );
    for operation in OPERATIONS {
        assert_eq!(svg.matches(&format!(">{operation}</text>")).count(), 1);
    }
    for gpu in [0, 1, 5] {
        assert_eq!(
            svg.matches(&format!(">GPU {gpu}</text>")).count(),
            OPERATIONS.len()
        );
    }
    for node in [0, 1] {
        let label = format!(">node {node} · cudaHostAlloc</text>");
        assert_eq!(svg.matches(&label).count(), OPERATIONS.len());
    }
    // 2 nodes × 3 GPUs × 4 kinds × 4 operations, of which pageable has no kernel figures.
    assert_eq!(svg.matches(">–</text>").count(), 2 * 3 * 2);
    assert_eq!(
        svg.matches(">50.6</text>").count(),
        1,
        "2 × (20 + 5 + 0.3), pageable to the host"
    );
    assert!(
        svg.contains(">60 GB/s</text>"),
        "the scale ends at a round number with its unit"
    );
    assert!(!svg.contains("NaN") && !svg.contains("inf"));
}

#[test]
fn a_matrix_without_figures_still_draws() {
    let mut bandwidth = made_up();
    bandwidth.rows.truncate(1);
    bandwidth.rows[0].copy_to_gpu = None;
    bandwidth.rows[0].copy_to_host = rate(0.0);
    let svg = heatmap::draw(&bandwidth, "");
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
}

#[test]
fn a_rate_is_the_median_of_its_measurements() {
    let one_gb = 1_000_000_000;
    let odd = Rate::of(one_gb, &[40.0, 10.0, 20.0]).expect("measured");
    assert_eq!((odd.min, odd.median, odd.max), (25.0, 50.0, 100.0));
    let even = Rate::of(one_gb, &[10.0, 20.0]).expect("measured");
    assert_eq!(even.median, 75.0);
    assert_eq!(Rate::of(one_gb, &[]), None);
}

#[test]
fn rows_are_compared_with_cuda_host_alloc_of_their_own_pair() {
    let bandwidth = made_up();
    let row = bandwidth
        .rows
        .iter()
        .find(|row| row.memory == Kind::Pool && row.gpu == 5);
    let base = row
        .and_then(|row| row.beside(&bandwidth.rows))
        .expect("a row beside it");
    assert_eq!((base.node, base.gpu, base.memory), (0, 5, Kind::HostAlloc));
}

fn prove(driver: &Driver) -> Vec<Proof> {
    let plan = Proofs {
        driver,
        nodes: &[NodeId(0), NodeId(1)],
        gpus: &[2, 3],
        bytes: 1 << 20,
    };
    let proofs = plan.prove(&mut |_| ());
    assert_eq!(proofs.len() as u64, plan.steps());
    proofs
}

#[test]
fn each_proof_runs_a_kernel_and_leaves_nothing_behind() {
    let driver = Driver::simulated(Machine::gh200x4()).expect("the simulator");
    let sim = driver.sim().expect("it is simulated");
    let proofs = prove(&driver);
    assert!(proofs.iter().all(|proof| proof.verified), "{proofs:?}");
    assert_eq!(sim.count(Call::LaunchKernel), proofs.len() as u64);
    assert_eq!(sim.held().to_string(), "nothing");
}

#[test]
fn a_kernel_that_fails_fails_its_own_proof_alone() {
    for nth in 1..=12 {
        let driver = Driver::simulated(Machine::gh200x4()).expect("the simulator");
        let sim = driver.sim().expect("it is simulated");
        sim.fail(Call::LaunchKernel, nth, Code::LAUNCH_OUT_OF_RESOURCES);
        let proofs = prove(&driver);
        for (index, proof) in proofs.iter().enumerate() {
            assert_eq!(proof.verified, index as u64 + 1 != nth, "{proof:?}");
            assert_eq!(proof.verified, proof.reason.is_none());
        }
        let reason = proofs[nth as usize - 1]
            .reason
            .as_deref()
            .unwrap_or_default();
        assert!(reason.contains("cuLaunchKernel"), "{reason}");
        assert_eq!(sim.held().to_string(), "nothing");
    }
}

#[test]
fn a_grant_that_fails_for_all_gpus_is_tried_for_each() {
    let driver = Driver::simulated(Machine::gh200x4()).expect("the simulator");
    let sim = driver.sim().expect("it is simulated");
    sim.fail(Call::MemSetAccess, 1, Code::INVALID_DEVICE);
    sim.fail(Call::MemSetAccess, 2, Code::INVALID_DEVICE);
    let proofs = prove(&driver);
    let failed: Vec<_> = proofs.iter().filter(|proof| !proof.verified).collect();
    assert_eq!(failed.len(), 1, "{proofs:?}");
    assert_eq!((failed[0].node, failed[0].gpu), (0, 2));
    assert!(failed[0].remedy.is_some());
    assert_eq!(sim.held().to_string(), "nothing");
}

/// The simulator's rates mean nothing and are not looked at; that every kind of memory goes through
/// every operation, and that the read kernel's sums are right, is the same as on a GPU.
#[test]
fn every_kind_of_memory_is_measured_and_given_back() {
    for (machine, kernels_reach_pageable) in [(Machine::h200x8(), false), (Machine::gh200(), true)]
    {
        let driver = Driver::simulated(machine).expect("the simulator");
        let topology = Topology::discover(&driver).expect("its topology");
        let sim = driver.sim().expect("it is simulated");
        let plan = Rates {
            driver: &driver,
            topology: &topology,
            nodes: &[NodeId(0)],
            gpus: &[0],
            bytes: 1 << 20,
            repeats: 3,
        };
        let bandwidth = plan.measure(&mut |_| ()).expect("measured");
        let kinds: Vec<_> = bandwidth.rows.iter().map(|row| row.memory).collect();
        assert_eq!(kinds, Kind::ALL);
        for row in &bandwidth.rows {
            let kernels = row.memory != Kind::Pageable || kernels_reach_pageable;
            let measured = row.rates().map(|rate| rate.is_some());
            assert_eq!(measured, [true, true, kernels, kernels], "{:?}", row.memory);
        }
        assert_eq!(sim.held().to_string(), "nothing");
    }
}

#[test]
fn a_measurement_that_fails_gives_everything_back() {
    for call in [
        Call::MemcpyAsync,
        Call::LaunchKernel,
        Call::EventRecord,
        Call::ModuleGetFunction,
    ] {
        for nth in [1, 2] {
            let driver = Driver::simulated(Machine::h200x8()).expect("the simulator");
            let topology = Topology::discover(&driver).expect("its topology");
            let sim = driver.sim().expect("it is simulated");
            sim.fail(call, nth, Code::UNKNOWN);
            let plan = Rates {
                driver: &driver,
                topology: &topology,
                nodes: &[NodeId(0)],
                gpus: &[0],
                bytes: 4096,
                repeats: 1,
            };
            let error = plan.measure(&mut |_| ()).expect_err("a failed call");
            assert_eq!(error.driver_error().map(|source| source.call), Some(call));
            assert_eq!(sim.held().to_string(), "nothing", "{error}");
        }
    }
}
