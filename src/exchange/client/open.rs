//! Opens the handles of an answer, and runs blocking work.

use std::os::fd::OwnedFd;

use crate::driver::{FabricHandle, ShareableHandle};
use crate::protocol::{Fds, Handles, Secret};
use crate::share::PartHandles;
use crate::{Error, Result};

fn fds_of(fds: Vec<OwnedFd>) -> Vec<ShareableHandle> {
    fds.into_iter().map(ShareableHandle::PosixFd).collect()
}

/// Returns the handles of so many parts that an answer with `came` names, if they are complete or come through a queue.
pub(super) fn opened(handles: &Handles, came: Vec<OwnedFd>, parts: usize) -> Option<PartHandles> {
    match handles {
        Handles::Fabric(secrets) => {
            let handles = fabric(secrets).filter(|handles| handles.len() == parts);
            handles.map(PartHandles::from)
        }
        Handles::Fds(fds) => came_with(*fds, came, parts),
    }
}

/// Returns the handles of so many parts, of fds that came with a message.
fn came_with(fds: Fds, mut came: Vec<OwnedFd>, parts: usize) -> Option<PartHandles> {
    if fds.count as usize != came.len() {
        return None;
    }
    match fds.queue {
        false => (came.len() == parts).then(|| fds_of(came).into()),
        true if came.len() != 1 => None,
        true => came.pop().map(PartHandles::from_queue),
    }
}

/// Returns fabric handles, unless one has another length.
pub(crate) fn fabric(secrets: &[Secret]) -> Option<Vec<ShareableHandle>> {
    let handle = |secret: &Secret| {
        let bytes = secret.expose().try_into().ok()?;
        Some(ShareableHandle::Fabric(FabricHandle::from_bytes(bytes)))
    };
    secrets.iter().map(handle).collect()
}

/// Runs blocking work on a separate thread. If this is dropped, the work continues, and its result is dropped
/// on that thread.
pub(crate) async fn elsewhere<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(error) => Err(Error::failed("work on another thread", error.to_string())),
        },
    }
}

/// Runs blocking work as [`elsewhere`] does, and returns a panic there as an error. `what` is the operation.
pub(super) async fn attempt<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Error::failed(what, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_on_another_thread_does_not_unwind_here() {
        let error = attempt("mapping", || panic!("in a call")).await;
        let error = error.map(|(): ()| ()).unwrap_err().to_string();
        assert!(
            error.contains("mapping") && error.contains("in a call"),
            "{error}"
        );
    }
}
