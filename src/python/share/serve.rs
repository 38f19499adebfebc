//! The end of a pickled heap that has the chunks.

use std::collections::BTreeMap;
use std::sync::{Mutex, Weak};
use std::time::Duration;

use egmem::driver::Access;
use egmem::share::{Channel, Result};

use super::tickets::{self, CLOSED, GRANTED, TEXT, UNKNOWN};
use crate::locks::lock;

/// Answers a process's questions for chunks, until the connection ends.
pub fn serve(channel: &mut Channel, heap: &Weak<Mutex<Option<egmem::Heap>>>) -> Result<()> {
    channel.send_text(GRANTED)?;
    let mut kept = BTreeMap::new();
    loop {
        while !channel.wait_for_message(Duration::MAX)? {}
        let Ok(offset) = channel.receive_text(TEXT)?.parse::<u64>() else {
            return channel.send_text(UNKNOWN);
        };
        let heap = heap.upgrade().and_then(|heap| lock(&heap).clone());
        match heap.map(|heap| heap.share_chunk(offset)) {
            None => channel.send_text(CLOSED)?,
            Some(Err(error)) => channel.send_text(&tickets::reason(&error))?,
            Some(Ok((shared, start))) => {
                let granted = format!("{GRANTED} {start}");
                tickets::send(channel, &shared, Access::ReadWrite, &granted)?;
                kept.insert(start, shared);
            }
        }
    }
}
