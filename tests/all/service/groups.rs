//! Groups at a service: the configuration gives the right to join, and a reload changes it.

use egmem::exchange::group::{self, Admission, Group, GroupSecret, Host};

use super::*;

/// Over TCP a group takes fabric handles, which a GPU's driver makes only with an IMEX channel.
fn driver() -> Driver {
    Driver::simulated(Machine::gh200()).unwrap()
}

/// A group of one rank, by a peer of that name.
async fn join(peers: &Peers, service: &Service, peer: &str, name: &str) -> group::Result<()> {
    let secret = GroupSecret::new([7; 32])?;
    let address = service.addresses()[0].clone();
    let options = Group::options(name, 0, 1, address, Admission::Secret(secret))
        .host(Host::Elsewhere)
        .security(peers.tls(peer))
        .deadline(PATIENCE);
    let group = options.join(&driver()).await?;
    group.leave(PATIENCE).await.map(drop)
}

fn forbidden(joined: group::Result<()>) -> bool {
    matches!(
        joined,
        Err(group::Error::Exchange(Error::Refused {
            reason: Refusal::Forbidden,
            ..
        }))
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_need_rights_that_the_configuration_gives() {
    let peers = Peers::new();
    let service = Service::start(peers.config(""), &driver()).await.unwrap();
    assert!(forbidden(join(&peers, &service, "a.test", "job/1").await));
    let groups = "[[groups]]\nname = \"job/*\"\nwho = [\"a.test\"]\n";
    assert_eq!(service.reload(peers.config(groups)).unwrap(), [""; 0]);
    join(&peers, &service, "a.test", "job/1").await.unwrap();
    for (peer, group) in [("b.test", "job/1"), ("a.test", "other")] {
        let joined = join(&peers, &service, peer, group).await;
        assert!(forbidden(joined), "{peer} {group}");
    }
    service.reload(peers.config("")).unwrap();
    assert!(forbidden(join(&peers, &service, "a.test", "job/1").await));
    assert_eq!(service.stats().groups, 0);
    service.drain(Duration::ZERO).await.unwrap();
}
