//! Tickets as futures.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use super::{Progress, Transfer, TransferFailed};
use crate::driver::Relaxed;
use crate::stream::over::{PAUSE, TRIES};
use crate::stream::poller::Poller;
use crate::{Error, Result};

/// Waits for the end of the work as [`wait`](Transfer::wait) does, without blocking the thread. Works in any
/// async runtime.
///
/// A thread of this crate, one for each driver, polls the driver while any task waits, and calls the tasks'
/// wakers. It ends 50 ms after the last of them was woken.
///
/// # Errors
/// As [`wait`](Transfer::wait); [`Error::System`] if the thread cannot be started. Then a ticket that was polled
/// by reference still owns its operands, and [`wait`](Transfer::wait) returns them.
///
/// # Cancel safety
/// Dropping the future drops the ticket: that waits for the end of the work and blocks the thread. A ticket
/// that is polled by reference, as `&mut ticket`, can be polled again later.
impl<T> Future for Transfer<T> {
    type Output = Result<T, TransferFailed<T>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        match this.advance(context) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(())) => Poll::Ready(this.outcome()),
            Err(error) => Poll::Ready(Err(TransferFailed::new(error, None))),
        }
    }
}

/// The operands are never pinned.
impl<T> Unpin for Transfer<T> {}

/// A ticket's state between polls.
#[derive(Default)]
pub(super) struct Polling {
    /// The poller where the task waits, once it does.
    poller: Option<Arc<Poller>>,
    /// The driver's first refusal, and the number of refusals.
    refused: Option<Error>,
    refusals: u32,
    /// When the last of them was counted.
    counted: Option<Instant>,
}

impl Polling {
    /// Interprets the driver's answer; `None` if it is not the last one.
    fn judge(&mut self, asked: Result<bool>) -> Option<Progress> {
        let ended = match asked {
            Ok(false) => return None,
            Ok(true) => Ok(()),
            Err(error @ Error::ContextLost { .. }) => Err(error),
            Err(error) => {
                // A task may be polled often for other reasons.
                let now = Instant::now();
                if self.counted.is_none_or(|last| now - last >= PAUSE) {
                    self.refusals += 1;
                    self.counted = Some(now);
                }
                let first = self.refused.get_or_insert(error).clone();
                return (self.refusals >= TRIES).then_some(Progress::Unknown(first));
            }
        };
        // As in a blocking wait: the refusal may be the work's error.
        Some(Progress::Over(self.refused.take().map_or(ended, Err)))
    }
}

impl<T> Transfer<T> {
    /// Queries the driver once, and registers the task if the work is not over.
    fn advance(&mut self, context: &Context<'_>) -> Result<Poll<()>> {
        let Progress::Marked(mark) = &self.progress else {
            return Ok(Poll::Ready(()));
        };
        let driver = self.stream.driver();
        // Before any lock.
        driver.expect_this_process("transfer")?;
        let asked = {
            let _relaxed = Relaxed::new(driver);
            mark.event.is_done()
        };
        if let Some(progress) = self.polling.judge(asked) {
            self.stop_polling();
            self.set(progress);
            return Ok(Poll::Ready(()));
        }
        let poller = &mut self.polling.poller;
        let poller = poller.get_or_insert_with(|| Poller::of(driver));
        poller.wake_after(mark, context.waker())?;
        Ok(Poll::Pending)
    }

    /// Stops waking tasks for this ticket.
    pub(super) fn stop_polling(&mut self) {
        if let Some(poller) = self.polling.poller.take()
            && let Progress::Marked(mark) = &self.progress
            && self.stream.driver().is_of_this_process()
        {
            poller.forget(mark);
        }
    }
}

#[cfg(test)]
impl<T> Transfer<T> {
    /// Waits like a polled ticket, at a poller of the test's own.
    pub(in crate::stream) fn register(
        &mut self,
        poller: &Arc<Poller>,
        waker: &std::task::Waker,
    ) -> bool {
        self.polling.poller = Some(Arc::clone(poller));
        match &self.progress {
            Progress::Marked(mark) => poller.wake_after(mark, waker).is_ok(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;
    use crate::driver::{Call, Code};
    use crate::{Buffer, Driver, Machine, Stream};

    #[test]
    fn a_thread_that_cannot_be_started_is_an_error_and_the_ticket_stays() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let memory = Buffer::near(&driver, 0, 4096).unwrap();
        let mut fill = stream.start_fill((memory, 0), 4096, 7).unwrap();
        // No address space has room for this.
        fill.polling.poller = Some(Arc::new(Poller::with_stack(1 << 62)));
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..2 {
            driver
                .sim()
                .unwrap()
                .fail(Call::EventQuery, 1, Code::NOT_READY);
            let Poll::Ready(Err(failed)) = Pin::new(&mut fill).poll(&mut context) else {
                panic!("nobody would wake the task");
            };
            assert!(matches!(*failed.error, Error::System { .. }), "{failed}");
            assert!(failed.operands.is_none());
        }
        assert_eq!(fill.wait().unwrap().get::<u8>(4095).unwrap(), 7);
    }
}
