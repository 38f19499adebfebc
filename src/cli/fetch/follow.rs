//! `egmem fetch --follow`, and the signals that end it.

use egmem::Driver;
use egmem::exchange::{Error, FetchOptions, Followed, LeaseState, Result};
use tokio::sync::watch;

use super::Fetch;
use crate::output::print;
use crate::signals::{Ends, Left, end_now};

impl Fetch {
    /// Follows the name until a signal arrives, or an error ends the follow.
    pub(super) async fn follow(&self, options: FetchOptions, driver: &Driver) -> Result<()> {
        if self.reads_to_stdout() {
            let why = "--follow copies memory more than once; give --read a file";
            return Err(Error::invalid("--read -", why));
        }
        let mut end = Ending::new()?;
        let mut follow = options.follow();
        let mut held = None;
        loop {
            let next = tokio::select! {
                () = end.requested() => break,
                next = follow.next() => next,
            };
            // Before the next memory is used, so that its exporter does not have to wait.
            if held.take().is_some() {
                print("  dropped\n")?;
            }
            match next? {
                Followed::Memory(memory) => {
                    let used = self.show_and_use(driver, &memory, None, &|| end.is_requested())?;
                    held = Some(memory);
                    if !used {
                        break;
                    }
                    print("  following\n")?;
                }
                Followed::Gone(why) => print(&format!("{}: gone: {why}\n", self.name))?,
                other => print(&format!("{}: {other:?}\n", self.name))?,
            }
        }
        match held {
            Some(memory) if memory.state() == LeaseState::Held => {
                memory.release().await?;
                Ok(print("  released\n")?)
            }
            _ => Ok(()),
        }
    }
}

/// A request to end, received by the runtime's other thread while this one copies. A second signal ends the
/// process at once: a copy to a pipe without a reader does not return.
struct Ending(watch::Receiver<bool>);

impl Ending {
    fn new() -> Result<Self> {
        let mut signals = Ends::new()?;
        let (request, requested) = watch::channel(false);
        tokio::spawn(async move {
            signals.next().await;
            request.send_replace(true);
            // Standard output may be full, and this thread must receive the next signal.
            let _ = std::thread::Builder::new().spawn(|| print("  ending\n"));
            let (name, kind) = signals.next().await;
            let name = format!("a second {name}");
            end_now(&name, kind.as_raw_value(), Left::Fetched)
        });
        Ok(Self(requested))
    }

    fn is_requested(&self) -> bool {
        *self.0.borrow()
    }

    async fn requested(&mut self) {
        if self.0.wait_for(|&requested| requested).await.is_err() {
            // The task ends only with the process.
            std::future::pending().await
        }
    }
}
