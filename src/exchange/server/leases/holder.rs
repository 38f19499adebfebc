//! The holders of published memory.

use std::fmt;
use std::time::Instant;

use crate::PeerName;
use crate::server::process::HolderProcess;

/// The state of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HolderState {
    /// It holds the memory and is alive.
    Held,
    /// It has been asked to release the memory.
    Withdrawing,
    /// It fell silent, and its lease has ended: it may still have the memory mapped.
    Expired,
}

/// A holder of published memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The peer.
    pub peer: PeerName,
    /// The lease.
    pub lease: u64,
    /// When it got the lease.
    pub since: Instant,
    /// Its state.
    pub state: HolderState,
    /// Over a Unix socket: the process.
    pub process: Option<HolderProcess>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.process {
            Some(process) => write!(f, "{}, {process}", self.peer),
            None => self.peer.fmt(f),
        }
    }
}

/// Describes holders, for a message.
pub(in crate::server) fn describe(holders: &[Holder], more: usize) -> Vec<String> {
    const SHOWN: usize = 16;
    let now = Instant::now();
    let one = |holder: &Holder| {
        let seconds = now.saturating_duration_since(holder.since).as_secs_f32();
        match holder.state {
            HolderState::Expired => format!(
                "{holder} (for {seconds:.1} s; silent, its lease has ended: it may still have it mapped)"
            ),
            _ => format!("{holder} (for {seconds:.1} s)"),
        }
    };
    let mut list: Vec<_> = holders.iter().take(SHOWN).map(one).collect();
    let rest = holders.len().saturating_sub(SHOWN) + more;
    if rest > 0 {
        list.push(format!("{rest} more"));
    }
    list
}
