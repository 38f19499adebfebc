//! Where peers' sessions are, to detect that a machine has restarted: no process that ran on it before
//! still has memory mapped.

use std::collections::HashMap;
use std::net::IpAddr;

use crate::PeerName;
use crate::share::BootId;

/// A machine between two boots, as far as the server can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Machine {
    /// Its address; `None` over a Unix socket.
    pub ip: Option<IpAddr>,
    /// Its boot, as the client claims.
    pub boot: BootId,
}

/// How many sessions each peer has on which machine.
#[derive(Debug, Default)]
pub(super) struct Machines(HashMap<PeerName, HashMap<Machine, usize>>);

impl Machines {
    pub fn add(&mut self, peer: &PeerName, machine: Machine) {
        let machines = self.0.entry(peer.clone()).or_default();
        *machines.entry(machine).or_default() += 1;
    }

    pub fn take(&mut self, peer: &PeerName, machine: Machine) {
        let Some(machines) = self.0.get_mut(peer) else {
            return;
        };
        if let Some(count) = machines.get_mut(&machine) {
            *count -= 1;
            if *count == 0 {
                machines.remove(&machine);
            }
        }
        if machines.is_empty() {
            self.0.remove(peer);
        }
    }

    /// Returns whether a machine of `peer` has restarted: the peer is seen at the same address with another
    /// boot, and nowhere with this one.
    ///
    /// One certificate may serve many machines, and so may one address; the same peer at the same address
    /// counts as the same machine. Any process can be `local`, and a user of this machine can be in a
    /// container that invents its boots.
    pub fn have_restarted(&self, peer: &PeerName, machine: &Machine) -> bool {
        let (PeerName::Certificate(_) | PeerName::Spiffe(_), Some(_)) = (peer, machine.ip) else {
            return false;
        };
        let Some(machines) = self.0.get(peer) else {
            return false;
        };
        let same = |now: &&Machine| now.boot == machine.boot;
        let again = |now: &Machine| now.ip == machine.ip;
        machines.keys().find(same).is_none() && machines.keys().any(again)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(ip: u8, boot: u8) -> Machine {
        Machine {
            ip: Some(IpAddr::from([10, 0, 0, ip])),
            boot: BootId::from_bytes([boot; 16]),
        }
    }

    #[test]
    fn another_start_at_the_same_address_is_a_restart() {
        let peer = PeerName::Certificate("node.test".into());
        let other = PeerName::Certificate("other.test".into());
        let before = machine(1, 1);
        let mut machines = Machines::default();
        assert!(!machines.have_restarted(&peer, &before), "nobody is there");
        machines.add(&other, machine(1, 2));
        machines.add(&peer, machine(2, 2));
        assert!(!machines.have_restarted(&peer, &before), "somebody else");
        machines.add(&peer, before);
        machines.add(&peer, machine(1, 2));
        assert!(
            !machines.have_restarted(&peer, &before),
            "it is there still"
        );
        machines.take(&peer, before);
        assert!(machines.have_restarted(&peer, &before));
        assert!(!machines.have_restarted(&peer, &machine(1, 2)));
        machines.take(&peer, machine(1, 2));
        assert!(!machines.have_restarted(&peer, &before), "it is away");
        machines.take(&peer, machine(2, 2));
        machines.take(&other, machine(1, 2));
        machines.take(&other, machine(1, 2));
        assert!(machines.0.is_empty());
    }

    #[test]
    fn nobody_knows_where_local_peers_and_users_are() {
        for peer in [PeerName::Local, PeerName::User(1)] {
            let mut machines = Machines::default();
            machines.add(&peer, machine(1, 2));
            assert!(!machines.have_restarted(&peer, &machine(1, 1)), "{peer}");
        }
        let peer = PeerName::Certificate("node.test".into());
        let nowhere = |boot| Machine {
            ip: None,
            ..machine(1, boot)
        };
        let mut machines = Machines::default();
        machines.add(&peer, nowhere(2));
        assert!(!machines.have_restarted(&peer, &nowhere(1)));
    }
}
