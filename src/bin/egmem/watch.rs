//! `egmem watch`: names as they appear and disappear.

use clap::Args;
use egmem::exchange::{Result, WatchEvent};
use egmem::size::Bytes;
use egmem::text::escape_json;
use serde_json::json;

use crate::connect::block_on;
use crate::names::{self, Names};
use crate::output::print_while_read;

/// `egmem watch`
#[derive(Args, Debug)]
pub struct Watch {
    #[command(flatten)]
    names: Names,
}

impl Watch {
    /// Shows events until it is ended, or its reader closes the pipe. Waits while the server is away.
    pub fn run(&self) -> Result<()> {
        block_on(async {
            let client = self.names.client().await?;
            let mut watch = client.watch(self.names.prefix.as_str()).await?;
            loop {
                let event = watch.recv().await?;
                let line = match self.names.json {
                    true => format!("{}\n", escape_json(&value(&event).to_string())),
                    false => text(&event),
                };
                if !print_while_read(&line)? {
                    return Ok(());
                }
            }
        })
    }
}

fn text(event: &WatchEvent) -> String {
    match event {
        WatchEvent::Published(entry) => format!(
            "+ {}  {}  {}  {}  {}\n",
            entry.name,
            Bytes(entry.memory.len),
            names::places(entry),
            names::access(entry.memory.access),
            entry.owner,
        ),
        WatchEvent::Gone(name) => format!("- {name}\n"),
        WatchEvent::Away(why) => format!("? {why}; what to do: wait for it, or end this\n"),
        WatchEvent::Missed(count) => format!("? at least {count} events were missed\n"),
        other => format!("? {other:?}\n"),
    }
}

fn value(event: &WatchEvent) -> serde_json::Value {
    match event {
        WatchEvent::Published(entry) => json!({"event": "published", "entry": names::value(entry)}),
        WatchEvent::Gone(name) => json!({"event": "gone", "name": name}),
        WatchEvent::Away(why) => json!({"event": "away", "why": why}),
        WatchEvent::Missed(count) => json!({"event": "missed", "count": count}),
        other => json!({"event": "other", "detail": format!("{other:?}")}),
    }
}
