//! The process that has the other side of a ring.

/// The connection to the process that has the other side; none if no other process was ever given it.
#[derive(Debug, Default)]
pub(super) struct Peer {
    #[cfg(feature = "share")]
    link: std::sync::Mutex<Option<egmem_share::Link>>,
}
#[cfg(not(feature = "share"))]
impl Peer {
    pub(super) const fn is_there(&self) -> bool {
        false
    }
}

#[cfg(feature = "share")]
impl Peer {
    /// Returns whether a process has the other side.
    pub(super) fn is_there(&self) -> bool {
        let link = egmem_core::per_driver::lock(&self.link);
        link.as_ref().is_some_and(|link| !link.is_cut())
    }

    /// Sets the connection to the process that has the other side from now on.
    pub(super) fn set(&self, link: egmem_share::Link) {
        *egmem_core::per_driver::lock(&self.link) = Some(link);
    }
}
