//! Streams.
//!
//! Work runs at the latest moment that CUDA allows: when a thread waits for it or queries it. A program that
//! forgets to wait always sees stale bytes here; on a GPU it sees them only sometimes.

use std::sync::atomic::{AtomicU64, Ordering};

use super::access::{self, Engine, Piece};
use super::fault::{Answer, fail};
use super::state::{Point, State, Stream, StreamKey, Work};
use crate::*;

/// The most work that may wait in a stream: a program that never waits must not fill the memory.
const LONGEST: usize = 1 << 16;

/// The most destroyed streams with work: nobody need ever wait for it.
const MOST_GONE: usize = 1000;

thread_local! {
    /// The number of the stream that `CU_STREAM_PER_THREAD` is in this thread.
    static OWN: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(StreamHandle::PER_THREAD);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

/// Returns the stream that a handle is in this thread: `CU_STREAM_LEGACY` is the device's default stream.
pub(super) fn key_of(handle: StreamHandle) -> StreamKey {
    let raw = match handle.raw {
        1 => 0,
        StreamHandle::PER_THREAD => OWN.with(|own| *own),
        raw => raw,
    };
    (handle.device, raw)
}

/// The first version with batches of copies.
const BATCHES: CudaVersion = CudaVersion(12080);

impl State {
    pub fn stream_create(&mut self, device: i32) -> Answer<StreamHandle> {
        self.context(device)?;
        let raw = self.number();
        self.streams.insert((device, raw), Stream::default());
        Ok(StreamHandle { device, raw })
    }

    /// Checks that a stream and its device's context live.
    pub fn stream(&mut self, handle: StreamHandle) -> Answer<StreamKey> {
        self.context(handle.device)?;
        self.existing(handle)
    }

    fn existing(&mut self, handle: StreamHandle) -> Answer<StreamKey> {
        let key = key_of(handle);
        if handle.is_default() {
            self.streams.get_or_default(key);
        }
        match self.streams.get(key) {
            Some(stream) if !stream.destroyed => Ok(key),
            _ => fail(Code::INVALID_HANDLE),
        }
    }

    pub fn stream_destroy(&mut self, handle: StreamHandle) -> Answer {
        self.device(handle.device)?;
        if handle.is_default() {
            return fail(Code::INVALID_HANDLE);
        }
        let key = self.existing(handle)?;
        if let Some(stream) = self.streams.get_mut(key) {
            stream.destroyed = true;
        }
        self.bury(key);
        if self.streams.values().filter(|it| it.destroyed).count() > MOST_GONE {
            self.synchronize(|_, it| it.destroyed);
        }
        self.context(handle.device).map(drop)
    }

    fn bury(&mut self, key: StreamKey) {
        let done = |stream: &Stream| stream.destroyed && stream.queue.is_empty();
        if self.streams.get(key).is_some_and(done) {
            self.streams.remove(key);
        }
    }

    pub fn stream_synchronize(&mut self, handle: StreamHandle) -> Answer {
        let key = self.stream(handle)?;
        self.expect_not_captured(key, Code::STREAM_CAPTURE_UNSUPPORTED)?;
        self.run_all(key);
        self.release_pools();
        self.context(handle.device).map(drop)
    }

    /// Runs all work of some streams.
    fn synchronize(&mut self, which: impl Fn(StreamKey, &Stream) -> bool) {
        let streams = self.streams.entries().iter();
        let streams = streams.filter(|(key, it)| which(*key, it));
        let keys: Vec<StreamKey> = streams.map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| self.run_all(key));
        self.release_pools();
    }

    /// Runs all work of a device.
    pub fn synchronize_device(&mut self, device: i32) {
        self.synchronize(|key, _| key.0 == device);
    }

    /// Runs all work of all devices.
    pub fn synchronize_all(&mut self) {
        self.synchronize(|_, _| true);
    }

    pub fn run_all(&mut self, key: StreamKey) {
        if let Some(stream) = self.streams.get(key) {
            self.run((key, stream.submitted));
        }
    }

    /// Runs a stream's work up to a point, and the work that it waits for.
    pub fn run(&mut self, point: Point) {
        let mut pending = vec![point];
        while let Some(&(key, upto)) = pending.last() {
            let stream = self.streams.get(key).filter(|s| s.completed() < upto);
            match stream.and_then(|stream| stream.queue.front()) {
                None => {
                    pending.pop();
                    self.bury(key);
                }
                Some(&Work::Wait(point)) if !self.is_complete(point) => pending.push(point),
                Some(_) => {
                    let executed = self.next(key).map(|(at, work)| self.execute(at, work));
                    if let Some(Err(code)) = executed {
                        self.lose(key.0, code);
                    }
                }
            }
        }
    }

    /// Takes the next piece of work out of a stream, with its position.
    fn next(&mut self, key: StreamKey) -> Option<(Point, Work)> {
        let stream = self.streams.get_mut(key)?;
        let work = stream.queue.pop_front()?;
        Some(((key, stream.completed()), work))
    }

    pub fn is_complete(&self, (key, seq): Point) -> bool {
        self.streams.get(key).is_none_or(|s| s.completed() >= seq)
    }

    /// Returns whether work submitted to a stream now is ordered after a point, by stream or by event.
    pub fn is_ordered(&self, key: StreamKey, point: Point) -> bool {
        let waited = |stream: &Stream| stream.waited.get(point.0).is_some_and(|&s| s >= point.1);
        self.streams.get(key).is_some_and(waited)
    }

    /// Submits work.
    pub fn submit(&mut self, key: StreamKey, work: Work) -> Point {
        let stream = self.streams.get_or_default(key);
        stream.queue.push_back(work);
        stream.submitted += 1;
        let point = (key, stream.submitted);
        if self.eager {
            self.run(point);
        } else if stream.queue.len() > LONGEST {
            self.run((key, point.1 - LONGEST as u64 / 2));
        }
        point
    }

    /// Returns the position of the next piece of work.
    pub fn next_point(&self, key: StreamKey) -> Point {
        (key, self.streams.get(key).map_or(0, |s| s.submitted) + 1)
    }

    fn execute(&mut self, point: Point, work: Work) -> Result<(), Code> {
        let device = point.0.0;
        match work {
            Work::Record | Work::Wait(_) => Ok(()),
            Work::Free { pool } => {
                self.free_reached(pool, point);
                Ok(())
            }
            Work::Copy { dst, src, bytes } => {
                let (to, from) = self.ends(device, dst, src, bytes)?;
                // SAFETY: the caller that submitted the copy guarantees the range.
                unsafe { access::copy(to, from) }
            }
            Work::Fill { dst, value, bytes } => {
                let pieces = self.pieces(device, Engine::Copy, dst, bytes, Access::ReadWrite)?;
                pieces.into_iter().try_for_each(|piece| {
                    // SAFETY: the caller that submitted the memset guarantees the range.
                    unsafe { piece.fill(value) }
                })
            }
            Work::Kernel { kernel, args } => kernel(self, device, args),
        }
    }

    /// Returns the pieces of a copy's destination and source, or the GPU's fault.
    fn ends(
        &self,
        device: i32,
        dst: u64,
        src: u64,
        bytes: u64,
    ) -> Result<(Vec<Piece>, Vec<Piece>), Code> {
        let from = self.pieces(device, Engine::Copy, src, bytes, Access::Read)?;
        let to = self.pieces(device, Engine::Copy, dst, bytes, Access::ReadWrite)?;
        Ok((to, from))
    }

    /// Handles a fault: the device's context is lost with all pending work.
    fn lose(&mut self, device: i32, code: Code) {
        if let Some(lost) = self.lost.get_mut(device as usize) {
            lost.get_or_insert(code);
        }
        let keys = self.streams.keys();
        for key in keys.filter(|key| key.0 == device).collect::<Vec<_>>() {
            while let Some((point, work)) = self.next(key) {
                if let Work::Free { pool } = work {
                    self.free_reached(pool, point);
                }
            }
            self.bury(key);
        }
    }

    pub fn stream_query(&mut self, handle: StreamHandle) -> Answer {
        // A query runs the work; otherwise a caller that polls would never see completion.
        self.stream_synchronize(handle)
    }

    pub fn ctx_synchronize(&mut self, device: i32) -> Answer {
        self.context(device)?;
        // In every mode of the thread.
        self.invalidate(Code::STREAM_CAPTURE_UNSUPPORTED, |key, _| key.0 == device)?;
        self.synchronize_device(device);
        self.context(device).map(drop)
    }

    pub fn memcpy_async(
        &mut self,
        DevicePtr(dst): DevicePtr,
        DevicePtr(src): DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Answer {
        let key = self.stream(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let from = self.check_submitted(stream.device, src, bytes)?;
        let to = self.check_submitted(stream.device, dst, bytes)?;
        // Measured: SIGSEGV, as the driver copies between host memories with the CPU where that may read both.
        let [to_cpu, of_cpu] = [dst, src].map(|at| self.cpu_access(at));
        if to_cpu == Some(Access::Read) && of_cpu >= Some(Access::Read) {
            return fail(Code::UNKNOWN);
        }
        if !from && !to {
            self.submit(key, Work::Copy { dst, src, bytes });
            return Ok(());
        }
        // Copies of pageable memory finish before the call returns, after the stream's earlier work.
        self.run_all(key);
        self.context(stream.device)?;
        match self.ends(stream.device, dst, src, bytes) {
            // SAFETY: the caller guarantees the range.
            Ok((to, from)) => Ok(unsafe { access::copy(to, from) }.or(Err(Code::INVALID_VALUE))?),
            Err(code) => {
                self.lose(stream.device, code);
                self.context(stream.device).map(drop)
            }
        }
    }

    /// Returns the CPU's access to mapped memory of the host.
    fn cpu_access(&self, at: u64) -> Option<Access> {
        let (_, region) = self.region(at)?;
        let mapping = region.mapping().filter(|_| self.is_on_host(at))?;
        Some(mapping.host)
    }

    /// Copies one after the other, the last first: their order is not promised. Nothing is submitted if the batch is refused.
    pub fn memcpy_batch_async(&mut self, copies: &[MemcpyDesc], stream: StreamHandle) -> Answer {
        if self.machine.driver_version < BATCHES {
            return fail(Code::NOT_SUPPORTED);
        }
        self.stream(stream)?;
        let is_empty = copies.is_empty() || copies.iter().any(|copy| copy.bytes == 0);
        if is_empty || key_of(stream).1 == 0 {
            return fail(Code::INVALID_VALUE);
        }
        for copy in copies {
            for at in [copy.src, copy.dst] {
                self.check_submitted(stream.device, at.0, copy.bytes)?;
            }
        }
        let mut copies = copies.iter().rev();
        copies.try_for_each(|copy| self.memcpy_async(copy.dst, copy.src, copy.bytes, stream))
    }

    pub fn memset_d8_async(
        &mut self,
        DevicePtr(dst): DevicePtr,
        value: u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Answer {
        let key = self.stream(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        // A memset works only on memory that the driver knows.
        let is_unknown = self.check_submitted(stream.device, dst, bytes)?;
        // Measured: nor does it go on from a GPU's memory into the CPU's; it does the other way.
        if is_unknown || (!self.is_on_host(dst) && self.is_on_host(dst + (bytes - 1))) {
            return fail(Code::INVALID_VALUE);
        }
        self.submit(key, Work::Fill { dst, value, bytes });
        Ok(())
    }
}
