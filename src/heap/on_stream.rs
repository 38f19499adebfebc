//! Blocks in the order of one stream's work: freed ones are allocated again before the work on them has ended.

use std::alloc::Layout;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::mem::ManuallyDrop;

use super::classes::{Class, PAGE};
use super::{Block, Heap, NotAllFreed, NotFreed};
use crate::driver::{Access, DevicePtr, Driver, Location, StreamHandle};
use crate::memory::{AccessChecks, CpuView, Engine, Memory, cpu_accessors, impl_cpu_memory};
use crate::stream::{after_captures, run_due};
use crate::{Error, Result, Stream};

/// The most that a handle keeps of freed blocks: bytes, at most a 16th of the heap's limit, and blocks.
const MOST_BYTES: u64 = 64 << 20;
const PART: u64 = 16;
const MOST_BLOCKS: usize = 1024;

/// Allocates blocks for the work of one stream, as `cudaMallocAsync` does: a freed block may be allocated again on the same
/// stream at once, although GPU work on it has not ended, because the stream runs later work after it. No event is
/// recorded for that. [`Heap::on_stream`] creates one.
///
/// The handle keeps freed blocks, at most 64 MiB, a 16th of the heap's limit and 1024 blocks. If they become more, if the
/// heap has no memory for an allocation, and when the handle is dropped, it records one event for all of them and frees
/// them as [`Heap::free_all_after`] does; [`flush`](Self::flush) does so at once. Until then they count as in use, and no other
/// thread gets them.
///
/// A handle is [`Send`], not [`Sync`]: several threads that submit to one stream have a handle each.
///
/// # Captures
/// While the stream is captured into a CUDA graph, allocations and [`flush`](Self::flush) fail. A block that is dropped
/// then stays with the handle until the capture has ended, and those of a dropped handle are freed when a handle or a pool is
/// used after that. A graph that uses them must not run after that.
///
/// In a heap that is in [debug mode](super::debug), or that [scrubs](super::HeapOptions::scrub_on_free) freed blocks, no block is
/// used again before its work has ended.
///
/// ```
/// use std::alloc::Layout;
/// use egmem::driver::NodeId;
/// use egmem::{Driver, Heap, Machine, Stream};
///
/// let driver = Driver::simulated(Machine::gh200())?;
/// let heap = Heap::on(NodeId(0)).limit(1 << 30).build(&driver)?;
/// let stream = Stream::new(&driver, 0)?;
/// let on_stream = heap.on_stream(&stream)?;
/// let first = on_stream.allocate(Layout::new::<[f32; 1000]>())?;
/// let address = first.device_ptr();
/// // … a kernel on `stream` uses it
/// drop(first);
/// let second = on_stream.allocate(Layout::new::<[f32; 1000]>())?;
/// assert_eq!(second.device_ptr(), address); // for the next kernel on `stream`
/// assert_eq!(heap.stats().deferred_blocks, 0);
/// # Ok::<(), egmem::Error>(())
/// ```
pub struct OnStream {
    heap: Heap,
    stream: Stream,
    most: u64,
    kept: RefCell<Kept>,
}

/// Freed blocks by the bytes that they take.
#[derive(Default)]
struct Kept {
    sizes: BTreeMap<u64, Vec<Block>>,
    bytes: u64,
    count: usize,
}

impl Kept {
    fn push(&mut self, block: Block) {
        let taken = block.piece().taken();
        self.bytes += taken;
        self.count += 1;
        self.sizes.entry(taken).or_default().push(block);
    }

    /// Takes a block of `bytes` or up to an eighth more, at a multiple of `align`: the one freed last of its size.
    fn pop(&mut self, bytes: u64, align: u64) -> Option<Block> {
        let fitting = self
            .sizes
            .range_mut(bytes..=bytes.saturating_add(bytes / 8));
        for (&taken, blocks) in fitting {
            if let Some(block) = blocks.pop_if(|block| block.device_ptr().0.is_multiple_of(align)) {
                self.bytes -= taken;
                self.count -= 1;
                return Some(block);
            }
        }
        None
    }

    fn take_all(&mut self) -> Vec<Block> {
        let all = std::mem::take(self);
        all.sizes.into_values().flatten().collect()
    }
}

