//! A peer, which fetches.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use egmem::driver::{HandleType, Location};
use egmem::exchange::{Client, Error, LeaseState, RemoteBuffer, Result};
use egmem::{Driver, proof};
use tokio::sync::mpsc;

use super::{Words, bytes, gone, kind, limits, reply, say, security};
use crate::exchange_failures::harness::{Setup, patience};

pub async fn peer(
    setup: &Setup,
    driver: &Driver,
    commands: &mut mpsc::Receiver<String>,
) -> Result<()> {
    let options = Client::options(setup.address.parse()?)
        .security(security(setup)?)
        .limits(limits(setup));
    let options = match setup.step {
        Some(step) => options.timeout(step),
        None => options,
    };
    let client = options.connect(driver).await?;
    let mut held: HashMap<String, RemoteBuffer> = HashMap::new();
    let mut crowd = Vec::new();
    say("ready", client.instance());
    while let Some(line) = commands.recv().await {
        let mut words = Words(line.split_whitespace());
        let answer = async {
            match words.word()? {
                "fetch" => {
                    let name = words.word()?;
                    let mut fetch = client.fetch(name).access_by([Location::Device(0)]);
                    fetch = match words.word()? {
                        "fabric" => fetch.via(HandleType::Fabric),
                        "fd" => fetch.via(HandleType::PosixFd),
                        _ => fetch,
                    };
                    let buffer = fetch.probe(true).await?;
                    let text = format!(
                        "{:?} {} {:?}",
                        buffer.via(),
                        buffer.description().parts[0].identity,
                        buffer.proved()
                    );
                    held.insert(name.to_owned(), buffer);
                    Ok(text)
                }
                "write" | "check" | "gpu" => {
                    let name = words.word()?;
                    let buffer = held.get(name).ok_or_else(|| gone(name))?;
                    bytes(&line, driver, buffer, || Ok(buffer.cpu()?))
                }
                "crowd" => {
                    let (count, name) = (words.number()?, words.word()?);
                    crowd = gather(setup, driver, count, name).await?;
                    Ok(String::new())
                }
                "disperse" => {
                    for (client, buffer) in crowd.drain(..) {
                        buffer.release().await?;
                        client.clone().close().await;
                    }
                    Ok(String::new())
                }
                "state" => {
                    let name = words.word()?;
                    let buffer = held.get(name).ok_or_else(|| gone(name))?;
                    Ok(state(&buffer.state()))
                }
                "await" => {
                    let name = words.word()?;
                    let wanted = words.word()?;
                    let buffer = held.get_mut(name).ok_or_else(|| gone(name))?;
                    let begin = Instant::now();
                    while !state(&buffer.state()).starts_with(wanted) {
                        let left = patience().saturating_sub(begin.elapsed());
                        let late = |_| {
                            Error::Share(egmem::share::Error::TimedOut {
                                what: format!("{wanted}, it is {:?}", buffer.state()),
                                after: patience(),
                            })
                        };
                        tokio::time::timeout(left.min(Duration::from_millis(20)), buffer.changed())
                            .await
                            .ok();
                        if left.is_zero() {
                            return Err(late(()));
                        }
                    }
                    let state = state(&buffer.state());
                    Ok(format!("{} {state}", begin.elapsed().as_millis()))
                }
                "release" => {
                    let name = words.word()?;
                    let buffer = held.remove(name).ok_or_else(|| gone(name))?;
                    buffer.release().await.map(|()| String::new())
                }
                "drop" => {
                    let name = words.word()?;
                    held.remove(name).ok_or_else(|| gone(name))?;
                    Ok(String::new())
                }
                "list" => {
                    let entries = client.list("").await?;
                    let names = entries.iter().map(|entry| entry.name.clone());
                    Ok(names.collect::<Vec<_>>().join(" "))
                }
                "instance" => Ok(client.instance().to_string()),
                "quit" => {
                    held.clear();
                    client.clone().close().await;
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

/// So many clients of their own, all at once, each with the memory of `name`.
async fn gather(
    setup: &Setup,
    driver: &Driver,
    count: u64,
    name: &str,
) -> Result<Vec<(Client, RemoteBuffer)>> {
    let security = security(setup)?;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..count {
        let options = Client::options(setup.address.parse()?)
            .security(security.clone())
            .limits(limits(setup))
            .timeout(setup.step.unwrap_or_else(patience));
        let (driver, name) = (driver.clone(), name.to_owned());
        tasks.spawn(async move {
            let client = options.connect(&driver).await?;
            let buffer = client.fetch(name).via(HandleType::Fabric).await?;
            proof::check_pattern(&buffer.cpu()?, 1)?;
            Ok::<_, Error>((client, buffer))
        });
    }
    let mut crowd = Vec::new();
    while let Some(one) = tasks.join_next().await {
        crowd.push(one.expect("no panic")?);
    }
    Ok(crowd)
}

fn state(state: &LeaseState) -> String {
    match state {
        LeaseState::Held => "held".into(),
        LeaseState::Withdrawing { .. } => "withdrawing".into(),
        LeaseState::Lost(error) => format!("lost {}", kind(error)),
        #[allow(unreachable_patterns)]
        other => format!("{other:?}"),
    }
}
