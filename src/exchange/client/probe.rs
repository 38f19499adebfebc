//! Proves that the two ends of a fabric handle see the same bytes.
//!
//! A successful import does not show that one end's writes reach the other: a fabric handle can be opened
//! although the link behind it is down. So each end writes a random word into unused padding, and the other
//! looks for it; this end by a GPU if there is one that may read the memory, because the CPU may have another way.

use super::buffer::RemoteBuffer;
use super::open;
use crate::driver::{Access, DevicePtr, Driver, Location, random};
use crate::memory::{AccessChecks, Memory, access_checks};
use crate::pinned::PinnedHost;
use crate::protocol::{Answer, Ask, Probe, Probed};
use crate::share::ImportedBuffer;
use crate::{Error, MemoryResult, Refusal, Result, Stream};

/// The result of a probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Proof {
    /// The processor of this end that words of the exporter reach: a GPU, or the CPU ([`Location::Host`]) where no GPU
    /// may read the memory. `None` if nothing was proved.
    pub by: Option<Location>,
    /// Whether this end wrote too, and the exporter found it; otherwise it may only read.
    pub both_ways: bool,
    /// Why nothing was proved, in that case.
    pub why_not: Option<String>,
}

impl Proof {
    pub(super) fn none(why_not: &str) -> Self {
        Self {
            why_not: Some(why_not.into()),
            ..Self::default()
        }
    }
}

/// Proves memory that was imported by fabric handle, if its exporter has given a place for that.
pub(super) async fn prove(mut remote: RemoteBuffer) -> Result<RemoteBuffer> {
    let Some(at) = remote.grant.probe else {
        remote.proof = Proof::none(&no_place(remote.description().is_window()));
        return Ok(remote);
    };
    let begun;
    (remote, begun) = with(remote, move |memory| begin(memory, at)).await?;
    let Some((by, wrote)) = begun? else {
        remote.proof = Proof::none("neither a GPU nor the CPU may read it here");
        return Ok(remote);
    };
    let session = remote.session().clone();
    let lease = remote.grant.lease.key.lease;
    let ask = Ask::Probe(Probe { lease, wrote });
    let answered = session.call(ask, Vec::new(), session.patience()).await;
    let probed = match answered.map(|answered| answered.answer) {
        Ok(Answer::Probed(probed)) => probed,
        Ok(_) => {
            let why = "unexpected answer to a probe";
            return Err(Error::protocol(session.peer(), why));
        }
        Err(error) if error.refusal() == Some(&Refusal::Unsupported) => {
            remote.proof = Proof::none("the exporter does not answer probes");
            return Ok(remote);
        }
        Err(error) => return Err(error),
    };
    let read;
    (remote, read) = with(remote, move |memory| get(memory, at, by)).await?;
    if let Some(detail) = mismatch(by, wrote, probed, read?) {
        return Err(Error::DataPlane {
            what: format!("'{}'", remote.name()),
            peer: session.peer(),
            detail,
        });
    }
    remote.proof = Proof {
        by: Some(by),
        both_ways: wrote.is_some(),
        why_not: None,
    };
    Ok(remote)
}

/// Returns why an exporter gives no place for a probe, and a remedy for its owner.
fn no_place(is_window: bool) -> String {
    if is_window {
        return "a window on larger memory has no place for a probe".into();
    }
    "the exporter gave no place for a probe: all of the memory is in use \
     (`BufferOptions::room_for_probes` makes room), or its owner published it without probes"
        .into()
}

/// Chooses the processor, and writes a word with it if it may write. Returns both.
fn begin(memory: &ImportedBuffer, at: u64) -> Result<Option<(Location, Option<u64>)>> {
    let Some((by, access)) = processor(memory) else {
        return Ok(None);
    };
    if access != Access::ReadWrite {
        return Ok(Some((by, None)));
    }
    let word = random().map_err(|error| Error::system("reading random bytes", &error))?;
    let word = u64::from_le_bytes(word);
    put(memory, at, by, word)?;
    Ok(Some((by, Some(word))))
}

