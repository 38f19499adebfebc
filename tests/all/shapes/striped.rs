//! Ranges in stripes.

use egmem::driver::Location;
use egmem::proof::Prover;
use egmem::shapes::{Stripes, stripes};
use egmem::{Driver, Error, Topology};

use crate::shapes::{MIB, nothing_held};

pub fn stripes_on_all_nodes_are_one_range(driver: &Driver) {
    let topology = Topology::discover(driver).unwrap();
    let nodes: Vec<_> = topology
        .gpus()
        .iter()
        .filter_map(|gpu| gpu.host_node().ok())
        .collect();
    let striped = Stripes::over(nodes.iter().copied())
        .allocate(driver, 17 * MIB + 8)
        .unwrap();
    let found = stripes(&striped);
    assert_eq!(found.last().unwrap().bytes.end, 17 * MIB + 8);
    for pair in found.windows(2) {
        assert_eq!(pair[0].bytes.end, pair[1].bytes.start);
    }
    for gpu in topology.gpus() {
        let prover = Prover::new(driver, gpu.ordinal).unwrap();
        prover.prove(&striped, &striped.cpu().unwrap(), 5).unwrap();
    }
    drop(striped);
    nothing_held(driver);
}

pub fn a_front_is_on_the_gpu(driver: &Driver) {
    let topology = Topology::discover(driver).unwrap();
    let node = topology.gpu(0).unwrap().host_node().unwrap();
    let gpu = Location::Device(0);
    let plan = Stripes::over([node]).front(gpu, 4 * MIB);
    let options = plan.options(10 * MIB).unwrap().access_by([gpu]);
    let buffer = options.allocate(driver).unwrap();
    let places: Vec<_> = stripes(&buffer)
        .into_iter()
        .map(|stripe| (stripe.location, stripe.bytes))
        .collect();
    assert_eq!(
        places,
        [(gpu, 0..4 * MIB), (node.into(), 4 * MIB..10 * MIB)]
    );
    Prover::new(driver, 0).unwrap().write(&buffer, 2).unwrap();
    let host = buffer.cpu_at(4 * MIB, 6 * MIB).unwrap();
    assert_eq!(
        host.get::<u64>(8).unwrap(),
        egmem::kernels::pattern(2, 4 * MIB / 8 + 1)
    );
}

pub fn stripes_between_granules_are_refused(driver: &Driver) {
    let topology = Topology::discover(driver).unwrap();
    let node = topology.gpu(0).unwrap().host_node().unwrap();
    let plan = Stripes::over([Location::from(node), Location::Device(0)]).stripe(MIB);
    let error = plan.allocate(driver, 4 * MIB).unwrap_err();
    assert!(
        matches!(error, Error::InvalidArgument { what: "share", .. }),
        "{error}"
    );
    nothing_held(driver);
}
