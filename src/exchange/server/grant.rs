//! A granted lease.

use std::sync::Arc;

use super::publication::Publication;
use crate::protocol::{Answer, Fds, Granted, Handles, Secret};
use crate::transport::HeldFd;

/// A granted lease, and how its memory reaches the client. The answer is built when it is written: until then
/// only the publication keeps its description, which may have many parts.
#[derive(Debug)]
pub(super) struct Grant {
    pub lease: u64,
    pub publication: Arc<Publication>,
    pub via: Via,
    pub probe: Option<u64>,
    pub no_fabric: Option<String>,
}

/// How the memory reaches the client.
#[derive(Debug)]
pub(super) enum Via {
    Fabric,
    Fds(Vec<HeldFd>),
    Ticket(Secret),
}

impl Grant {
    /// Returns the answer and its fds.
    pub fn into_answer(self) -> (Answer, Vec<HeldFd>) {
        let publication = &self.publication;
        let (handles, fds) = match self.via {
            Via::Fabric => {
                let handles = publication.fabric.get().cloned();
                (Handles::Fabric(handles.unwrap_or_default()), Vec::new())
            }
            Via::Fds(fds) => {
                let count = fds.len() as u32;
                (Handles::Fds(Fds { count }), fds)
            }
            Via::Ticket(ticket) => (Handles::Ticket(ticket), Vec::new()),
        };
        let granted = Granted {
            lease: self.lease,
            memory: publication.description.clone(),
            handles,
            probe: self.probe,
            no_fabric: self.no_fabric,
            owner: publication.owner.clone(),
        };
        (Answer::Granted(granted), fds)
    }
}
