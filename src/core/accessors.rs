//! The CPU's reads and writes, the same for every memory that has a CPU view.

/// Defines inherent methods of a type whose `cpu()` lends a [`CpuView`](crate::memory::CpuView).
#[macro_export]
macro_rules! cpu_accessors {
    () => {
        /// Copies `values` to `offset` bytes from the start, with the CPU.
        ///
        /// # Errors
        /// [`Error::NotAccessible`](crate::Error::NotAccessible),
        /// [`Error::OutOfRange`](crate::Error::OutOfRange).
        pub fn write_at<T: ::bytemuck::NoUninit>(
            &self,
            offset: u64,
            values: &[T],
        ) -> $crate::Result<()> {
            self.cpu()?.write_at(offset, values)
        }

        /// Copies from `offset` bytes from the start into `values`, with the CPU.
        ///
        /// # Errors
        /// As [`write_at`](Self::write_at).
        pub fn read_at<T: ::bytemuck::AnyBitPattern + ::bytemuck::NoUninit>(
            &self,
            offset: u64,
            values: &mut [T],
        ) -> $crate::Result<()> {
            self.cpu()?.read_at(offset, values)
        }

        /// Writes one value.
        ///
        /// # Errors
        /// As [`write_at`](Self::write_at).
        pub fn put<T: ::bytemuck::NoUninit>(&self, offset: u64, value: T) -> $crate::Result<()> {
            self.cpu()?.put(offset, value)
        }

        /// Reads one value.
        ///
        /// # Errors
        /// As [`write_at`](Self::write_at).
        pub fn get<T: ::bytemuck::AnyBitPattern + ::bytemuck::NoUninit>(
            &self,
            offset: u64,
        ) -> $crate::Result<T> {
            self.cpu()?.get(offset)
        }

        /// Sets every byte to `byte`, with the CPU.
        ///
        /// # Errors
        /// [`Error::NotAccessible`](crate::Error::NotAccessible).
        pub fn fill(&self, byte: u8) -> $crate::Result<()> {
            self.cpu()?.fill(0, self.len(), byte)
        }
    };
}

pub use cpu_accessors;
