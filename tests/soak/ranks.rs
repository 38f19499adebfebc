//! Ranks of a group that forms again and again.

use std::sync::Arc;
use std::time::Duration;

use egmem::Buffer;
use egmem::driver::NodeId;
use egmem::exchange::group::{self, Admission, Group, GroupOptions, GroupSecret, Host};
use egmem::exchange::{Error, Result};
use fastrand::Rng;

use crate::role::{Client, Kind, say};

/// How long a rank waits for the others, and for them to leave.
const PATIENCE: Duration = Duration::from_millis(1500);

/// Runs this process's ranks until the parent wants a pause.
pub async fn join(client: &Arc<Client>) {
    let Kind::Ranks { group, ranks, size } = &client.setup.kind else {
        return;
    };
    let ranks: Vec<_> = ranks
        .iter()
        .map(|&rank| {
            let (client, group, size) = (Arc::clone(client), group.clone(), *size);
            tokio::spawn(async move { Rank::new(client, group, rank, size).run().await })
        })
        .collect();
    for rank in ranks {
        if let Err(error) = rank.await {
            say("violation", format!("a rank panicked: {error}"));
        }
    }
}

struct Rank {
    client: Arc<Client>,
    group: String,
    rank: u32,
    size: u32,
    rng: Rng,
}

impl Rank {
    fn new(client: Arc<Client>, group: String, rank: u32, size: u32) -> Self {
        Self {
            rng: Rng::with_seed(client.setup.seed ^ u64::from(rank) << 32),
            client,
            group,
            rank,
            size,
        }
    }

    async fn run(mut self) {
        while self.client.goes_on() {
            let formed = self.round().await;
            let _ = self.client.tally.note("group", formed);
            let pause = Duration::from_millis(self.rng.u64(..100));
            tokio::time::sleep(pause).await;
        }
    }

    fn options(&self) -> Result<GroupOptions> {
        let memory = Buffer::on(NodeId(0))
            .bytes(1 << 20)
            .shareable()
            .allocate(&self.client.driver)?;
        memory.put(0, mark(self.rank))?;
        let address = self.client.address();
        let admission = Admission::Secret(GroupSecret::new([7; 32])?);
        let options = Group::options(&self.group, self.rank, self.size, address, admission);
        Ok(options
            .security(self.client.security.clone())
            .host(Host::Elsewhere)
            .deadline(PATIENCE)
            .memory(memory))
    }

    async fn round(&mut self) -> group::Result<()> {
        // Now and then a rank does not come, or gives up.
        if self.rng.u32(..10) == 0 {
            tokio::time::sleep(PATIENCE).await;
        }
        let options = self.options()?;
        if self.rng.u32(..10) == 0 {
            let soon = Duration::from_millis(self.rng.u64(..50));
            let joined = tokio::time::timeout(soon, options.join(&self.client.driver)).await;
            self.client.tally.count("group join cancelled");
            drop(joined);
            return Ok(());
        }
        let join = options.join(&self.client.driver);
        let group = self.client.risk(&mut self.rng, "joining", join).await?;
        self.client
            .tally
            .count(format!("group via {}", group.via()));
        self.look(&group)?;
        self.client.brink(&mut self.rng, "joined");
        tokio::time::sleep(Duration::from_millis(self.rng.u64(..50))).await;
        if self.rng.u32(..8) == 0 {
            drop(group);
            self.client.tally.count("group dropped");
            return Ok(());
        }
        let leave = group.leave(PATIENCE);
        let left = self.client.risk(&mut self.rng, "leaving", leave).await;
        let _ = self.client.tally.note("leave", left);
        Ok(())
    }

    /// Each rank finds every rank's own mark in its memory.
    fn look(&self, group: &Group) -> Result<()> {
        for rank in 0..self.size {
            let word: u64 = match group.rank(rank) {
                Ok(memory) => memory.get(0)?,
                // It crashed before its memory was mapped.
                Err(Error::Import { .. }) => continue,
                Err(error) => return Err(error),
            };
            if word != mark(rank) {
                say(
                    "violation",
                    format!("rank {rank}'s memory begins with {word:#x}"),
                );
            }
        }
        Ok(())
    }
}

fn mark(rank: u32) -> u64 {
    0x7261_6e6b_0000_0000 | u64::from(rank)
}
