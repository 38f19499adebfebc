//! `--trace`: driver calls and allocations with their times, in the format of Chrome's traces.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use egmem::exchange::{Error, Result};
use tracing::level_filters::LevelFilter;
use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::Layer;

/// The trace, which is written before the program ends.
static TRACE: Mutex<Option<FlushGuard>> = Mutex::new(None);

/// The first error of writing: the layer's thread would panic.
static FAILED: Mutex<Option<io::Error>> = Mutex::new(None);

/// A file that takes everything; bytes that it could not write are lost.
struct Forgiving(BufWriter<File>);

impl Forgiving {
    fn note<T>(result: io::Result<T>, otherwise: T) -> io::Result<T> {
        Ok(result.unwrap_or_else(|error| {
            let mut failed = FAILED.lock().unwrap_or_else(PoisonError::into_inner);
            failed.get_or_insert(error);
            otherwise
        }))
    }
}

impl Write for Forgiving {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Self::note(self.0.write(bytes), bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Self::note(self.0.flush(), ())
    }
}

/// Returns the layer that writes to `path`, until [`finish`] is called.
pub fn layer<S>(path: &Path) -> Result<Box<dyn Layer<S> + Send + Sync>>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a> + Send + Sync,
{
    let file = create_private(path)
        .map_err(|error| Error::system(format!("cannot write {}", path.display()), &error))?;
    let (calls, guard) = ChromeLayerBuilder::new()
        .writer(Forgiving(BufWriter::new(file)))
        .include_args(true)
        .build();
    *TRACE.lock().unwrap_or_else(PoisonError::into_inner) = Some(guard);
    let targets = [
        ("egmem::driver", LevelFilter::TRACE),
        ("egmem::alloc", LevelFilter::TRACE),
    ];
    Ok(calls
        .with_filter(Targets::new().with_targets(targets))
        .boxed())
}

/// Writes the rest, and returns the first error.
pub fn finish() -> Option<io::Error> {
    drop(TRACE.lock().unwrap_or_else(PoisonError::into_inner).take());
    FAILED.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Creates a file that only its owner can read, or empties it; follows no link.
pub fn create_private(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(path)?;
    if file.metadata()?.is_file() {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}
