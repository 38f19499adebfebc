//! `egmem watch`: names as they appear and disappear.

use std::{future, io, thread};

use clap::Args;
use egmem::exchange::{Result, WatchEvent};
use egmem::size::Bytes;
use egmem::text::escape_json;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde_json::json;
use tokio::sync::oneshot;

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
            let mut reader_gone = std::pin::pin!(reader_gone());
            loop {
                let event = tokio::select! {
                    event = watch.recv() => event?,
                    () = &mut reader_gone => return Ok(()),
                };
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
