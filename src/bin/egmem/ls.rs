//! `egmem ls`: the names that a server shows this peer.

use clap::Args;
use comfy_table::{ContentArrangement, Table, presets};
use egmem::Result;
use egmem::driver::{Access, Location};
use egmem::exchange::Address;
use egmem::exchange::protocol::Entry;
use egmem::size::Bytes;
use serde_json::{Value, json};

use crate::connect::{Connect, block_on, default_address};
use crate::output::{print, print_json};

/// `egmem ls`
#[derive(Args, Debug)]
pub struct Ls {
    /// The server: unix:/path or tcp://host:port; by default this machine's service
    #[arg(value_name = "ADDRESS")]
    address: Option<Address>,
    /// Only names that begin so
    #[arg(long, default_value = "")]
    prefix: String,
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: Connect,
}

impl Ls {
    /// Shows the list.
    pub fn run(&self) -> Result<()> {
        let address = self.address.clone().unwrap_or_else(default_address);
        let entries = block_on(async {
            let client = self.connect.onlooker(&address).await?;
            let entries = client.list(&self.prefix).await;
            client.close().await;
            entries
        })?;
        if self.json {
            return print_json(&entries.iter().map(value).collect::<Vec<_>>());
        }
        if entries.is_empty() {
            return print("no names\n");
        }
        let mut table = Table::new();
        table
            .load_preset(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Disabled)
            .set_header(["NAME", "SIZE", "WHERE", "PARTS", "ACCESS", "LEASES"]);
        for entry in &entries {
            table.add_row([
                entry.name.clone(),
                Bytes(entry.memory.len).to_string(),
                places(entry),
                entry.memory.parts.len().to_string(),
                access(entry.memory.access).into(),
                entry.leases.to_string(),
            ]);
        }
        let lines: String = table
            .lines()
            .map(|line| format!("{}\n", line.trim_end().trim_start_matches(' ')))
            .collect();
        print(&lines)
    }
}

/// An entry for programs.
pub fn value(entry: &Entry) -> Value {
    json!({
        "name": entry.name,
        "bytes": entry.memory.len,
        "padded_bytes": entry.memory.padded(),
        "access": entry.memory.access,
        "locations": locations(entry),
        "parts": entry.memory.parts.len(),
        "identity": entry.memory.parts.first().map(|part| part.identity.to_string()),
        "leases": entry.leases,
    })
}

/// Where its parts lie, each place once.
fn locations(entry: &Entry) -> Vec<Location> {
    let mut locations: Vec<_> = entry
        .memory
        .parts
        .iter()
        .map(|part| part.location)
        .collect();
    locations.sort_unstable();
    locations.dedup();
    locations
}

/// The same for people.
pub fn places(entry: &Entry) -> String {
    let places: Vec<_> = locations(entry)
        .iter()
        .map(|location| match location {
            Location::HostNuma(node) => format!("node {node}"),
            other => other.to_string(),
        })
        .collect();
    places.join(", ")
}

/// Access in two letters or one.
pub fn access(access: Access) -> &'static str {
    match access {
        Access::None => "-",
        Access::Read => "r",
        Access::ReadWrite => "rw",
    }
}
