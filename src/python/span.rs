//! A part of memory with an element type, a shape and a device.

use std::sync::Arc;

use egmem::driver::Location;
use pyo3::prelude::*;

use crate::device;
use crate::dtype::Dtype;
use crate::error::invalid;
use crate::region::Region;

/// Memory as one device sees it. It keeps the memory.
pub struct Span {
    /// The memory.
    pub region: Arc<Region>,
    /// The elements' type.
    pub dtype: Dtype,
    /// The elements' number in each dimension; the last one is contiguous.
    pub shape: Vec<i64>,
    /// The first element, in bytes from the memory's start.
    pub offset: u64,
    /// DLPack's device type and id.
    pub device: (i32, i32),
}

impl Span {
    /// Checks and makes a view. Without a device it is the CPU's, or the GPU's whose own memory this is.
    ///
    /// # Errors
    /// `InvalidArgument` for a type, shape, offset or device that the memory does not have; `NoSuchPlace` for a GPU
    /// that the machine does not have.
    pub fn new(
        region: Arc<Region>,
        dtype: Option<&Bound<'_, PyAny>>,
        shape: Option<&Bound<'_, PyAny>>,
        offset: u64,
        device: Option<&str>,
    ) -> PyResult<Self> {
        let dtype = dtype.map_or(Ok(Dtype::BYTES), Dtype::parse)?;
        let size = u64::from(dtype.size);
        let rest = region.len().checked_sub(offset);
        let rest = rest
            .ok_or_else(|| invalid(&format!("offset {offset} is beyond {} bytes", region.len())))?;
        if !(region.address() + offset).is_multiple_of(size) {
            return Err(invalid(&format!(
                "offset {offset} is no multiple of {size}, the size of {}",
                dtype.name
            )));
        }
        let mut shape: Vec<i64> = match shape {
            None => vec![(rest / size) as i64],
            Some(one) if one.extract::<i64>().is_ok() => vec![one.extract()?],
            Some(all) => all
                .try_iter()?
                .map(|dimension| dimension?.extract())
                .collect::<PyResult<_>>()?,
        };
        infer(&mut shape, rest, dtype)?;
        let count = shape.iter().try_fold(1_u64, |count, dimension| {
            count.checked_mul(u64::try_from(*dimension).ok()?)
        });
        let fits = count
            .and_then(|count| count.checked_mul(size))
            .is_some_and(|bytes| bytes <= rest);
        if !fits {
            return Err(invalid(&format!(
                "shape {shape:?} of {} does not fit into the {rest} bytes from offset {offset} on",
                dtype.name
            )));
        }
        let device = match (device, region.location()) {
            (Some(device), _) => device::parse(device, region.driver())?,
            (None, Location::Device(gpu)) => (device::CUDA, gpu),
            (None, _) => (device::CPU, 0),
        };
        Ok(Self {
            region,
            dtype,
            shape,
            offset,
            device,
        })
    }

    /// Returns the first element's address.
    pub fn address(&self) -> u64 {
        self.region.address() + self.offset
    }
}

/// Replaces the one dimension of -1 by all that the memory has.
///
/// # Errors
/// `InvalidArgument` for two of them, and where the other dimensions do not divide the memory.
fn infer(shape: &mut [i64], bytes: u64, dtype: Dtype) -> PyResult<()> {
    let Some(at) = shape.iter().position(|&dimension| dimension == -1) else {
        return Ok(());
    };
    let mut others = shape[..at].iter().chain(&shape[at + 1..]);
    let unit = others.try_fold(u64::from(dtype.size), |unit, &dimension| {
        unit.checked_mul(u64::try_from(dimension).ok()?)
    });
    let divides = |unit: &u64| *unit > 0 && bytes.is_multiple_of(*unit);
    let unit = unit.filter(divides).ok_or_else(|| {
        invalid(&format!(
            "shape {shape:?} of {} does not divide {bytes} bytes; valid: one dimension of -1, and others whose product divides them",
            dtype.name
        ))
    })?;
    shape[at] = (bytes / unit) as i64;
    Ok(())
}
