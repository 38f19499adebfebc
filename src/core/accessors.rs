//! The CPU's reads and writes, the same for every memory that has a CPU view.

/// Defines inherent methods of a type whose `cpu()` lends a [`CpuView`](crate::memory::CpuView), or of one that names
/// another view of `len` bytes from `offset` on, and where in that view they start.
#[macro_export]
macro_rules! cpu_accessors {
    () => {
        $crate::cpu_accessors!(|this, offset, _len| (this.cpu()?, offset));
    };
    (|$this:ident, $offset:ident, $len:ident| $view:expr) => {
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
            let ($this, $offset, $len) = (self, offset, size_of_val(values) as u64);
            let (view, at) = $view;
            view.write_at(at, values)
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
            let ($this, $offset, $len) = (self, offset, size_of_val(values) as u64);
            let (view, at) = $view;
            view.read_at(at, values)
        }

        /// Writes one value.
        ///
        /// # Errors
        /// As [`write_at`](Self::write_at).
        pub fn put<T: ::bytemuck::NoUninit>(&self, offset: u64, value: T) -> $crate::Result<()> {
            let ($this, $offset, $len) = (self, offset, size_of::<T>() as u64);
            let (view, at) = $view;
            view.put(at, value)
        }

        /// Reads one value.
        ///
        /// # Errors
        /// As [`write_at`](Self::write_at).
        pub fn get<T: ::bytemuck::AnyBitPattern + ::bytemuck::NoUninit>(
            &self,
            offset: u64,
        ) -> $crate::Result<T> {
            let ($this, $offset, $len) = (self, offset, size_of::<T>() as u64);
            let (view, at) = $view;
            view.get(at)
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
