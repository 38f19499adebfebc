//! `egmem ls`: the names that a server shows to this peer.

use clap::Args;
use comfy_table::{ContentArrangement, Table, presets};
use egmem::exchange::Result;
use egmem::size::Bytes;

use crate::connect::block_on;
use crate::names::{Names, access, places, value};
use crate::output::{print, print_json};

/// `egmem ls`
#[derive(Args, Debug)]
pub struct Ls {
    #[command(flatten)]
    names: Names,
}

impl Ls {
    /// Shows the list.
    pub fn run(&self) -> Result<()> {
        let entries = block_on(async {
            let client = self.names.client().await?;
            let entries = client.list(&self.names.prefix).await;
            client.close().await;
            entries
        })?;
        if self.names.json {
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
        let lines: String = table
            .lines()
            .map(|line| format!("{}\n", line.trim_end().trim_start_matches(' ')))
            .collect();
        Ok(print(&lines)?)
    }
}
