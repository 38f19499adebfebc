//! Proves that the two ends see the same bytes.
//!
//! A successful import does not show that one end's writes reach the other: a fabric handle can be opened
//! although the link behind it is down. So each end writes a random word into unused padding, and the other
//! looks for it; with the CPU, and with a GPU if there is one.

use std::time::Duration;

use super::open;
use super::remote::RemoteBuffer;
use super::session::ClientSession;
use crate::driver::{Access, DevicePtr, Driver, Location, random};
use crate::memory::{AccessChecks, Memory, access_checks};
use crate::pinned::PinnedHost;
use crate::protocol::{Answer, Ask, Probe, Probed};
use crate::share::{Description, ImportedBuffer};
use crate::{Error, MemoryResult, Refusal, Result, Stream};

/// How often a word is tried: another client may write to the same place at the same time.
const ATTEMPTS: u32 = 4;

/// The result of a probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Proof {
    /// Words passed between the exporter and this end's CPU.
    pub cpu: bool,
    /// The same with this GPU, by its ordinal.
    pub gpu: Option<i32>,
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

    /// Returns whether anything was proved.
    pub const fn is_some(&self) -> bool {
        self.cpu || self.gpu.is_some()
    }
}

/// Proves fetched memory, if its exporter has room for that: by the CPU, and `by_gpu`.
pub(super) async fn prove(mut remote: RemoteBuffer, by_gpu: bool) -> Result<RemoteBuffer> {
    let Some(at) = remote.grant.probe else {
        remote.proof = Proof::none(&no_room(remote.description()));
        return Ok(remote);
    };
    let ways;
    (remote, ways) = with(remote, move |memory| self::ways(memory, by_gpu)).await?;
    let mut proof = Proof::default();
    for (by, access) in ways {
        let writes = access == Access::ReadWrite;
        let proved;
        (remote, proved) = one_way(remote, at, by, writes).await?;
        if !proved {
            remote.proof = Proof::none("the exporter does not answer probes");
            return Ok(remote);
        }
        match by {
            Location::Device(gpu) => proof.gpu = Some(gpu),
            _ => proof.cpu = true,
        }
        proof.both_ways |= writes;
    }
    if !proof.is_some() {
        proof = Proof::none(match by_gpu {
            true => "neither the CPU nor a GPU may read it here",
            false => "the CPU may not read it here, and no probe by a GPU was asked for",
        });
    }
    remote.proof = proof;
    Ok(remote)
}

/// Returns why an exporter gives no place for a probe, and a remedy for its owner.
fn no_room(memory: &Description) -> String {
    let (len, padded) = (memory.len, memory.padded());
    if memory.is_window() {
        "a window on larger memory has no room for a probe".into()
    } else if padded - len < 8 {
        let room = match padded - len {
            0 => format!("all {padded} bytes that are allocated are in use"),
            spare => format!(
                "{len} of the {padded} bytes that are allocated are in use, and a probe needs 8 bytes instead of {spare}"
            ),
        };
        format!(
            "the exporter has no room for a probe: {room}; unless its owner published it without probes, \
             allocating it with `BufferOptions::room_for_probes` makes room"
        )
    } else {
        format!(
            "the exporter gave no room for a probe: {} of {padded} bytes are not in use, so it does without \
             probes, or other importers have taken each place",
            padded - len
        )
    }
}

/// Returns the CPU and, if `by_gpu`, the first GPU that may read the memory, with their access.
fn ways(memory: &ImportedBuffer, by_gpu: bool) -> Vec<(Location, Access)> {
    let gpus = match by_gpu {
        true => memory.driver().device_count().unwrap_or(0),
        false => 0,
    };
    // A GPU's word comes from host memory: the driver would write it with the CPU.
    let most = match memory.is_read_only_for_cpu(0, memory.len()) {
        true => Access::Read,
        false => Access::ReadWrite,
    };
    let gpu = (0..gpus).map(Location::Device).find_map(|by| {
        let access = memory.access(by).ok()?.min(most);
        (access != Access::None).then_some((by, access))
    });
    let cpu = memory.cpu().ok().and_then(|_| {
        // Queries the node: for the host as a whole the driver returns the least of several answers.
        let access = match memory.location() {
            node @ Location::HostNuma(_) => memory.access(node),
            _ => memory.access(Location::HostNuma(0)),
        };
        access.ok()
    });
    let cpu = cpu.filter(|&access| access != Access::None);
    cpu.map(|access| (Location::Host, access))
        .into_iter()
        .chain(gpu)
        .collect()
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

/// Sends a word and receives one. Returns `false` if the exporter does not support probes.
async fn one_way(
    mut remote: RemoteBuffer,
    at: u64,
    by: Location,
    writes: bool,
) -> Result<(RemoteBuffer, bool)> {
    let session = remote.session().clone();
    let mut attempt = 1;
    loop {
        let wrote = writes.then(word).transpose()?;
        if let Some(word) = wrote {
            let written;
            (remote, written) = with(remote, move |memory| put(memory, at, by, word)).await?;
            written?;
        }
        let Some(probed) = ask(&session, remote.grant.lease.key.lease, wrote).await? else {
            return Ok((remote, false));
        };
        let read;
        (remote, read) = with(remote, move |memory| get(memory, at, by)).await?;
        let Some(detail) = mismatch(by, wrote, probed, read?) else {
            return Ok((remote, true));
        };
        if attempt == ATTEMPTS {
            return Err(Error::DataPlane {
                what: format!("'{}'", remote.name()),
                peer: session.peer(),
                detail,
            });
        }
        // Random, so that another writer does not collide again.
        let pause = random::<1>().map_or(1, |[byte]| 1 + u64::from(byte) / 16);
        tokio::time::sleep(Duration::from_millis(pause << attempt)).await;
        attempt += 1;
    }
}

/// Has the exporter probe a lease, after this end `wrote`. `None`: it does not support probes.
async fn ask(session: &ClientSession, lease: u64, wrote: Option<u64>) -> Result<Option<Probed>> {
    let ask = Ask::Probe(Probe { lease, wrote });
    let answered = match session.call(ask, Vec::new(), session.patience()).await {
        Err(error) if error.refusal() == Some(&Refusal::Unsupported) => return Ok(None),
        answered => answered?,
    };
    match answered.answer {
        Answer::Probed(probed) => Ok(Some(probed)),
        _ => Err(Error::protocol(
            session.peer(),
            "unexpected answer to a probe",
        )),
    }
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

fn word() -> Result<u64> {
    random()
        .map(u64::from_le_bytes)
        .map_err(|error| Error::system("reading random bytes", &error))
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
