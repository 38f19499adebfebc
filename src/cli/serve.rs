//! `egmem serve`: a node's allocator service, until a signal ends it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use egmem::exchange::{Error, Result};
use egmem::service::{Service, ServiceConfig};
use egmem::share::Error as ShareError;
use egmem::{Driver, Error as MemoryError, Explained};
use sd_notify::NotifyState;

use crate::common::Source;
use crate::connect::{first_of, folder_in};
use crate::log;
use crate::output::{ByteProgress, DONE, STILL_HELD, complain, print};
use crate::signals::{Left, Signals};

/// How often the progress of filling the reserves is looked at.
const TICK: Duration = Duration::from_millis(100);

/// The configuration's path below a folder for configurations.
const CONFIG: &str = "egmem/egmem.toml";

/// `egmem serve`
#[derive(Args, Debug)]
pub struct Serve {
    /// The configuration, in TOML: docs/service.md explains the keys. By default egmem/egmem.toml below
    /// XDG_CONFIG_HOME (or ~/.config), else /etc/egmem/egmem.toml
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only read and check the configuration
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    source: Source,
}

impl Serve {
    /// Serves until a signal.
    pub fn run(&self) -> Result<u8> {
        let path = self.config.clone().map_or_else(default_config, Ok)?;
        let config = read(&path)?;
        if self.check {
            print("configuration is valid\n")?;
            return Ok(DONE);
        }
        // Before anything is created, so that no signal is lost or kills the process.
        let signals = Signals::new()?;
        let driver = self.source.open()?;
        // For `egmem ps`.
        let _offer = egmem::ledger::offer()
            .inspect_err(|error| tracing::warn!(%error, "egmem ps will not see this service"));
        tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::system("cannot start a runtime", &error))?
            .block_on(self.serve(&path, config, &driver, signals))
    }

    /// Takes the signals: once this returns nothing listens, and the next signal ends the process.
    async fn serve(
        &self,
        path: &Path,
        config: ServiceConfig,
        driver: &Driver,
        signals: Signals,
    ) -> Result<u8> {
        let start = Service::start(config, driver);
        let service = tokio::select! {
            started = start => started.inspect_err(|_| signals.leaves(Left::Driver))?,
            () = signals.end() => return Ok(DONE),
        };
        if let Some(log) = log::queue() {
            service.count_lost_lines_of(log);
        }
        signals.leaves(Left::Drain);
        for address in service.addresses() {
            tell(&format!("listening at {address}\n"));
        }
        if let Some(address) = service.metrics_address() {
            tell(&format!("metrics at http://{address}/metrics\n"));
        }
        let mut ready = false;
        // Unless there is nothing to fill, or the log has it.
        let logged = tracing::enabled!(target: "egmem_service", tracing::Level::INFO);
        let shown = !logged && service.reserves().total > 0;
        let show = |filling: &mut ByteProgress| {
            let now = service.reserves();
            filling.show(now.done, Some(now.total));
        };
        let mut filling = shown.then(|| ByteProgress::new("filling the reserves"));
        // Also where the reserves are full before the first tick.
        filling.iter_mut().for_each(show);
        let mut ticks = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                _ = ticks.tick(), if filling.is_some() => {
                    filling.iter_mut().for_each(show);
                }
                () = service.ready(), if !ready => {
                    ready = true;
                    filling = None;
                    let simulated = if driver.is_simulated() { " (simulated)" } else { "" };
                    tell(&format!("ready{simulated}: instance {}\n", service.instance()));
                    notify(&[NotifyState::Ready, NotifyState::Status("ready")]);
                }
                () = signals.end() => {
                    drop(filling);
                    break;
                }
                () = signals.reload() => {
                    notify_reloading();
                    reload(path, &service);
                    if ready {
                        notify(&[NotifyState::Ready]);
                    }
                }
            }
        }
        drain(service, &signals).await
    }
}

/// Reads the configuration again.
fn reload(path: &Path, service: &Service) {
    match read(path).and_then(|config| service.reload(config)) {
        Ok(keys) if keys.is_empty() => tell("reloaded\n"),
        Ok(keys) => {
            let keys = keys.join(", ");
            tell(&format!("reloaded; only a restart changes {keys}\n"));
        }
        Err(error) => {
            let why = Explained(&error).advice();
            complain(&format!("error: reload failed: {why}\n"));
        }
    }
}

/// Prints a line of the running service. A standard output that takes nothing (a closed terminal, a full disk) must not
/// end it.
fn tell(line: &str) {
    if let Err(error) = print(line) {
        let line = line.trim_end();
        tracing::warn!(%error, line, "standard output lacks a line");
    }
}

async fn drain(service: Service, signals: &Signals) -> Result<u8> {
    let deadline = service.drain_deadline();
    notify(&[NotifyState::Stopping, NotifyState::Status("draining")]);
    tell(&format!("draining for up to {deadline:?}\n"));
    let drained = service.drain(deadline).await;
    signals.leaves(Left::Driver);
    if let Err(error) = &drained
        && let Some(MemoryError::StillHeld { .. }) = error.memory()
    {
        complain(&format!("error: {}\n", Explained(error).advice()));
        return Ok(STILL_HELD);
    }
    drained?;
    tell("drained\n");
    Ok(DONE)
}

/// Returns the default configuration: the user's own if it exists, otherwise the system's.
fn default_config() -> Result<PathBuf> {
    let home = || folder_in("HOME").map(|home| home.join(".config"));
    let own = folder_in("XDG_CONFIG_HOME").or_else(home);
    let folders = own.into_iter().chain([PathBuf::from("/etc")]);
    let why = match first_of(folders, CONFIG) {
        // sudo may keep another user's HOME, and that user's file must not configure a service of root.
        Ok(file) if !is_ours(&file) => format!("{} belongs to another user", file.display()),
        Ok(file) => return Ok(file),
        Err(tried) => format!("none is given, and there is none at {tried}"),
    };
    Err(Error::invalid_of("configuration", why, "--config FILE"))
}

/// Returns whether a file belongs to this user or to root. If that cannot be checked, reading it reports the
/// error.
fn is_ours(file: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;

    let this = rustix::process::geteuid().as_raw();
    file.metadata()
        .map_or(true, |data| [0, this].contains(&data.uid()))
}

fn read(path: &Path) -> Result<ServiceConfig> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::system(format!("cannot read {shown}"), &error))?;
    ServiceConfig::from_toml(&text).map_err(|mut error| {
        if let Error::Share(ShareError::Memory(MemoryError::InvalidArgument { why, .. })) =
            &mut error
        {
            *why = format!("{shown}: {why}");
        }
        error
    })
}

/// Notifies systemd, if NOTIFY_SOCKET is set.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

fn notify_reloading() {
    // systemd needs the time, for Type=notify-reload.
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!(%error, "no monotonic time"),
    }
}
