//! A peer's quota covers all that is pinned because of it, deleted memory too.

use egmem::driver::Location;

use super::*;

const QUOTA: u64 = 32 * MIB;

/// Whether reuse is on matters: kept memory is pinned.
async fn start(policy: &str, leases: &str, peers: &Peers, driver: &Driver) -> Service {
    let config = peers.config_with(&format!("[reuse]\npolicy = \"{policy}\"\n"), leases);
    Service::start(config, driver).await.unwrap()
}

/// The simulated node's memory that is pinned; on a real machine, the service's figure.
struct Pinned<'a>(&'a Driver, &'a Service, u64);

impl<'a> Pinned<'a> {
    fn since(driver: &'a Driver, service: &'a Service) -> Self {
        Self(driver, service, Self::free(driver))
    }

    fn free(driver: &Driver) -> u64 {
        let sim = driver.sim();
        sim.map_or(0, |sim| sim.free_bytes(Location::HostNuma(0)))
    }

    /// Returns the pinned bytes, less those that every peer can allocate.
    fn bytes(&self) -> u64 {
        // First: memory that is zeroed meanwhile counts for the peer at this moment.
        let free = metric(self.1, "egmem_reserve_bytes");
        let pinned = match self.0.sim() {
            Some(_) => self.2 - Self::free(self.0),
            None => metric(self.1, "egmem_pinned_bytes"),
        };
        pinned.saturating_sub(free)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_memory_counts_until_it_is_free_for_anybody() {
    let peers = Peers::new();
    let driver = driver();
    for policy in ["same-peer", "anyone", "never"] {
        let service = start(policy, LEASES_STAY, &peers, &driver).await;
        let pinned = Pinned::since(&driver, &service);
        let a = peers.client(&service, "a.test", &driver).await;
        // Of sizes that do not fit into each other, so that little can be used again.
        for bytes in [30, 4, 26, 8, 32, 2, 14, 16, 28, 6, 32] {
            let memory = create(&a, "one", bytes * MIB).await.unwrap();
            assert_eq!(only_byte(&memory), 0);
            memory.fill(0xaa).unwrap();
            assert!(pinned.bytes() <= QUOTA, "{policy}: {}", service.metrics());
            memory.release().await.unwrap();
            a.delete("one", PATIENCE).await.unwrap();
            let (now, charged) = (pinned.bytes(), metric(&service, "egmem_charged_bytes"));
            assert!(
                now <= QUOTA && charged <= QUOTA,
                "{policy}: {now} {charged}"
            );
        }
        until(&service, "egmem_dirty_bytes", 0).await;
        // Only memory that is kept for the peer counts.
        let kept = metric(&service, "egmem_kept_bytes");
        until(&service, "egmem_charged_bytes", kept).await;
        assert_eq!(kept > 0, policy == "same-peer");
        assert_eq!(metric(&service, "egmem_owners"), 0);
        a.close().await;
        service.drain(PATIENCE).await.unwrap();
        nothing_held(&driver);
    }
}

/// Memory of a holder whose whole runtime is gone: it sends nothing any more, and keeps its mapping.
async fn silent_holder(
    service: &Service,
    peers: &Peers,
    driver: &Driver,
    name: &'static str,
) -> Option<RemoteBuffer> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let options = Client::options(service.addresses()[0].clone())
        .security(peers.tls("a.test"))
        .timeout(PATIENCE);
    let driver = driver.clone();
    let work = runtime.spawn(async move {
        let client = options.connect(&driver).await?;
        client.fetch(name).probe(false).go().await
    });
    let held = work.await.unwrap();
    runtime.shutdown_background();
    held.ok()
}

/// xorshift: the same sequence every time.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_peer_creates_deletes_and_holds_it_never_pins_more_than_its_quota() {
    const NAMES: [&str; 6] = ["n0", "n1", "n2", "n3", "n4", "n5"];
    let peers = Peers::new();
    let driver = driver();
    for seed in [1_u64, 2] {
        let service = start("same-peer", &leases_end(), &peers, &driver).await;
        let pinned = Pinned::since(&driver, &service);
        let a = peers.client(&service, "a.test", &driver).await;
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ seed);
        let (mut held, mut silent) = (Vec::new(), Vec::new());
        let (mut made, mut over) = (0, 0);
        for _ in 0..40 {
            let name = NAMES[random.below(6) as usize];
            match random.below(8) {
                0..=2 => {
                    let ask = CreateOptions::new(name, (random.below(10) + 1) * MIB);
                    match a.create(ask.node(NodeId(0))).await {
                        Ok(_) => made += 1,
                        Err(Error::Refused { reason, .. }) => {
                            over += usize::from(reason == Refusal::Quota);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                3 => held.extend(a.fetch(name).probe(false).go().await.ok()),
                4 if silent.len() < 2 => {
                    silent.extend(silent_holder(&service, &peers, &driver, name).await);
                }
                5 if !held.is_empty() => {
                    let at = random.below(held.len() as u64) as usize;
                    held.swap_remove(at).release().await.unwrap();
                }
                // A name that is held goes on ending by itself.
                _ => drop(a.delete(name, Duration::from_millis(1)).await),
            }
            let (now, charged) = (pinned.bytes(), metric(&service, "egmem_charged_bytes"));
            assert!(
                now <= QUOTA && charged <= QUOTA,
                "seed {seed}: {now} {charged}"
            );
        }
        assert!(made > 3 && over > 0, "{made} made, {over} over the quota");

        // When all is released, only kept memory is left.
        for memory in held {
            memory.release().await.unwrap();
        }
        for name in NAMES {
            drop(a.delete(name, PATIENCE).await);
        }
        until(&service, "egmem_names", 0).await;
        assert!(pinned.bytes() <= QUOTA);
        drop(silent);
        a.close().await;
        service.drain(PATIENCE).await.unwrap();
        nothing_held(&driver);
    }
}
