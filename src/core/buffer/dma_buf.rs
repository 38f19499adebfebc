//! Buffers for devices other than GPUs.

use std::os::fd::OwnedFd;

use super::Buffer;
use crate::driver::Code;
use crate::memory::{AccessChecks, Memory, check_range};
use crate::{Error, Result};

/// The unit of exports.
const PAGE: u64 = 4096;

impl Buffer {
    /// Exports `len` bytes from `offset` on as a DMA-BUF, for a network card or a disk: whole pages of 4 KiB, in a
    /// GPU's memory. Its users reach the bytes without any grant, and it keeps the memory after the buffer is
    /// dropped.
    ///
    /// Drivers export no host memory. A device of the machine reaches that without: by its CPU address, as any memory
    /// of the process, such as by `ibv_reg_mr`, by direct I/O or by
    /// [`CpuView::read_from_file`](crate::memory::CpuView::read_from_file).
    ///
    /// Source: `cuMemGetHandleForAddressRange`.
    ///
    /// # Errors
    /// [`Error::PlatformUnsupported`] for a range with host memory, and where there are no DMA-BUFs;
    /// [`Error::InvalidArgument`] for parts of pages; [`Error::OutOfRange`]; the driver's error.
    ///
    /// ```
    /// use egmem::driver::{Location, NodeId};
    /// use egmem::{Buffer, Driver, Error, Machine};
    ///
    /// let driver = Driver::simulated(Machine::h200x8())?; // Driver::open() on a real machine
    /// let mut memory = Buffer::on(Location::Device(0)).bytes(4 << 20).allocate(&driver)?;
    /// let fd = memory.dma_buf(1 << 20, 2 << 20)?; // for ibv_reg_dmabuf_mr
    ///
    /// // Host memory is registered by its CPU address instead.
    /// let mut memory = Buffer::on(NodeId(0)).bytes(4 << 20).allocate(&driver)?;
    /// let refused = memory.dma_buf(0, 4 << 20).unwrap_err();
    /// assert!(matches!(refused, Error::PlatformUnsupported { .. }));
    /// let address = memory.cpu()?.as_ptr(); // for ibv_reg_mr
    /// # drop((fd, address));
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn dma_buf(&mut self, offset: u64, len: u64) -> Result<OwnedFd> {
        check_range(offset, len, self.padded())?;
        if len == 0 || !offset.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            let why = format!("{len} bytes at {offset} are not whole pages");
            return Err(Error::invalid_of("range", why, "multiples of 4096"));
        }
        let is_host = self.range.may_be_on_host(offset, len);
        // From now on no slice of it is lent: something else may write the bytes.
        self.range.note_other_writers();
        let driver = self.range.first().driver();
        // SAFETY: writes through the fd reach memory of this buffer alone, of which safe code holds no reference: it
        // is borrowed exclusively, and lends none from now on.
        let exported = unsafe { driver.mem_dma_buf(self.device_ptr().add(offset), len) };
        if exported.is_ok() {
            self.range.note_export(offset, len);
        }
        exported.map_err(|error| match (error.code(), is_host) {
            (Some(Code::NOT_SUPPORTED), _) => Error::unsupported("DMA-BUFs", error.driver_error()),
            (Some(Code::INVALID_VALUE), true) => {
                Error::unsupported("DMA-BUFs of host memory", error.driver_error())
            }
            _ => error,
        })
    }
}
