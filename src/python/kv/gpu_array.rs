//! Arrays of PyTorch and CuPy: where their blocks lie.

use egmem::driver::DevicePtr;
use egmem::kv::PartShape;
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::prelude::*;

use crate::error::invalid;
use crate::library::Library;

/// The most parts of one array.
const MAX_PARTS: u64 = 1 << 16;

/// An array on a GPU.
pub struct GpuArray {
    pub library: Option<Library>,
    pub gpu: i32,
    address: u64,
    item_bytes: u64,
    /// The length of each dimension, and the bytes between two of its elements.
    dimensions: Vec<(u64, u64)>,
}

/// An array's blocks: its parts, and how many blocks there are.
pub type Blocks = (Vec<(DevicePtr, PartShape)>, u64);

impl GpuArray {
    /// Reads a PyTorch tensor, a CuPy array, or an array with a tensor's methods.
    ///
    /// # Errors
    /// `TypeError` for another object; `InvalidArgument` for an array that is on no GPU, or that has a negative stride;
    /// Python's errors.
    pub fn of(array: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::read(array).map_err(|error| {
            if !error.is_instance_of::<PyAttributeError>(array.py()) {
                return error;
            }
            let kind = array.get_type();
            PyTypeError::new_err(format!(
                "{kind} is no tensor on a GPU; valid: tensors of PyTorch, arrays of CuPy"
            ))
        })
    }

    fn read(array: &Bound<'_, PyAny>) -> PyResult<Self> {
        let library = Library::of(array)?;
        let shape: Vec<u64> = array.getattr("shape")?.extract()?;
        let (gpu, address, strides, unit, item_bytes) = if library == Some(Library::CuPy) {
            let gpu = array.getattr("device")?.getattr("id")?.extract()?;
            let address = array.getattr("data")?.getattr("ptr")?.extract()?;
            let strides: Vec<i64> = array.getattr("strides")?.extract()?;
            (gpu, address, strides, 1, array.getattr("itemsize")?)
        } else {
            let gpu = gpu_of(array)?;
            let address = array.call_method0("data_ptr")?.extract()?;
            let size = array.call_method0("element_size")?;
            let strides: Vec<i64> = array.call_method0("stride")?.extract()?;
            (gpu, address, strides, size.extract()?, size)
        };
        let bytes = |stride: i64| u64::try_from(stride).ok()?.checked_mul(unit);
        let strides: Option<Vec<u64>> = strides.into_iter().map(bytes).collect();
        let strides =
            strides.ok_or_else(|| invalid("an array of the cache has a negative stride"))?;
        Ok(Self {
            library,
            gpu,
            address,
            item_bytes: item_bytes.extract()?,
            dimensions: shape.into_iter().zip(strides).collect(),
        })
    }

    /// Returns the blocks that dimension `block_dim` counts. The elements of a block in the dimensions behind it lie
    /// side by side, in any order of these dimensions. Each index in the dimensions before it is a part.
    ///
    /// # Errors
    /// `InvalidArgument` for no such dimension, no element, blocks with gaps, too many parts, and, without
    /// `block_dim`, for a first dimension of 2: keys and values, or two blocks.
    pub fn blocks(&self, block_dim: Option<usize>) -> PyResult<Blocks> {
        let shape: Vec<u64> = self.dimensions.iter().map(|(len, _)| *len).collect();
        if block_dim.is_none() && shape.len() >= 3 && shape[0] == 2 {
            return Err(invalid(&format!(
                "an array of the cache has the shape {shape:?}, which may be keys and values of {} blocks, or 2 blocks; \
                 pass block_dim=1 for keys and values, block_dim=0 for 2 blocks",
                shape[1]
            )));
        }
        let dim = block_dim.unwrap_or(0);
        let Some(&(blocks, stride)) = self.dimensions.get(dim) else {
            return Err(invalid(&format!(
                "block_dim is {dim}, and an array of the cache has the shape {shape:?}; valid: a dimension of each array"
            )));
        };
        if blocks == 0 || shape.contains(&0) {
            return Err(invalid(&format!(
                "an array of the cache has no block: its shape is {shape:?}"
            )));
        }
        let bytes = self.dense_bytes(&self.dimensions[dim + 1..])?;
        let mut offsets = self.offsets(&self.dimensions[..dim])?;
        let mut bytes_of_part = bytes;
        // Parts that lie side by side in memory as in a page are one.
        if (0..)
            .zip(&offsets)
            .all(|(index, offset)| *offset == index * bytes)
        {
            bytes_of_part = bytes.saturating_mul(offsets.len() as u64);
            offsets.truncate(1);
        }
        let shape = PartShape {
            // A single block's stride says nothing.
            stride: if blocks == 1 { bytes_of_part } else { stride },
            bytes: bytes_of_part,
        };
        let part = |offset: u64| (DevicePtr(self.address.wrapping_add(offset)), shape);
        Ok((offsets.into_iter().map(part).collect(), blocks))
    }

    /// Returns the bytes of the elements of some dimensions.
    ///
    /// # Errors
    /// `InvalidArgument` if they do not lie side by side.
    fn dense_bytes(&self, dimensions: &[(u64, u64)]) -> PyResult<u64> {
        let mut dimensions: Vec<_> = dimensions.iter().filter(|(len, _)| *len > 1).collect();
        dimensions.sort_unstable_by_key(|(_, stride)| *stride);
        let mut bytes = self.item_bytes;
        for (len, stride) in dimensions {
            if *stride != bytes {
                return Err(invalid(&format!(
                    "a block's elements are not contiguous in an array of the cache, whose dimensions have these lengths \
                     and bytes between elements: {:?}; copy it to an array whose blocks have no gaps, or pass block_dim= \
                     for the dimension that counts the blocks",
                    self.dimensions
                )));
            }
            bytes = bytes.saturating_mul(*len);
        }
        Ok(bytes)
    }

    /// Returns where each index of some dimensions lies, in bytes from the array's beginning.
    ///
    /// # Errors
    /// `InvalidArgument` for too many.
    fn offsets(&self, dimensions: &[(u64, u64)]) -> PyResult<Vec<u64>> {
        let lens = dimensions.iter().map(|(len, _)| *len);
        let count = lens.fold(1, u64::saturating_mul);
        if count > MAX_PARTS {
            return Err(invalid(&format!(
                "the dimensions before block_dim have {count} parts; valid: 1 to {MAX_PARTS}"
            )));
        }
        let mut offsets = vec![0_u64];
        for &(len, stride) in dimensions {
            let at = |offset: u64| {
                (0..len).map(move |index| offset.wrapping_add(index.wrapping_mul(stride)))
            };
            offsets = offsets.into_iter().flat_map(at).collect();
        }
        Ok(offsets)
    }
}

/// Returns the GPU of a tensor. A kernel that accesses memory of the CPU that is not pinned loses the GPU's context.
///
/// # Errors
/// `InvalidArgument` for a tensor that is on no GPU.
fn gpu_of(tensor: &Bound<'_, PyAny>) -> PyResult<i32> {
    let device = tensor.getattr("device")?;
    let kind: String = device.getattr("type")?.extract()?;
    if kind != "cuda" {
        return Err(invalid(&format!(
            "a tensor of the cache is on {kind:?}; valid: tensors on a GPU"
        )));
    }
    device.getattr("index")?.extract()
}
