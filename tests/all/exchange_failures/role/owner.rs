//! An owner, which publishes.

use std::collections::HashMap;
use std::fs::File;
use std::time::Duration;

use egmem::driver::{Access, Location};
use egmem::exchange::server::{HolderState, Published};
use egmem::exchange::{Error, PeerList, Result, Server};
use egmem::proof;
use egmem::share::Shared;
use egmem::{Buffer, Driver};
use tokio::sync::mpsc;

use super::{Words, bytes, gone, limits, reply, say, security};
use crate::exchange_failures::harness::{Setup, patience};

pub async fn owner(
    setup: &Setup,
    driver: &Driver,
    commands: &mut mpsc::Receiver<String>,
) -> Result<()> {
    let options = Server::options()
        .listen(setup.address.parse()?)
        .security(security(setup)?)
        .heartbeat(setup.heartbeat)
        .lease(setup.lease)
        .limits(limits(setup));
    // With few fds each address counts.
    let server = options.local_socket(setup.fds.is_none()).start().await?;
    let mut hoard = Vec::new();
    let mut names: HashMap<String, (Shared, Published)> = HashMap::new();
    say(
        "ready",
        format!("{} {}", server.addresses()[0], server.instance()),
    );
    while let Some(line) = commands.recv().await {
        let mut words = Words(line.split_whitespace());
        let answer = async {
            match words.word()? {
                "publish" => {
                    let name = words.word()?;
                    let shared = allocate(driver, words.number()?, words.number()?)?;
                    let who: Vec<&str> = words.0.collect();
                    let who = match who.is_empty() {
                        true => PeerList::anyone(),
                        false => PeerList::list(who)?,
                    };
                    let options = server.publish(name, shared.clone());
                    let published = options
                        .access(Access::ReadWrite)
                        .who(who)
                        .probe(true)
                        .now()?;
                    names.insert(name.to_owned(), (shared, published));
                    Ok(String::new())
                }
                "write" | "check" | "gpu" => {
                    let check = line.clone();
                    let name = words.word()?;
                    let (shared, _) = names.get(name).ok_or_else(|| gone(name))?;
                    let buffer = shared.buffer().ok_or_else(|| gone(name))?;
                    bytes(&check, driver, &**buffer, || Ok(buffer.cpu()?))
                }
                "importers" => {
                    let name = words.word()?;
                    let (_, published) = names.get(name).ok_or_else(|| gone(name))?;
                    let holders = published.importers();
                    let peers = holders.iter().map(|holder| match holder.state {
                        HolderState::Expired => format!("{}:expired", holder.peer),
                        _ => holder.peer.to_string(),
                    });
                    Ok(peers.collect::<Vec<_>>().join(" "))
                }
                "withdraw" => {
                    let name = words.word()?;
                    let deadline = Duration::from_millis(words.number()?);
                    let (_, published) = names.get(name).ok_or_else(|| gone(name))?;
                    published.withdraw(deadline).await?;
                    names.remove(name);
                    Ok(String::new())
                }
                "drop" => {
                    let name = words.word()?;
                    names.remove(name).ok_or_else(|| gone(name))?;
                    Ok(String::new())
                }
                "hoard" => {
                    let left = words.number()? as usize;
                    hoard.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
                    hoard.truncate(hoard.len().saturating_sub(left));
                    Ok(String::new())
                }
                "stats" => Ok(format!("{:?}", server.stats()).replace('\n', " ")),
                "quit" => {
                    names.clear();
                    server.close(patience()).await?;
                    Ok("quit".into())
                }
                other => Err(Error::invalid("command", other)),
            }
        };
        if !reply(answer.await) {
            break;
        }
    }
    Ok(())
}

/// Memory on GPU 0's host node that can be shared, with the pattern of `seed` in it.
fn allocate(driver: &Driver, bytes: u64, seed: u64) -> Result<Shared> {
    let node = driver.device_attribute(0, egmem::driver::DeviceAttribute::HOST_NUMA_ID)?;
    let buffer = Buffer::on(Location::HostNuma(node))
        .access_by([Location::Device(0)])
        .bytes(bytes)
        .shareable()
        .allocate(driver)?;
    proof::write_pattern(&buffer.cpu()?, seed)?;
    Ok(Shared::from(buffer))
}
