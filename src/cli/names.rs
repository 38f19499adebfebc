//! The commands about names: `egmem ls` and `egmem delete`.

use std::time::Duration;

use clap::Args;
use comfy_table::{ContentArrangement, Table, presets};
use egmem::driver::{Access, Location};
use egmem::exchange::protocol::Entry;
use egmem::exchange::{Address, Error, Refusal, Result};
use egmem::size::Bytes;
use serde_json::{Value, json};

use crate::connect::{self, Connect, block_on, default_address};
use crate::output::{DONE, STILL_HELD, complain, print, print_json};

/// `egmem ls`
#[derive(Args, Debug)]
pub struct Ls {
    /// The server: unix:/path or tcp://host:port; by default this machine's service
    #[arg(value_name = "ADDRESS")]
    address: Option<Address>,
    /// Only names with this prefix
    #[arg(long, default_value = "")]
    prefix: String,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: Connect,
}

impl Ls {
    /// Shows the list.
    pub fn run(&self) -> Result<()> {
        let entries = block_on(async {
            let address = self.address.clone().map_or_else(default_address, Ok)?;
            let client = self.connect.onlooker(&address).await?;
            let entries = client.list(&self.prefix).await;
            client.close().await;
            entries
        })?;
        if self.json {
            return Ok(print_json(&entries.iter().map(value).collect::<Vec<_>>())?);
        }
        if entries.is_empty() {
            return Ok(print("no names\n")?);
        }
        let mut table = Table::new();
        table
            .load_preset(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Disabled)
            .set_header([
                "NAME", "SIZE", "WHERE", "PARTS", "ACCESS", "LEASES", "OWNER",
            ]);
        for entry in &entries {
            table.add_row([
                entry.name.clone(),
                Bytes(entry.memory.len).to_string(),
                places(entry),
                entry.memory.parts.len().to_string(),
                access(entry.memory.access).into(),
                entry.leases.to_string(),
                entry.owner.to_string(),
            ]);
        }
        let lines = table.lines().map(|line| format!("{}\n", line.trim()));
        Ok(print(&lines.collect::<String>())?)
    }
}

/// `egmem delete`
#[derive(Args, Debug)]
pub struct Delete {
    /// The service: unix:/path or tcp://host:port
    #[arg(value_name = "ADDRESS")]
    address: Address,
    /// The memory's name
    #[arg(value_name = "NAME", value_parser = connect::name)]
    name: String,
    /// Wait this many seconds for its holders, which are asked at once to release it. The service may wait
    /// less
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    wait: u64,
    #[command(flatten)]
    connect: Connect,
}

impl Delete {
    /// Deletes the name and reports the result.
    pub fn run(&self) -> Result<u8> {
        let deleted = block_on(async {
            let client = self.connect.onlooker(&self.address).await?;
            let wait = Duration::from_secs(self.wait);
            let deleted = client.delete(self.name.as_str(), wait).await;
            client.close().await;
            deleted
        });
        if let Err(Error::Refused { reason, detail, .. }) = &deleted
            && *reason == Refusal::TimedOut
        {
            let still = if detail.is_empty() { "held" } else { detail };
            complain(&format!(
                "error: {} is still {still}; what to do: end those programs; nobody else gets the memory \
                 meanwhile, and it goes with the last of them\n",
                self.name,
            ));
            return Ok(STILL_HELD);
        }
        deleted?;
        print(&format!("deleted {}\n", self.name))?;
        Ok(DONE)
    }
}

/// Returns an entry as JSON.
fn value(entry: &Entry) -> Value {
    json!({
        "name": entry.name,
        "bytes": entry.memory.len,
        "offset": entry.memory.offset,
        "padded_bytes": entry.memory.padded(),
        "access": entry.memory.access,
        "locations": entry.memory.locations(),
        "parts": entry.memory.parts.len(),
        "identity": entry.memory.parts.first().map(|part| part.identity.to_string()),
        "leases": entry.leases,
        "owner": entry.owner.peer().map(ToString::to_string),
    })
}

/// Formats the locations of its parts.
fn places(entry: &Entry) -> String {
    let places = entry.memory.locations();
    let places = places.iter().map(|place| match place {
        Location::HostNuma(node) => format!("node {node}"),
        other => other.to_string(),
    });
    places.collect::<Vec<_>>().join(", ")
}

/// Formats access as one or two letters.
fn access(access: Access) -> &'static str {
    match access {
        Access::None => "-",
        Access::Read => "r",
        Access::ReadWrite => "rw",
    }
}
