//! Options that the commands about names share: which names, of which server, in which form.

use clap::Args;
use egmem::driver::{Access, Location};
use egmem::exchange::protocol::Entry;
use egmem::exchange::{Address, Client, Result};
use serde_json::{Value, json};

use crate::connect::{Connect, default_address};

/// Which names to show, and in which form.
#[derive(Args, Debug)]
pub struct Names {
    /// The server: unix:/path or tcp://host:port; by default this machine's service
    #[arg(value_name = "ADDRESS")]
    address: Option<Address>,
    /// Only names with this prefix
    #[arg(long, default_value = "")]
    pub prefix: String,
    /// Print JSON, for programs
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    connect: Connect,
}

impl Names {
    /// Connects to the server for queries.
    pub async fn client(&self) -> Result<Client> {
        let address = self.address.clone().map_or_else(default_address, Ok)?;
        self.connect.onlooker(&address).await
    }
}

/// Returns an entry as JSON.
pub fn value(entry: &Entry) -> Value {
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
pub fn places(entry: &Entry) -> String {
    let places: Vec<_> = entry
        .memory
        .locations()
        .iter()
        .map(|location| match location {
            Location::HostNuma(node) => format!("node {node}"),
            other => other.to_string(),
        })
        .collect();
    places.join(", ")
}

/// Formats access as one or two letters.
pub fn access(access: Access) -> &'static str {
    match access {
        Access::None => "-",
        Access::Read => "r",
        Access::ReadWrite => "rw",
    }
}