impl Heap {
    /// Creates a handle that allocates and frees in the order of a stream's work.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's stream, and for the per-thread default stream, which is another
    /// stream in each thread.
    pub fn on_stream(&self, stream: &Stream) -> Result<OnStream> {
        self.driver().expect_same(stream.driver(), "stream")?;
        if stream.handle().raw == StreamHandle::PER_THREAD {
            let why = "the per-thread default stream is another stream in each thread: create one";
            return Err(Error::invalid("stream", why));
        }
        run_due(self.driver());
        let inner = self.inner();
        let keeps_none = inner.facts.scrub || inner.watch.is_some();
        Ok(OnStream {
            heap: self.clone(),
            stream: stream.clone(),
            most: if keeps_none {
                0
            } else {
                MOST_BYTES.min(self.limit() / PART)
            },
            kept: RefCell::default(),
        })
    }
}

impl OnStream {
    /// Allocates a block of `layout`'s size at a multiple of its alignment, for work on the stream. The bytes are not
    /// initialised, and earlier work on the stream may still write to them.
    ///
    /// # Errors
    /// As [`Heap::allocate`]; [`Error::InvalidArgument`] while the stream is being captured into a graph.
    #[track_caller]
    pub fn allocate(&self, layout: Layout) -> Result<StreamBlock<'_>> {
        // A forked child must get no block that its parent may get too.
        self.heap.driver().expect_this_process("heap")?;
        self.stream.expect_no_capture()?;
        self.limit_kept();
        let (bytes, align) = (Heap::usable_size(layout), layout.align() as u64);
        // Blocks that have to be scrubbed, or have guards, cannot be flushed, so they are not reused here.
        let may_reuse = layout.size() > 0 && self.most > 0;
        let found = may_reuse.then(|| {
            let mut kept = self.kept.borrow_mut();
            let found = kept.pop(bytes, align);
            // A range in place of a small block takes a page.
            let class = Class::of(bytes, align).filter(|class| class.may_be_range(align));
            found.or_else(|| kept.pop(class.map(|_| PAGE)?, align))
        });
        let block = match found.flatten() {
            Some(block) => block,
            None => self.heap.allocate(layout).or_else(|error| {
                if self.kept.borrow().count == 0 {
                    return Err(error);
                }
                self.flush()?;
                self.heap.allocate(layout)
            })?,
        };
        Ok(StreamBlock {
            home: self,
            block: ManuallyDrop::new(block),
            len: layout.size() as u64,
        })
    }

    /// Frees a block of the heap whose last work is on the stream, as a dropped [`StreamBlock`] is freed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another heap's block, and while the stream is being captured into a graph; the
    /// driver's errors. The error then has the block, which is not freed: see [`Block::free_after`].
    #[track_caller]
    pub fn free(&self, block: Block) -> Result<(), NotFreed> {
        if !std::ptr::eq(block.heap(), &**self.heap.inner()) {
            let error = Error::invalid("block", "it is another heap's");
            return Err(NotFreed::new(error, block));
        }
        // A forked child frees nothing, asks the driver nothing, and takes no lock that another thread may have had.
        if let Err(error) = self.heap.driver().expect_this_process("heap") {
            return Err(NotFreed::new(error, block));
        }
        if self.stream.is_capturing() != Ok(false) {
            return block.free_after(&self.stream);
        }
        self.kept.borrow_mut().push(block);
        self.limit_kept();
        Ok(())
    }

    /// Frees all kept blocks if they are too many, also because they were dropped while the stream was captured. The stream is
    /// not captured.
    fn limit_kept(&self) {
        run_due(self.heap.driver());
        let is_full = {
            let kept = self.kept.borrow();
            kept.bytes > self.most || kept.count > MOST_BLOCKS
        };
        if is_full && let Err(error) = self.flush() {
            tracing::warn!(%error, "blocks stay with the stream that they were freed on");
        }
    }

    /// Frees all blocks that the handle keeps, once all work submitted to the stream so far has run, with one event.
    ///
    /// # Errors
    /// As [`Heap::free_all_after`]; the handle then keeps the blocks.
    pub fn flush(&self) -> Result<()> {
        let blocks = self.kept.borrow_mut().take_all();
        if blocks.is_empty() {
            return Ok(());
        }
        let Err(NotAllFreed { error, blocks }) = self.heap.free_all_after(blocks, &self.stream)
        else {
            return Ok(());
        };
        let mut kept = self.kept.borrow_mut();
        blocks.into_iter().for_each(|block| kept.push(block));
        Err(*error)
    }

    /// Returns the bytes of freed blocks that the handle keeps for allocations.
    pub fn kept(&self) -> u64 {
        self.kept.borrow().bytes
    }

    /// Returns the stream.
    pub const fn stream(&self) -> &Stream {
        &self.stream
    }

    fn is_at_home(&self) -> bool {
        self.heap.inner().facts.born.is_current()
    }
}

