//! Much memory in one range: seconds until it is there, metadata, seconds until it is given back.

use std::time::Instant;

use egmem::driver::Location;
use egmem::size::Bytes;
use egmem::{Buffer, Growth, Heap, Result};
use serde::Serialize;

use crate::args::Args;
use crate::report::{About, Results};
use crate::{Place, layout};

/// One way to have it.
#[derive(Debug, Serialize)]
pub struct Row {
    way: &'static str,
    chunks: u64,
    /// Bytes that the heap keeps outside the memory.
    metadata: u64,
    made_seconds: f64,
    given_back_seconds: f64,
}

/// All of them.
#[derive(Debug, Serialize)]
pub struct Large {
    bytes: u64,
    rows: Vec<Row>,
}

/// Measures one block of a heap, in chunks of two sizes, and a buffer.
///
/// # Errors
/// The driver's; [`egmem::Error::NodeTooFull`].
pub fn measure(place: &Place, args: &Args) -> Result<Large> {
    let bytes = args.large.0;
    let rows = vec![
        by_heap(place, bytes, "heap, chunks of 64 MiB", None)?,
        by_heap(
            place,
            bytes,
            "heap, chunks of 1 GiB",
            Some(Growth::steady().chunk(1 << 30)),
        )?,
        by_buffer(place, bytes)?,
    ];
    Ok(Large { bytes, rows })
}

fn by_heap(place: &Place, bytes: u64, way: &'static str, growth: Option<Growth>) -> Result<Row> {
    let mut options = Heap::on(place.node)
        .access_by([Location::Device(place.gpu)])
        .limit(bytes);
    if let Some(growth) = growth {
        options = options.growth(growth);
    }
    let heap = options.build(&place.driver)?;
    let began = Instant::now();
    let block = heap.allocate(layout(bytes)?)?;
    let made_seconds = began.elapsed().as_secs_f64();
    let stats = heap.stats();
    let began = Instant::now();
    drop((block, heap));
    Ok(Row {
        way,
        chunks: stats.driver.create,
        metadata: stats.metadata,
        made_seconds,
        given_back_seconds: began.elapsed().as_secs_f64(),
    })
}

fn by_buffer(place: &Place, bytes: u64) -> Result<Row> {
    let options = Buffer::on(place.node).access_by([Location::Device(place.gpu)]);
    let options = options.growth(Growth::steady().chunk(1 << 30));
    let began = Instant::now();
    let buffer = options.bytes(bytes).allocate(&place.driver)?;
    let made_seconds = began.elapsed().as_secs_f64();
    let chunks = buffer.physical().len() as u64;
    let began = Instant::now();
    drop(buffer);
    Ok(Row {
        way: "buffer, chunks of 1 GiB",
        chunks,
        metadata: 0,
        made_seconds,
        given_back_seconds: began.elapsed().as_secs_f64(),
    })
}

impl Results for Large {
    fn title(&self) -> String {
        format!(
            "{} in one range, granted to the host and the GPU",
            Bytes(self.bytes)
        )
    }

    fn header(&self) -> Vec<&'static str> {
        vec![
            "way",
            "chunks",
            "metadata B",
            "GB/s",
            "s to make",
            "s to give back",
        ]
    }

    fn facts(&self) -> usize {
        3
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let line = |row: &Row| {
            vec![
                row.way.to_string(),
                row.chunks.to_string(),
                row.metadata.to_string(),
                format!("{:.2}", self.bytes as f64 / row.made_seconds / 1e9),
                format!("{:.2}", row.made_seconds),
                format!("{:.2}", row.given_back_seconds),
            ]
        };
        self.rows.iter().map(line).collect()
    }

    fn verdicts(&self) -> Vec<String> {
        Vec::new()
    }

    fn draw(&self, _: &About) -> Option<String> {
        None
    }
}
