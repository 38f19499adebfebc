//! Vectors and their prefixes as memory.

use super::{Growable, Prefix};
use crate::Result;
use crate::driver::{Access, DevicePtr, Driver, Location};
use crate::memory::{AccessChecks, CpuMemory, CpuView, Engine, Memory, check_range};
use crate::vmm::Adjacent;

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
                Adjacent(&self.chunks).gpu_access(gpu, offset, len)
            }

            fn may_be_on_host(&self, _: u64, _: u64) -> bool {
                self.location.is_host()
            }

            fn of_one_copy(&self, offset: u64, len: u64) -> u64 {
                Adjacent(&self.chunks).of_one_copy(offset, len)
            }

            fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
                Some(Adjacent(&self.chunks).of_one_mapping(offset, len))
            }

            fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
                Adjacent(&self.chunks).is_read_only_for_cpu(offset, len)
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
