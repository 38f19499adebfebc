//! One request of each kind.

use egmem::driver::HandleType;
use egmem::exchange::protocol::{
    Admission, Ask, Delete, Gather, Join, Leave, List, Offer, Operation, Probe, Release, Secret,
    Wait, Watch,
};

use crate::authorization::stage::{create, fetch};

/// The names and numbers in a request.
pub struct Target<'a> {
    pub name: &'a str,
    pub lease: u64,
    pub group: &'a str,
}

/// A request of each kind but pings, in the order of the protocol.
pub fn all(of: &Target<'_>) -> Vec<Ask> {
    let (name, group) = (|| of.name.into(), || of.group.into());
    let (lease, ms) = (of.lease, 100);
    vec![
        Ask::List(List {
            prefix: name(),
            after: None,
        }),
        Ask::Wait(Wait { name: name(), ms }),
        fetch(of.name, HandleType::Fabric),
        Ask::Release(Release { lease }),
        Ask::Probe(Probe {
            lease,
            wrote: Some(1),
        }),
        Ask::Watch(Watch { prefix: name() }),
        create(of.name),
        Ask::Delete(Delete { name: name(), ms }),
        join(of.group),
        Ask::Offer(Offer {
            group: group(),
            round: 1,
            fabric: Vec::new(),
            first: 0,
        }),
        Ask::Gather(Gather {
            group: group(),
            round: 1,
            number: 1,
            operation: Operation::Barrier,
            first: None,
            ms: 0,
        }),
        Ask::Leave(Leave {
            group: group(),
            round: 1,
            ms: 0,
        }),
    ]
}

fn join(group: &str) -> Ask {
    Ask::Join(Join {
        group: group.into(),
        rank: 1,
        size: 2,
        admission: Admission::Secret(Secret::new(&[1; 32]).unwrap()),
        can: vec![HandleType::Fabric],
        cannot: Vec::new(),
        memory: None,
        ms: 100,
    })
}
