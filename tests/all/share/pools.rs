//! Pools between processes.

use std::os::unix::net::UnixStream;
use std::path::Path;

use egmem::driver::{Access, HandleTypes, Location, PointerAttribute};
use egmem::pool::{ImportedPool, ImportedPoolBuffer};
use egmem::proof::{Prover, check_pattern, write_pattern};
use egmem::share::{self, Channel, LentPoolBuffer, Peers};
use egmem::{Driver, Error, Memory, Pool, Stream};

use super::process::{Place, Process, accept, connect, say, wait_for_go};
use super::{IMPATIENCE, MIB, PATIENCE, buffer, last_gpu, node, nothing_held, open};

fn pool(driver: &Driver) -> (Pool, Stream) {
    let pool = Pool::options(node(driver))
        .handle_types(HandleTypes::POSIX_FD)
        .create(driver)
        .unwrap();
    (pool, Stream::new(driver, 0).unwrap())
}

#[test]
fn pool_memory_is_freed_there_first() {
    let driver = open();
    let place = Place::new();
    let listener = place.listen();
    let (pool, stream) = pool(&driver);
    let prover = Prover::new(&driver, 0).unwrap();
    let lend = || LentPoolBuffer::from(pool.allocate(3 * MIB + 4096, &stream).unwrap());
    let (mut first, mut second) = (lend(), lend());
    prover.write(&*first, 21).unwrap();
    prover.write(&*second, 31).unwrap();

    let mut peer = Process::start("pool", &place.socket);
    let mut channel = accept(&listener);
    channel.send_pool(&pool).unwrap();
    channel.send_pool_buffer(&mut first).unwrap();
    channel.send_pool_buffer(&mut second).unwrap();
    channel.send_pool_buffer(&mut first).unwrap();
    peer.says("gpu wrote 22");
    check_pattern(&first.cpu().unwrap(), 22).unwrap();
    prover.check_rewrite(&*first, 22, 23).unwrap();
    assert_eq!(first.holders().len(), 1);
    let error = first.wait(IMPATIENCE).unwrap_err();
    assert!(matches!(error, Error::StillHeld { .. }), "{error}");
    let mut first = first.into_buffer().expect_err("the peer has it");
    peer.go();
    // It frees the first and goes on with the second.
    first.wait(PATIENCE).unwrap();
    let first = first.into_buffer().expect("nobody has it any more");
    check_pattern(&first.cpu().unwrap(), 24).unwrap();
    first.free_on(&stream).unwrap();

    // Dropped while the peer has it, it is kept back, until the peer is gone: killed, not asked.
    assert_eq!(LentPoolBuffer::sweep(), 0);
    drop(second);
    assert_eq!(LentPoolBuffer::sweep(), 1);
    stream.synchronize().unwrap();
    assert_eq!(pool.stats().unwrap().used, 3 * MIB + 4096);
    peer.kill();
    assert_eq!(LentPoolBuffer::sweep(), 0);
    stream.synchronize().unwrap();
    assert_eq!(pool.stats().unwrap().used, 0);
    drop((pool, stream, prover));
    nothing_held(&driver);
}

pub fn pool_peer(driver: &Driver, path: &Path) {
    let mut channel = connect(path);
    let gpu = last_gpu(driver);
    let stream = Stream::new(driver, gpu).unwrap();
    let prover = Prover::new(driver, gpu).unwrap();
    let pool: ImportedPool = channel.receive_pool(driver).unwrap();
    assert_eq!(pool.location(), node(driver).into());
    let mut receive =
        || -> ImportedPoolBuffer { channel.receive_pool_buffer(&pool, &stream).unwrap() };
    let (first, second) = (receive(), receive());
    assert_eq!(first.len(), 3 * MIB + 4096);
    // Twice the same must not make two owners of one address.
    let again = channel.receive_pool_buffer(&pool, &stream);
    say(&format!("seen: the same pool memory again: {again:?}"));
    if let Ok(again) = again {
        assert_ne!(again.device_ptr(), first.device_ptr());
        again.free().unwrap();
    }
    let start = first.device_ptr();
    let attribute = |attribute| driver.pointer_attribute(start, attribute);
    say(&format!(
        "seen: imported pool memory at {start:?}: access of the host {:?}, of GPU {gpu} {:?}; address range \
         {:?}; memory type {:?}, host pointer {:x?}, range size {:?}, handle types {:?}",
        pool.access(node(driver)),
        pool.access(Location::Device(gpu)),
        driver.mem_address_range(start),
        attribute(PointerAttribute::MemoryType),
        attribute(PointerAttribute::HostPointer),
        attribute(PointerAttribute::RangeSize),
        attribute(PointerAttribute::AllowedHandleTypes),
    ));
    check_pattern(&first.cpu().unwrap(), 21).unwrap();
    prover.check_rewrite(&first, 21, 22).unwrap();
    say("gpu wrote 22");
    wait_for_go();
    prover.check_rewrite(&first, 23, 0).unwrap();
    write_pattern(&first.cpu().unwrap(), 24).unwrap();
    first.free().unwrap();
    // Until it is killed.
    prover.check_rewrite(&second, 31, 32).unwrap();
    wait_for_go();
}

#[test]
fn pool_memory_that_cannot_be_is_refused() {
    let driver = open();
    let (pool, stream) = pool(&driver);
    let channels = || {
        let (a, b) = UnixStream::pair().unwrap();
        [a, b].map(|end| Channel::new(end, &Peers::same_user()).unwrap())
    };
    let [mut a, mut b] = channels();
    let mut lent = LentPoolBuffer::from(pool.allocate(MIB, &stream).unwrap());
    assert!(
        a.send_pool_buffer(&mut lent).is_err(),
        "the pool was not sent"
    );
    assert!(lent.holders().is_empty());
    // Memory is not a pool.
    let shared = buffer(&driver);
    a.send(&shared, Access::Read).unwrap();
    let error = b.receive_pool(&driver).unwrap_err();
    assert!(matches!(error, share::Error::Protocol { .. }), "{error}");
    // Nor is a pool memory.
    let [mut a, mut b] = channels();
    a.send_pool(&pool).unwrap();
    let error = b.receive().unwrap_err();
    assert!(matches!(error, share::Error::Protocol { .. }), "{error}");
    // An unshareable pool stays.
    let own = Pool::options(node(&driver)).create(&driver).unwrap();
    let [mut a, mut b] = channels();
    let error = a.send_pool(&own).unwrap_err();
    assert!(
        matches!(error, share::Error::Memory(Error::InvalidArgument { .. })),
        "{error}"
    );
    // An allocation that never arrives is not held for ever.
    a.send_pool(&pool).unwrap();
    b.receive_pool(&driver).unwrap();
    a.send_pool_buffer(&mut lent).unwrap();
    assert_eq!(lent.holders().len(), 1);
    drop(b);
    lent.wait(PATIENCE).unwrap();
    drop((lent, shared, own, pool, stream));
    nothing_held(&driver);
}
