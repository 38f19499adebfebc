//! Vectors and their prefixes as memory.

use super::{Growable, Prefix, chunk};
use crate::Result;
use crate::driver::{Access, DevicePtr, Driver, Location};
use crate::memory::{AccessChecks, CpuMemory, CpuView, Engine, Memory, check_range};

/// Implements the interfaces that all memory has, for a type with `chunks`, `driver`, `location` and `bytes()`.
macro_rules! impl_memory {
    ($name:ident) => {
        impl<T> CpuMemory for $name<T> {
            fn cpu(&self) -> Result<CpuView<'_>> {
                $name::cpu(self)
            }
        }

        // SAFETY: the chunks answer for themselves. They stay mapped at their addresses while the value lives, and for
        // ever if it is forgotten; taking access away needs each exclusively. No slices are lent.
        unsafe impl<T> AccessChecks for $name<T> {
            fn gpu_access(&self, gpu: i32, _: Engine, offset: u64, len: u64) -> Result<Access> {
                check_range(offset, len, self.bytes())?;
                let mut holding = chunk::holding(&self.chunks, offset, len).iter();
                holding.try_fold(Access::ReadWrite, |least, chunk| {
                    Ok(least.min(chunk.access(Location::Device(gpu))?))
                })
            }

            fn may_be_on_host(&self, _: u64, _: u64) -> bool {
                self.location.is_host()
            }

            fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
                let next = chunk::holding(&self.chunks, offset, len).get(1);
                Some(next.map_or(len, |chunk| chunk.range().start - offset))
            }

            fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
                chunk::holding(&self.chunks, offset, len)
                    .iter()
                    .any(|chunk| chunk.host() == Access::Read)
            }
        }

        impl<T> Memory for $name<T> {
            fn driver(&self) -> &Driver {
                &self.driver
            }
            fn device_ptr(&self) -> DevicePtr {
                $name::device_ptr(self)
            }
            fn len(&self) -> u64 {
                self.bytes()
            }
            fn location(&self) -> Location {
                self.location
            }
        }
    };
}

impl_memory!(Growable);
impl_memory!(Prefix);
