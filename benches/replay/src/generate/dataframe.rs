//! Dataframe queries on four threads: tables of columns, joins, groupings and sorts with their temporaries.

use super::{Block, Log};

const THREADS: usize = 4;
/// The most bytes of all threads' tables; beyond that the oldest is written out and freed.
const MOST: u64 = 1 << 30;

struct Table {
    rows: u64,
    /// Data, validity masks, offsets of strings.
    columns: Vec<Block>,
}

impl Table {
    fn bytes(&self) -> u64 {
        self.columns.iter().map(|column| column.bytes).sum()
    }
}

pub fn run(log: &mut Log) {
    let mut tables: Vec<Table> = Vec::new();
    while !log.is_long_enough() {
        // Partitions are handed from thread to thread, so the thread that frees a block is not always the one that
        // allocated it.
        let thread = 1 + log.random.below(THREADS as u64) as u32;
        let made = match log.random.below(10) {
            0..4 => scan(log, thread),
            kind => match pick(log, &mut tables) {
                None => scan(log, thread),
                Some(table) => match kind {
                    4..6 => filter(log, thread, table),
                    6..8 => join(log, thread, table, &tables),
                    8 => group(log, thread, table),
                    _ => sort(log, thread, table),
                },
            },
        };
        tables.push(made);
        while tables.iter().map(Table::bytes).sum::<u64>() > MOST || tables.len() > 40 {
            let oldest = tables.remove(0);
            // Written out through a buffer, column by column.
            let buffer = log.allocate(thread, 8 << 20);
            log.work(3000);
            drop_table(log, thread, oldest);
            log.free(thread, buffer);
        }
    }
    for table in tables {
        drop_table(log, 1, table);
    }
}

fn pick(log: &mut Log, tables: &mut Vec<Table>) -> Option<Table> {
    match tables.len() as u64 {
        0 => None,
        // The younger half, mostly: intermediate results are used soon.
        count => Some(tables.remove((count - 1 - log.random.below(count.div_ceil(2))) as usize)),
    }
}

/// The buffers of one column of `rows` values.
fn column(log: &mut Log, thread: u32, rows: u64, columns: &mut Vec<Block>) {
    let width = [1, 4, 4, 8, 8, 8][log.random.below(6) as usize];
    columns.push(log.allocate(thread, rows * width));
    if log.random.percent(40) {
        // Validity: a bit each, in words of 64 bytes.
        columns.push(log.allocate(thread, rows.div_ceil(512) * 64));
    }
    if width == 1 {
        columns.push(log.allocate(thread, (rows + 1) * 4));
    }
}

fn table(log: &mut Log, thread: u32, rows: u64, width: u64) -> Table {
    let mut columns = Vec::new();
    for _ in 0..width {
        column(log, thread, rows, &mut columns);
    }
    Table { rows, columns }
}

fn drop_table(log: &mut Log, thread: u32, table: Table) {
    for column in table.columns {
        log.free(thread, column);
    }
}

/// Reads a file's row group: compressed bytes, pages' headers, then the columns.
fn scan(log: &mut Log, thread: u32) -> Table {
    // From dimension tables of some rows to facts of millions.
    let rows = log.random.spread(4, 23);
    let width = log.random.between(2, 7);
    let raw = log.allocate(thread, rows * width * 3 + 64);
    let headers = log.allocate(thread, 48 * (1 + rows / 20_000));
    log.work(2000);
    let made = table(log, thread, rows, width);
    log.free_backwards(thread, vec![raw, headers]);
    made
}

fn filter(log: &mut Log, thread: u32, from: Table) -> Table {
    let mask = log.allocate(thread, from.rows);
    let count = log.allocate(thread, 8);
    let kept = log.random.between(1, 100);
    let map = log.allocate(thread, (from.rows * kept / 100).max(1) * 4);
    log.work(500);
    let made = gather(log, thread, &from, (from.rows * kept / 100).max(1));
    log.free_backwards(thread, vec![mask, count, map]);
    drop_table(log, thread, from);
    made
}

/// Each column's chosen rows, with a temporary of its own.
fn gather(log: &mut Log, thread: u32, from: &Table, rows: u64) -> Table {
    let mut columns = Vec::new();
    for column in &from.columns {
        let scratch = log.random.spread(8, 15);
        let scratch = log.allocate(thread, scratch);
        columns.push(log.allocate(thread, (column.bytes * rows / from.rows).max(8)));
        log.free(thread, scratch);
    }
    Table { rows, columns }
}

fn join(log: &mut Log, thread: u32, left: Table, tables: &[Table]) -> Table {
    let other = log.random.below(tables.len().max(1) as u64) as usize;
    let right = tables.get(other).map_or(1, |table| table.rows);
    let hash = log.allocate(thread, right.min(left.rows) * 2 * 8);
    let counter = log.allocate(thread, 8);
    let size = log.allocate(thread, left.rows * 4);
    let found = (left.rows * log.random.between(10, 120) / 100).max(1);
    let (first, second) = (found * 4, found * 4);
    let pairs = vec![log.allocate(thread, first), log.allocate(thread, second)];
    log.free_backwards(thread, vec![counter, size]);
    log.work(4000);
    log.free(thread, hash);
    let made = gather(log, thread, &left, found);
    log.free_backwards(thread, pairs);
    drop_table(log, thread, left);
    made
}

fn group(log: &mut Log, thread: u32, from: Table) -> Table {
    let groups = log.random.spread(2, 14).min(from.rows);
    let hash = log.allocate(thread, from.rows * 2 * 4);
    let keys = log.allocate(thread, groups * 8);
    let mut partial = Vec::new();
    for _ in 0..log.random.between(2, 8) {
        partial.push(log.allocate(thread, groups * 8));
        partial.push(log.allocate(thread, groups.div_ceil(512) * 64));
    }
    log.work(3000);
    let made = table(log, thread, groups, 3);
    log.free_backwards(thread, partial);
    log.free_backwards(thread, vec![hash, keys]);
    drop_table(log, thread, from);
    made
}

fn sort(log: &mut Log, thread: u32, from: Table) -> Table {
    let order = log.allocate(thread, from.rows * 4);
    let keys = log.allocate(thread, from.rows * 8);
    let radix = log.allocate(thread, from.rows * 12 + 4096);
    log.work(2500);
    log.free(thread, radix);
    let made = gather(log, thread, &from, from.rows);
    log.free_backwards(thread, vec![order, keys]);
    drop_table(log, thread, from);
    made
}
