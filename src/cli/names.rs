//! The commands about names: `egmem ls`, `egmem watch` and `egmem delete`.

use std::time::Duration;
use std::{future, io, thread};

use clap::Args;
use comfy_table::{ContentArrangement, Table, presets};
use egmem::driver::{Access, Location};
use egmem::exchange::protocol::Entry;
use egmem::exchange::{Address, Client, Error, Refusal, Result, WatchEvent};
use egmem::size::Bytes;
use egmem::text::escape_json;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::connect::{self, Connect, block_on, default_address};
use crate::output::{DONE, STILL_HELD, complain, print, print_json, print_while_read};

/// Which names to show, and in which form.
#[derive(Args, Debug)]
pub struct Names {
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

impl Names {
    /// Connects to the server for queries.
    async fn client(&self) -> Result<Client> {
        let address = self.address.clone().map_or_else(default_address, Ok)?;
        self.connect.onlooker(&address).await
    }
}

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
        let lines = table.lines().map(|line| format!("{}\n", line.trim()));
        Ok(print(&lines.collect::<String>())?)
    }
}

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
            let mut reader_gone = std::pin::pin!(reader_gone());
            loop {
                let event = tokio::select! {
                    event = watch.recv() => event?,
                    () = &mut reader_gone => return Ok(()),
                };
                let json = || escape_json(&event_value(&event).to_string()).into_owned() + "\n";
                let text = if self.names.json {
                    json()
                } else {
                    line(&event)
                };
                if !print_while_read(&text)? {
                    return Ok(());
                }
            }
        })
    }
}

/// Ends when standard output is a pipe and its reader has closed it. Never ends for a file.
async fn reader_gone() {
    let (tell, told) = oneshot::channel();
    // A thread of its own, which nothing waits for: it ends with the process.
    let _ = thread::Builder::new().spawn(move || {
        let stdout = io::stdout();
        // Without requested events, poll reports only errors and hang-ups.
        let mut polled = [PollFd::new(&stdout, PollFlags::empty())];
        while poll(&mut polled, None) == Err(Errno::INTR) {}
        let _ = tell.send(());
    });
    if told.await.is_err() {
        future::pending().await // there is no thread: the next write reports the closed pipe
    }
}

/// Returns an event as a line for people.
fn line(event: &WatchEvent) -> String {
    match event {
        WatchEvent::Published(entry) => format!(
            "+ {}  {}  {}  {}  {}\n",
            entry.name,
            Bytes(entry.memory.len),
            places(entry),
            access(entry.memory.access),
            entry.owner,
        ),
        WatchEvent::Gone(name) => format!("- {name}\n"),
        WatchEvent::Away(why) => format!("? {why}; what to do: wait for it, or end this\n"),
        WatchEvent::Missed(count) => format!("? at least {count} events were missed\n"),
        other => format!("? {other:?}\n"),
    }
}

fn event_value(event: &WatchEvent) -> Value {
    match event {
        WatchEvent::Published(entry) => json!({"event": "published", "entry": value(entry)}),
        WatchEvent::Gone(name) => json!({"event": "gone", "name": name}),
        WatchEvent::Away(why) => json!({"event": "away", "why": why}),
        WatchEvent::Missed(count) => json!({"event": "missed", "count": count}),
        other => json!({"event": "other", "detail": format!("{other:?}")}),
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
