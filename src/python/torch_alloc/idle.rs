//! Freed blocks that the stream they were used on may reuse at once.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use egmem::Block;
use egmem::driver::StreamHandle;

/// Hashes addresses, sizes and handles: an attacker chooses none of them.
#[derive(Default)]
pub struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // The table uses the upper and the lower bits.
        self.0 = mixed ^ (mixed >> 32);
    }

    fn write_i32(&mut self, value: i32) {
        self.write_u64(value as u32 as u64);
    }
}

/// A table with [`Mix`].
pub type Table<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;

/// Idle blocks by stream and size. Work that is submitted to the stream later runs after the work that used them.
#[derive(Default)]
pub struct Idle {
    blocks: Table<(StreamHandle, u64), Vec<Block>>,
    bytes: u64,
}

impl Idle {
    /// Returns the bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes a block of exactly `size` bytes.
    pub fn take(&mut self, stream: StreamHandle, size: u64) -> Option<Block> {
        let block = self.blocks.get_mut(&(stream, size))?.pop()?;
        self.bytes -= size;
        Some(block)
    }

    /// Keeps a block.
    pub fn put(&mut self, stream: StreamHandle, block: Block) {
        self.bytes += block.len();
        self.blocks
            .entry((stream, block.len()))
            .or_default()
            .push(block);
    }

    /// Takes all blocks, by stream.
    pub fn take_all(&mut self) -> Table<StreamHandle, Vec<Block>> {
        self.bytes = 0;
        let mut all: Table<StreamHandle, Vec<Block>> = Table::default();
        for ((stream, _), blocks) in self.blocks.drain() {
            all.entry(stream).or_default().extend(blocks);
        }
        all.retain(|_, blocks| !blocks.is_empty());
        all
    }
}
