//! Signals of a service. A second signal to end it ends the process at once, in any state of its other
//! threads: a driver call cannot be interrupted.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use egmem::{Error, Result};
use rustix::process::{getpid, kill_process};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::log;
use crate::output::complain;

/// How long libraries' exit handlers and a reader of standard error may take.
const LAST: Duration = Duration::from_secs(1);

/// The work that a process leaves undone if it ends now.
#[derive(Clone, Copy, Debug)]
pub enum Left {
    /// It has not started completely.
    Start,
    /// It waits for holders.
    Drain,
    /// The driver has not answered yet.
    Driver,
    /// It copies fetched memory, or releases it.
    Fetched,
}

impl Left {
    fn text(self) -> &'static str {
        match self {
            Self::Start => "memory created so far was not given back",
            Self::Drain => {
                "holders were not waited for and memory was not given back; what they have mapped stays"
            }
            Self::Driver => "a driver call was not waited for",
            Self::Fetched => {
                "the fetched memory was not released; its lease ends at the server by itself"
            }
        }
    }
}

/// The signals of a service, handled in a thread of their own. Once this is dropped, the first signal ends the process.
#[derive(Debug)]
pub struct Signals(Arc<State>);

#[derive(Debug)]
struct State {
    end: CancellationToken,
    /// Requests that were not awaited count as one.
    reload: Notify,
    left: Mutex<Left>,
}

impl Signals {
    /// Installs the handlers: from now on no signal ends the process by itself.
    pub fn new() -> Result<Self> {
        let state = Arc::new(State {
            end: CancellationToken::new(),
            reload: Notify::new(),
            left: Mutex::new(Left::Start),
        });
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_io().build();
        let runtime = runtime.map_err(|error| Error::system("cannot start a runtime", &error))?;
        let entered = runtime.enter();
        let (ends, reload) = (Ends::new()?, listen(SignalKind::hangup())?);
        drop(entered);
        let watched = Arc::clone(&state);
        std::thread::Builder::new()
            .name("egmem-signals".into())
            .spawn(move || runtime.block_on(watch(ends, reload, watched)))
            .map_err(|error| Error::system("cannot start a thread", &error))?;
        Ok(Self(state))
    }

    /// Sets the work that a second signal leaves undone from now on.
    pub fn leaves(&self, left: Left) {
        *self.0.left.lock().unwrap_or_else(PoisonError::into_inner) = left;
    }

    /// Waits for SIGTERM or SIGINT.
    pub async fn end(&self) {
        self.0.end.cancelled().await;
    }

    /// Waits for the next SIGHUP.
    pub async fn reload(&self) {
        self.0.reload.notified().await;
    }
}

fn listen(kind: SignalKind) -> Result<Signal> {
    signal(kind).map_err(|error| Error::system("cannot wait for signals", &error))
}

/// SIGTERM and SIGINT.
pub struct Ends {
    terminate: Signal,
    interrupt: Signal,
}

impl Ends {
    /// Catches the signals from now on.
    pub fn new() -> Result<Self> {
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next signal; returns its name and kind.
    pub async fn next(&mut self) -> (&'static str, SignalKind) {
        tokio::select! {
            _ = self.terminate.recv() => ("SIGTERM", SignalKind::terminate()),
            _ = self.interrupt.recv() => ("SIGINT", SignalKind::interrupt()),
        }
    }
}

async fn watch(mut ends: Ends, mut reload: Signal, state: Arc<State>) {
    loop {
        let (name, kind) = tokio::select! {
            end = ends.next() => end,
            _ = reload.recv() => {
                state.reload.notify_one();
                continue;
            }
        };
        let is_second = state.end.is_cancelled();
        // If the signals are dropped, the process has failed and waits for the driver.
        if is_second || Arc::strong_count(&state) == 1 {
            let left = *state.left.lock().unwrap_or_else(PoisonError::into_inner);
            let which = if is_second { "a second " } else { "" };
            end_now(&format!("{which}{name}"), kind.as_raw_value(), left);
        }
        state.end.cancel();
    }
}

/// Ends the process with the status of this signal.
pub fn end_now(name: &str, number: i32, left: Left) -> ! {
    // Standard error may be full, and the driver library's exit handlers may wait for the very call that
    // hangs. If no thread can be started, the process takes that risk.
    let _ = std::thread::Builder::new().spawn(|| {
        std::thread::sleep(LAST);
        let _ = kill_process(getpid(), rustix::process::Signal::KILL);
    });
    let left = left.text();
    complain(&format!("error: ended at once by {name}: {left}\n"));
    log::flush(LAST / 2);
    std::process::exit(128 + number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_reload_that_comes_while_only_the_end_is_waited_for_is_kept() {
        let signals = Signals::new().unwrap();
        signals.0.reload.notify_one();
        signals.0.reload.notify_one();
        signals.0.end.cancel();
        signals.end().await;
        signals.reload().await;
        let again = tokio::time::timeout(Duration::ZERO, signals.reload()).await;
        again.expect_err("once");
    }
}
