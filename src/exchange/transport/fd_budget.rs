//! How a server divides its process's file descriptors (`RLIMIT_NOFILE`).

use rustix::process::{Resource, getrlimit};

use crate::Limits;

/// Shares of a server's fds, so that no use takes another's: half for peers' fds, a quarter for greeted
/// connections, an eighth for those that are not. The last eighth is for pidfds, at most a quarter of it, and
/// everything else: sockets, files, memory, the directory, and the rest of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FdBudget {
    /// Fds that are being sent to peers.
    pub held: usize,
    /// Greeted connections.
    pub greeted: usize,
    /// Greeted connections of one peer.
    pub greeted_per_peer: usize,
    /// Connections at all addresses that have not been greeted yet.
    pub handshakes: usize,
    /// Pidfds of processes whose leases are followed, at most 1024.
    pub processes: usize,
}

impl FdBudget {
    /// Returns the shares of the current limit.
    pub fn of_process() -> Self {
        let limit = getrlimit(Resource::Nofile).current;
        Self::of(limit.map_or(usize::MAX, |limit| limit.try_into().unwrap_or(usize::MAX)))
    }

    /// Lowers the limits on connections to these shares.
    pub fn cap(&self, limits: &mut Limits) {
        let caps = [
            (&mut limits.handshakes, self.handshakes, "handshakes"),
            (&mut limits.connections, self.greeted, "connections"),
            (
                &mut limits.connections_per_peer,
                self.greeted_per_peer,
                "connections_per_peer",
            ),
        ];
        for (limit, most, name) in caps {
            if *limit > most {
                tracing::info!(
                    target: "egmem_exchange",
                    limit = name, configured = *limit, lowered = most, "lowered for RLIMIT_NOFILE"
                );
                *limit = most;
            }
        }
    }

    fn of(limit: usize) -> Self {
        Self {
            held: limit / 2,
            greeted: (limit / 4).max(1),
            greeted_per_peer: (limit / 8).max(1),
            handshakes: (limit / 8).max(1),
            processes: (limit / 32).min(1024),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn under_the_usual_limit() {
        let room = FdBudget {
            held: 512,
            greeted: 256,
            greeted_per_peer: 128,
            handshakes: 128,
            processes: 32,
        };
        assert_eq!(FdBudget::of(1024), room);
    }

    #[test]
    fn limits_are_lowered_and_never_raised() {
        let mut limits = Limits::default();
        FdBudget::of(usize::MAX).cap(&mut limits);
        assert_eq!(limits, Limits::default());
        limits.connections = 7;
        FdBudget::of(1024).cap(&mut limits);
        let lowered = Limits {
            handshakes: 128,
            connections: 7,
            connections_per_peer: 128,
            ..Limits::default()
        };
        assert_eq!(limits, lowered);
    }

    proptest! {
        #[test]
        fn an_eighth_is_left_and_everyone_has_some(limit in 8..=usize::MAX) {
            let room = FdBudget::of(limit);
            let taken = room.held + room.greeted + room.handshakes;
            prop_assert!(limit - taken >= limit / 8);
            prop_assert!(room.handshakes > 0 && room.greeted_per_peer <= room.greeted);
        }
    }
}