/// Returns the first GPU that may read the memory, otherwise the CPU, with its access.
fn processor(memory: &ImportedBuffer) -> Option<(Location, Access)> {
    // A GPU's word comes from host memory: the driver would write it with the CPU.
    let most = if memory.is_read_only_for_cpu(0, memory.len()) {
        Access::Read
    } else {
        Access::ReadWrite
    };
    let gpus = 0..memory.driver().device_count().unwrap_or(0);
    let gpu = gpus.map(Location::Device).find_map(|by| {
        let access = memory.access(by).ok()?.min(most);
        (access != Access::None).then_some((by, access))
    });
    gpu.or_else(|| {
        memory.cpu().ok()?;
        // Queries the node: for the host as a whole the driver returns the least of several answers.
        let node = match memory.location() {
            node @ Location::HostNuma(_) => node,
            _ => Location::HostNuma(0),
        };
        let access = memory.access(node).ok()?;
        (access != Access::None).then_some((Location::Host, access))
    })
}

/// Does driver calls with the memory on a separate thread.
async fn with<T: Send + 'static>(
    remote: RemoteBuffer,
    work: impl FnOnce(&ImportedBuffer) -> T + Send + 'static,
) -> Result<(RemoteBuffer, T)> {
    let work = move || {
        let done = work(&remote.memory);
        (remote, done)
    };
    open::elsewhere(work).await
}

/// Describes the fault, if there is one. Shows no word, because random words mean nothing.
fn mismatch(by: Location, wrote: Option<u64>, probed: Probed, read: u64) -> Option<String> {
    let there = wrote.is_none_or(|wrote| wrote == probed.found);
    let here = read == probed.wrote;
    let fault = match (there, here) {
        (true, true) => return None,
        (false, true) => format!("a word that {by} writes here does not arrive there"),
        (true, false) => format!("a word written there does not reach {by} here"),
        (false, false) => format!("words of {by} and of the exporter do not reach the other"),
    };
    Some(fault)
}

fn put(memory: &ImportedBuffer, at: u64, by: Location, word: u64) -> MemoryResult<()> {
    match by {
        Location::Device(gpu) => {
            let own = PinnedHost::new(memory.driver(), gpu, 8)?;
            own.cpu().put(0, word)?;
            Stream::new(memory.driver(), gpu)?.copy(&Padded(memory), at, &own, 0, 8)
        }
        _ => memory.put_word(at, word),
    }
}

fn get(memory: &ImportedBuffer, at: u64, by: Location) -> MemoryResult<u64> {
    match by {
        Location::Device(gpu) => {
            let own = PinnedHost::new(memory.driver(), gpu, 8)?;
            own.cpu().put(0, 0_u64)?;
            Stream::new(memory.driver(), gpu)?.copy(&own, 0, &Padded(memory), at, 8)?;
            own.cpu().get(0)
        }
        _ => memory.word(at),
    }
}

/// Imported memory with its padding.
struct Padded<'a>(&'a ImportedBuffer);

// The mapping that it borrows lives as long, and has the padding too.
access_checks!(unsafe impl for Padded<'_>, |this| *this.0);

impl Memory for Padded<'_> {
    fn driver(&self) -> &Driver {
        self.0.driver()
    }
    fn device_ptr(&self) -> DevicePtr {
        self.0.device_ptr()
    }
    fn len(&self) -> u64 {
        self.0.description().padded()
    }
    fn location(&self) -> Location {
        self.0.location()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_does_not_arrive_is_told_by_direction() {
        let probed = |found, wrote| Probed { found, wrote };
        assert_eq!(mismatch(Location::Host, Some(1), probed(1, 2), 2), None);
        assert_eq!(mismatch(Location::Host, None, probed(7, 2), 2), None);
        for (wrote, probed, read, word) in [
            (Some(1), probed(9, 2), 2, "does not arrive there"),
            (Some(1), probed(1, 2), 9, "GPU 3 here"),
            (Some(1), probed(9, 2), 9, "the other"),
            (None, probed(0, 2), 9, "GPU 3 here"),
        ] {
            let detail = mismatch(Location::Device(3), wrote, probed, read).unwrap();
            assert!(detail.contains(word), "{detail}");
        }
    }
}
