//! `egmem fetch --follow`, and the signals that end it.

use egmem::exchange::{FetchOptions, Followed, LeaseState};
use egmem::{Driver, Error, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Fetch;
use crate::output::print;

impl Fetch {
    /// Follows the name until a signal arrives, or an error ends the follow.
    pub(super) async fn follow(&self, options: FetchOptions, driver: &Driver) -> Result<()> {
        if self.reads_to_stdout() {
            let why = "--follow copies memory more than once; give --read a file";
            return Err(Error::invalid("--read -", why));
        }
        let mut signals = Signals::new()?;
        let mut follow = options.follow();
        let mut held = None;
        loop {
            let next = tokio::select! {
                () = signals.recv() => break,
                next = follow.next() => next,
            };
            // Before the next memory is used, so that its exporter does not have to wait.
            if held.take().is_some() {
                print("  dropped\n")?;
            }
            match next? {
                Followed::Memory(memory) => {
                    self.show_and_use(driver, &memory, None)?;
                    print("  following\n")?;
                    held = Some(memory);
                }
                Followed::Gone(why) => print(&format!("{}: gone: {why}\n", self.name))?,
                other => print(&format!("{}: {other:?}\n", self.name))?,
            }
        }
        match held {
            Some(memory) if memory.state() == LeaseState::Held => {
                memory.release().await?;
                print("  released\n")
            }
            _ => Ok(()),
        }
    }
}

/// The signals that end this program cleanly.
pub(super) struct Signals {
    end: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(super) fn new() -> Result<Self> {
        let on =
            |kind| signal(kind).map_err(|error| Error::system("cannot wait for signals", &error));
        Ok(Self {
            end: on(SignalKind::terminate())?,
            interrupt: on(SignalKind::interrupt())?,
        })
    }

    pub(super) async fn recv(&mut self) {
        tokio::select! {
            _ = self.end.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
