//! Runs one trial: the whole chain in the smallest size, with everything freed on every path.

use super::{Path, Support, Trial};
use crate::driver::{Access, AccessDesc, HandleType, HandleTypes, Location};
use crate::memory::CpuView;
use crate::vmm::PhysicalMemory;
use crate::{Driver, Error, Pool, Result, Stream};

/// Runs the trial. `ask` returns the answer to another one.
pub(super) fn attempt(
    driver: &Driver,
    trial: &Trial,
    ask: impl FnOnce(Trial) -> Support,
) -> Result<()> {
    check_gpu(driver, trial)?;
    let tried = match trial.path {
        Path::Vmm => vmm(driver, trial),
        Path::Pool => {
            if trial.handle_types.contains(HandleTypes::FABRIC) {
                // A fabric pool that the driver refuses to export corrupts the process's heap when it is
                // destroyed, so this tries one only if plain fabric memory works.
                let vmm = Trial {
                    path: Path::Vmm,
                    ..*trial
                };
                ask(vmm).require()?;
            }
            pool(driver, trial)
        }
    };
    tracing::debug!(%trial, ?tried, "tried");
    tried
}

/// Checks that the GPU exists, and that it reaches the memory if that is another GPU's.
fn check_gpu(driver: &Driver, trial: &Trial) -> Result<()> {
    let count = driver.device_count()?;
    let owner = match trial.location {
        Location::Device(owner) => owner,
        _ => trial.gpu,
    };
    for gpu in [trial.gpu, owner] {
        Error::expect_gpu(gpu, count)?;
    }
    if owner != trial.gpu && !driver.device_can_access_peer(trial.gpu, owner)? {
        return Err(Error::unsupported("peer access between these GPUs", None));
    }
    Ok(())
}

fn exports(handle_types: HandleTypes) -> impl Iterator<Item = HandleType> {
    [HandleType::PosixFd, HandleType::Fabric]
        .into_iter()
        .filter(move |&kind| handle_types.contains(kind.into()))
}

fn expect_read_write(who: Location, have: Access) -> Result<()> {
    match have {
        Access::ReadWrite => Ok(()),
        have => Err(Error::not_accessible(who, have, Access::ReadWrite)),
    }
}

/// Writes a word with the CPU and reads it back.
fn touch(cpu: &CpuView<'_>, location: Location) -> Result<()> {
    const WORD: u64 = 0x6567_6d65_6d21_0a0d;
    cpu.put(0, WORD)?;
    match cpu.get::<u64>(0)? {
        WORD => Ok(()),
        found => Err(Error::WrongBytes {
            by: location,
            offset: 0,
            expected: WORD,
            found,
        }),
    }
}

/// One word, which the driver rounds up to a granule.
const BYTES: u64 = 8;

fn vmm(driver: &Driver, trial: &Trial) -> Result<()> {
    let physical = PhysicalMemory::options(trial.location)
        .handle_types(trial.handle_types)
        .create(driver, BYTES)?;
    for kind in exports(trial.handle_types) {
        physical.export(kind)?;
    }
    let mut mapping = physical.map()?;
    let host = trial.location.is_host().then_some(trial.location);
    let accessors: Vec<Location> = host
        .into_iter()
        .chain([Location::Device(trial.gpu)])
        .collect();
    let access = accessors.iter().copied().map(AccessDesc::read_write);
    mapping.set_access(&access.collect::<Vec<_>>())?;
    for who in accessors {
        expect_read_write(who, mapping.access(who)?)?;
    }
    match host {
        Some(host) => touch(&mapping.cpu()?, host),
        None => Ok(()),
    }
}

fn pool(driver: &Driver, trial: &Trial) -> Result<()> {
    let gpu = Location::Device(trial.gpu);
    let pool = Pool::options(trial.location)
        .handle_types(trial.handle_types)
        .access_by([gpu])
        .create(driver)?;
    for kind in exports(trial.handle_types) {
        let calls = driver.pools(pool.api())?;
        // SAFETY: `pool` keeps its handle alive. On machines where a refused export corrupts the heap,
        // creating the pool has failed already.
        unsafe { calls.pool_export(pool.handle(), kind)? };
    }
    let stream = Stream::new(driver, trial.gpu)?;
    let buffer = pool.allocate(BYTES, &stream)?;
    expect_read_write(gpu, pool.access(gpu)?)?;
    if trial.location.is_host() {
        touch(&buffer.cpu()?, trial.location)?;
    }
    buffer.free_on(&stream)?;
    stream.synchronize()
}
