//! `egmem delete`: ends a name that this peer has created.

use std::time::Duration;

use clap::Args;
use egmem::exchange::{Address, Error, Refusal, Result};

use crate::connect::{self, Connect, block_on};
use crate::output::{complain, print};
use crate::status::{DONE, STILL_HELD};

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
        match deleted {
            Ok(()) => {
                print(&format!("deleted {}\n", self.name))?;
                Ok(DONE)
            }
            Err(Error::Refused {
                reason: Refusal::TimedOut,
                detail,
                ..
            }) => {
                complain(&format!(
                    "error: {} is still {}; what to do: end those programs; nobody else gets the memory \
                     meanwhile, and it goes with the last of them\n",
                    self.name,
                    if detail.is_empty() { "held" } else { &detail },
                ));
                Ok(STILL_HELD)
            }
            Err(error) => Err(error),
        }
    }
}
