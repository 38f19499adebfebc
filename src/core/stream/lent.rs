//! What other processes have of an event.

use std::io::PipeReader;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::driver::{Driver, EventHandle, IpcEventHandle};
use crate::per_driver::lock;
use crate::teardown::give_back_or_log;

/// What other processes have of an event.
#[derive(Debug)]
pub(super) enum Sharing {
    /// Nothing: they cannot open it.
    Private,
    /// The other ends of these pipes, one for each time that it was lent.
    Lent(Mutex<Vec<PipeReader>>),
    /// It is another process's, which keeps it while this end of its pipe is open. `None`: the caller sees to that.
    Imported(Option<OwnedFd>),
}

/// An event for another process.
#[derive(Debug)]
pub struct LentEvent {
    /// The event.
    pub handle: IpcEventHandle,
    /// An end of a pipe: the lender keeps its event until all duplicates of it are closed, in every process.
    pub tether: OwnedFd,
}

/// An event that was dropped while other processes held it. It owns the driver's event, and keeps the driver alive.
#[derive(Debug)]
struct Kept {
    driver: Driver,
    handle: EventHandle,
    holders: Vec<PipeReader>,
}

static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

impl Drop for Kept {
    fn drop(&mut self) {
        give_back_or_log(&self.driver, "an event", || {
            // SAFETY: owned by `self`. No process holds it; the driver keeps an event that work still waits for.
            unsafe { self.driver.event_destroy(self.handle) }
        });
    }
}

impl Sharing {
    /// Takes an event over from a value that is dropped if other processes hold it. Returns whether it does.
    pub(super) fn keep(&mut self, driver: &Driver, handle: EventHandle) -> bool {
        // In a forked child the list's lock may never be released.
        if !driver.is_of_this_process() {
            return false;
        }
        let Self::Lent(holders) = self else {
            return false;
        };
        let mut holders = std::mem::take(&mut *lock(holders));
        holders.retain(|holder| !is_closed(holder));
        let is_held = !holders.is_empty();
        if is_held {
            let driver = driver.clone();
            lock(&KEPT).push(Kept {
                driver,
                handle,
                holders,
            });
        }
        sweep();
        is_held
    }
}

/// Destroys events that no other process holds any more.
pub(super) fn sweep() {
    let returned: Vec<Kept> = lock(&KEPT)
        .extract_if(.., |kept| {
            kept.holders.retain(|holder| !is_closed(holder));
            kept.holders.is_empty() && kept.driver.is_of_this_process()
        })
        .collect();
    // Outside the lock, because a driver call takes time.
    drop(returned);
}

/// Returns whether all duplicates of a pipe's other end are closed. If the kernel does not tell, they are not.
pub(super) fn is_closed(pipe: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(pipe, PollFlags::empty())];
    // A reader sees HUP, a writer ERR. The call does not wait.
    let ready = poll(&mut fds, Some(&Timespec::default()));
    ready.is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}
