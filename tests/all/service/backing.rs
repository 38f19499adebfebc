//! What the service's memory is: the driver's, or registered pages.

use egmem::Backing;
use egmem::driver::{HandleType, Location};
use egmem::ledger::{AllocPath, Located, allocations as entries, locate};
use egmem::proof::Prover;

use super::*;

/// The configuration of a reserve of 16 MiB, with `backing` in `[node]`.
fn config(peers: &Peers, backing: &str, more: &str) -> ServiceConfig {
    let reserve =
        "[[reserve]]\nnode = 0\nbytes = \"16MiB\"\nchunk = \"4MiB\"\nmin_chunk = \"2MiB\"\n";
    let node = format!("backing = \"{backing}\"\n{LEASES_STAY}");
    peers.config_with(&format!("{reserve}{more}"), &node)
}

fn backing_of(memory: &RemoteBuffer, driver: &Driver) -> Backing {
    match locate(driver, memory.device_ptr()).unwrap() {
        Located::Allocation { allocation, .. } => {
            assert_eq!(allocation.path, AllocPath::Import);
            let chosen = allocation.backing;
            chosen.map_or(Backing::Driver, |chosen| chosen.backing)
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn registered_memory_goes_around_as_the_drivers_does() {
    let peers = Peers::new();
    let driver = drivers::cuda_or(Machine::h200x8());
    let gpus = driver.device_count().unwrap();
    let service = Service::start(config(&peers, "registered", ""), &driver);
    let service = service.await.unwrap();
    until(&service, "egmem_reserve_bytes", 16 * MIB).await;
    let a = peers.client(&service, "a.test", &driver).await;
    a.create(CreateOptions::new("one", 8 * MIB)).await.unwrap();
    let memory = a.fetch("one").go().await.unwrap();
    assert_eq!(memory.via(), HandleType::PosixFd);
    assert_eq!(backing_of(&memory, &driver), Backing::Registered);
    let prover = Prover::new(&driver, gpus - 1).unwrap();
    prover.prove(&memory, &memory.cpu().unwrap(), 3).unwrap();
    drop(prover);
    for gpu in 0..gpus {
        let access = memory.access(Location::Device(gpu));
        assert_eq!(access, Ok(Access::ReadWrite));
    }
    memory.release().await.unwrap();

    // A client that asks for reading alone reads by the CPU.
    let read = a.fetch("one").read_only().probe(false).go().await.unwrap();
    assert_eq!(read.access(Location::Host), Ok(Access::Read));
    assert_eq!(read.access(Location::Device(0)), Ok(Access::None));
    read.release().await.unwrap();

    // Its owner gets it again, zeroed; another peer never.
    a.delete("one", PATIENCE).await.unwrap();
    // With the memory that was added for probes.
    until(&service, "egmem_kept_bytes", 10 * MIB).await;
    let b = peers.client(&service, "b.test", &driver).await;
    let others = create(&b, "two", 8 * MIB).await.unwrap();
    assert_eq!(only_byte(&others), 0);
    assert_eq!(metric(&service, "egmem_kept_bytes"), 10 * MIB);
    let again = create(&a, "three", 8 * MIB).await.unwrap();
    assert_eq!(only_byte(&again), 0);
    assert_eq!(metric(&service, "egmem_kept_bytes"), 0);
    if driver.is_simulated() {
        // Other tests have memory of the one CUDA driver.
        let own = entries(&driver).into_iter();
        let own: Vec<_> = own.filter(|entry| !entry.path.is_import()).collect();
        assert!(own.iter().all(|entry| entry.path == AllocPath::Registered));
        let pinned = own.iter().map(|entry| entry.bytes).sum::<u64>();
        assert_eq!(pinned, metric(&service, "egmem_pinned_bytes"));
    }
    drop((others, again));
    a.close().await;
    b.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

/// `auto` is decided for each node by the machine and by what its buffers need.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auto_takes_the_kind_that_serves_all_buffers_of_a_node() {
    let buffer = |access| {
        format!(
            "[[buffer]]\nname = \"b\"\nbytes = \"2MiB\"\nnode = 0\nwho = [\"*\"]\naccess = \"{access}\"\n"
        )
    };
    let (discrete, coherent) = (Machine::h200x8, Machine::gh200);
    for (machine, backing, access, expected) in [
        (discrete(), "auto", "read_write", Backing::Registered),
        (discrete(), "auto", "read", Backing::Driver),
        (discrete(), "driver", "read_write", Backing::Driver),
        (coherent(), "auto", "read_write", Backing::Driver),
        (coherent(), "registered", "read_write", Backing::Registered),
    ] {
        let peers = Peers::new();
        let driver = Driver::simulated(machine).unwrap();
        let config = config(&peers, backing, &buffer(access));
        let service = Service::start(config, &driver).await.unwrap();
        let client = peers.client(&service, "a.test", &driver).await;
        let memory = client.fetch("b").go().await.unwrap();
        let what = format!("{backing}, {access}");
        assert_eq!(backing_of(&memory, &driver), expected, "{what}");
        let gpu = memory.access(Location::Device(0)).unwrap();
        assert_ne!(gpu, Access::None, "{what}");
        drop(memory);
        client.close().await;
        service.drain(PATIENCE).await.unwrap();
        nothing_held(&driver);
    }
}
