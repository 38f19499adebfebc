//! One request of each kind.

use egmem::driver::HandleType;
use egmem::exchange::protocol::{Ask, Held, List};

use crate::authorization::stage::{create, fetch};

/// The names and numbers in a request.
pub struct Target<'a> {
    pub name: &'a str,
    pub lease: u64,
}

/// A request of each kind but pings, in the order of the protocol.
pub fn all(of: &Target<'_>) -> Vec<Ask> {
    let name = || of.name.into();
    let (lease, ms) = (of.lease, 100);
    vec![
        Ask::List(List {
            prefix: name(),
            after: None,
        }),
        Ask::Wait { name: name(), ms },
        fetch(of.name, HandleType::Fabric),
        Ask::Held(Held {
            leases: vec![lease],
            ..Held::default()
        }),
        Ask::Release { lease },
        Ask::Probe { lease },
        create(of.name),
        Ask::Delete { name: name(), ms },
    ]
}
