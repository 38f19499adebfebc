//! A group whose calls block.

use std::ops::Deref;
use std::time::Duration;

use super::{Background, outside_async};
use crate::Result;
use crate::driver::Driver;
use crate::group::{self, GatheredMemory, GroupOptions, GroupState};
use crate::share::Shared;

/// A group that this process has joined as one of its ranks. It has its own calls, which block, and
/// the methods of [`group::Group`] that do not wait.
///
/// Dropping it waits up to 5 s for the server to hear that the rank leaves. If this rank has started the
/// server, the drop does not wait, and the server [lingers](GroupOptions::linger) on a thread of its own.
#[derive(Debug)]
pub struct Group {
    /// `None` once the rank has left.
    group: Option<group::Group>,
    background: Background,
}

impl Group {
    /// Joins, as [`GroupOptions::join`] does.
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime;
    /// [`System`](crate::MemoryError::System) if no thread can be started.
    pub fn join(options: GroupOptions, driver: &Driver) -> group::Result<Self> {
        let background = Background::start("egmem-group", None)?;
        let group = background.wait(options.join(driver))??;
        Ok(Self {
            group: Some(group),
            background,
        })
    }

    /// Waits at most `patience` until the state has changed since the last call; otherwise `None`. See
    /// [`group::Group::changed`].
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn changed(&mut self, patience: Duration) -> Result<Option<GroupState>> {
        match &mut self.group {
            Some(group) => self.background.wait_for(patience, group.changed()),
            None => Ok(None),
        }
    }

    /// See [`group::Group::barrier`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime, which is
    /// no call.
    pub fn barrier(&self, within: Duration) -> group::Result<()> {
        self.background.wait(group::Group::barrier(self, within))?
    }

    /// See [`group::Group::gather`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime, which is
    /// no call.
    pub fn gather(&self, bytes: &[u8], within: Duration) -> group::Result<Vec<Vec<u8>>> {
        let gather = group::Group::gather(self, bytes, within);
        self.background.wait(gather)?
    }

    /// See [`group::Group::gather_memory`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime, which is
    /// no call.
    #[track_caller]
    pub fn gather_memory(
        &self,
        memory: Option<Shared>,
        within: Duration,
    ) -> group::Result<GatheredMemory> {
        let gather = group::Group::gather_memory(self, memory, within);
        self.background.wait(gather)?
    }

    /// See [`group::Group::leave`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime: the rank
    /// has then left like one that is dropped.
    pub fn leave(mut self, within: Duration) -> group::Result<Option<Shared>> {
        // Before the group is taken: `drop` knows how to linger.
        outside_async()?;
        match self.group.take() {
            Some(group) => self.background.wait(group.leave(within))?,
            None => Ok(None),
        }
    }
}

// Each `async fn(&self)` of the group needs a blocking call of the same name above, which comes first.
impl Deref for Group {
    type Target = group::Group;

    fn deref(&self) -> &Self::Target {
        match &self.group {
            Some(group) => group,
            // Only `leave`, which consumes it, and `drop` take it out.
            None => unreachable!("a group that was left"),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let Some(group) = self.group.take() else {
            return;
        };
        if let Some(linger) = group.lingers() {
            self.background.linger(linger);
        }
        // Leaving continues in the background.
        let _context = self.background.enter();
        drop(group);
    }
}
