//! `egmem watch`: names as they come and go.

use clap::Args;
use egmem::Result;
use egmem::exchange::{Address, WatchEvent};
use egmem::size::Bytes;
use serde_json::json;

use crate::connect::{Connect, block_on, default_address};
use crate::ls;
use crate::output::print;

/// `egmem watch`
#[derive(Args, Debug)]
pub struct Watch {
    /// The server: unix:/path or tcp://host:port; by default this machine's service
    #[arg(value_name = "ADDRESS")]
    address: Option<Address>,
    /// Only names that begin so
    #[arg(long, default_value = "")]
    prefix: String,
    /// Print each event as JSON on a line of its own
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: Connect,
}

impl Watch {
    /// Shows events until it is ended, or the server is.
    pub fn run(&self) -> Result<()> {
        let address = self.address.clone().unwrap_or_else(default_address);
        block_on(async {
            let client = self.connect.onlooker(&address).await?;
            let mut watch = client.watch(self.prefix.as_str()).await?;
            loop {
                let event = watch.recv().await?;
                print(&match self.json {
                    true => format!("{}\n", value(&event)),
                    false => text(&event),
                })?;
            }
        })
    }
}

fn text(event: &WatchEvent) -> String {
    match event {
        WatchEvent::Published(entry) => format!(
            "+ {}  {}  {}  {}\n",
            entry.name,
            Bytes(entry.memory.len),
            ls::places(entry),
            ls::access(entry.memory.access),
        ),
        WatchEvent::Gone(name) => format!("- {name}\n"),
        WatchEvent::Missed(count) => format!("? at least {count} events were missed\n"),
        other => format!("? {other:?}\n"),
    }
}

fn value(event: &WatchEvent) -> serde_json::Value {
    match event {
        WatchEvent::Published(entry) => json!({"event": "published", "entry": ls::value(entry)}),
        WatchEvent::Gone(name) => json!({"event": "gone", "name": name}),
        WatchEvent::Missed(count) => json!({"event": "missed", "count": count}),
        other => json!({"event": "other", "detail": format!("{other:?}")}),
    }
}