impl Drop for OnStream {
    fn drop(&mut self) {
        // In a forked child dropping blocks gives nothing back.
        if !self.is_at_home() {
            return;
        }
        let blocks = self.kept.get_mut().take_all();
        end(self.heap.clone(), self.stream.clone(), blocks);
    }
}

/// Frees blocks of a handle that is gone, once the stream is no longer captured: an event then would be the graph's, and a wait
/// would make the capture invalid.
fn end(heap: Heap, stream: Stream, blocks: Vec<Block>) {
    if blocks.is_empty() {
        return;
    }
    if stream.may_be_captured() {
        let streams = vec![stream.clone()];
        return after_captures(streams, move || end(heap, stream, blocks));
    }
    let Err(NotAllFreed { error, blocks }) = heap.free_all_after(blocks, &stream) else {
        return;
    };
    // Dropping the blocks frees them.
    if !stream.wait_until_over().over {
        tracing::error!(%error, blocks = blocks.len(), "blocks that a GPU may still use are lost");
        blocks.into_iter().for_each(std::mem::forget);
    }
}

impl fmt::Debug for OnStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnStream")
            .field("heap", &self.heap)
            .field("stream", &self.stream.handle())
            .field("kept", &self.kept())
            .finish()
    }
}

/// A block for work on a stream: [`OnStream::allocate`]. Dropping it frees it in the order of the stream's work.
///
/// The CPU's accesses wait for the stream's work first. Work on other streams must come after the stream's earlier work,
/// and before the drop in the order of the stream, as [`Stream::wait_for`] arranges it; [`Stream::copy`] and the other
/// safe functions see to that.
pub struct StreamBlock<'a> {
    home: &'a OnStream,
    /// Taken by `drop` alone.
    block: ManuallyDrop<Block>,
    /// The bytes requested; the block may be another request's before.
    len: u64,
}

impl StreamBlock<'_> {
    /// Returns the block's address: the same for every GPU and, on host memory, for the CPU.
    #[inline]
    pub fn device_ptr(&self) -> DevicePtr {
        self.block.device_ptr()
    }

    /// Returns the number of bytes requested.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Returns `false`: a block has at least one byte.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Returns the CPU's view of the block, after all work on the stream.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read; [`Error::InvalidArgument`] while the stream is being
    /// captured into a graph; the error of earlier work on the stream.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        self.block.cpu()?;
        self.home.stream.expect_no_capture()?;
        self.home.stream.synchronize()?;
        let have = self.block.heap().facts.host;
        // SAFETY: the block's memory is mapped and granted for as long as it lives. `len` is at most the block's bytes, in
        // units larger than a word; safe code reaches the bytes through atomic views only.
        unsafe { CpuView::granted(self.device_ptr(), self.len, have) }
    }

    cpu_accessors!();
}

impl Drop for StreamBlock<'_> {
    fn drop(&mut self) {
        // SAFETY: nothing uses the block after this.
        let block = unsafe { ManuallyDrop::take(&mut self.block) };
        let Err(refused) = self.home.free(block) else {
            return;
        };
        // While the stream is captured, nothing is allocated or flushed. Later work on the stream comes after the block's, so
        // the handle may use it again after the capture.
        if self.home.is_at_home() {
            self.home.kept.borrow_mut().push(refused.block);
        } else {
            std::mem::forget(refused.block);
        }
    }
}

impl fmt::Debug for StreamBlock<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamBlock")
            .field("device_ptr", &self.device_ptr())
            .field("len", &self.len)
            .finish()
    }
}

impl_cpu_memory!(StreamBlock<'_>);

// SAFETY: the block answers for all that it takes, of which `len` bytes are this value's. `ready_on` orders other streams
// after the work of the bytes' earlier users.
unsafe impl AccessChecks for StreamBlock<'_> {
    fn gpu_access(&self, gpu: i32, engine: Engine, offset: u64, len: u64) -> Result<Access> {
        self.block.gpu_access(gpu, engine, offset, len)
    }

    fn may_be_on_host(&self, offset: u64, len: u64) -> bool {
        self.block.may_be_on_host(offset, len)
    }

    fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
        self.block.is_read_only_for_cpu(offset, len)
    }

    fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
        self.block.of_one_mapping(offset, len)
    }

    unsafe fn ready_on(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller promises that the stream is live.
        unsafe { self.home.stream.order_use(stream, "block") }
    }
}

impl Memory for StreamBlock<'_> {
    fn driver(&self) -> &Driver {
        self.home.stream.driver()
    }
    fn device_ptr(&self) -> DevicePtr {
        self.device_ptr()
    }
    fn len(&self) -> u64 {
        self.len
    }
    fn location(&self) -> Location {
        self.block.location()
    }
}

#[cfg(test)]
mod tests;
