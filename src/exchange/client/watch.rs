//! Watching names.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};

use super::Client;
use super::session::Notified;
use crate::protocol::{Answer, Ask, Entry, Watch as Asked};
use crate::{Error, Result};

/// An event of watched names.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum WatchEvent {
    /// A name exists, or has other memory than before.
    Published(Entry),
    /// A name is gone.
    Gone(String),
    /// At least this many events were missed, because they were not received in time or because the
    /// connection was broken: names that appeared and disappeared meanwhile are not reported. The differences
    /// between then and now follow.
    Missed(u64),
    /// The server is gone, or silent for longer than a lease, with the reason. Reported once; the watch
    /// continues when the server is back, and then reports the differences.
    Away(String),
}

/// Events about names that begin with a prefix: first all that exist, then the changes.
///
/// It survives broken connections. It keeps the client's connection open.
#[derive(Debug)]
pub struct Watch {
    client: Client,
    prefix: String,
    /// Whether the prefix is the only name.
    one_name: bool,
    notices: Receiver<Notified>,
    /// The states reported so far, so that none is reported twice.
    known: BTreeMap<String, Entry>,
    pub(super) events: VecDeque<WatchEvent>,
    /// How many events were missed before the next full listing, if one is due.
    stale: Option<u64>,
    /// Whether it was reported that the server is away.
    away: bool,
    /// Whether the names were listed since a [`Follow`](super::Follow) looked.
    pub(super) listed_anew: bool,
}

impl Client {
    /// Watches names that begin with `prefix`: first those that exist, then the changes.
    ///
    /// # Errors
    /// Those of [`list`](Self::list).
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing is left.
    pub async fn watch(&self, prefix: impl Into<String>) -> Result<Watch> {
        Watch::start(self, prefix.into()).await
    }
}

impl Watch {
    async fn start(client: &Client, prefix: String) -> Result<Self> {
        let mut watch = Self::new(client, prefix, false);
        watch.look().await?;
        watch.stale = None;
        Ok(watch)
    }

    /// Returns a watch of one name, which [`update`](Self::update) starts.
    pub(super) fn of_name(client: &Client, name: String) -> Self {
        Self::new(client, name, true)
    }

    fn new(client: &Client, prefix: String, one_name: bool) -> Self {
        Self {
            // Before the first listing, so that nothing is missed.
            notices: client.session().notices(),
            client: client.clone(),
            prefix,
            one_name,
            known: BTreeMap::new(),
            events: VecDeque::new(),
            stale: Some(0),
            away: false,
            listed_anew: false,
        }
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// Those of [`Client::list`], once the connection is closed for good.
    ///
    /// # Cancel safety
    /// No event is missed.
    pub async fn recv(&mut self) -> Result<WatchEvent> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            self.update().await?;
        }
    }

    /// Lists the names if a listing is due, or waits for one notice. Cancel safe.
    pub(super) async fn update(&mut self) -> Result<()> {
        if let Some(missed) = self.stale
            && self.look_again(missed).await?
        {
            return Ok(());
        }
        let notice = self.notices.recv().await;
        self.hear(notice)
    }

    /// Takes in the notices that have come.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        loop {
            let notice = match self.notices.try_recv() {
                Ok(notice) => Ok(notice),
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Lagged(missed)) => Err(RecvError::Lagged(missed)),
                Err(TryRecvError::Closed) => Err(RecvError::Closed),
            };
            self.hear(notice)?;
        }
    }

    fn hear(&mut self, notice: Result<Notified, RecvError>) -> Result<()> {
        match notice {
            Ok(Notified::Published(entry)) => self.published((*entry).clone()),
            Ok(Notified::Gone(name)) => self.gone(&name),
            // Repeated; and if only the session is lost, there is a connection already.
            Ok(Notified::SessionLost(why)) => {
                if self.client.session().is_down() {
                    self.away(&why);
                }
            }
            Ok(Notified::Fresh) => {
                self.away = false;
                self.stale = Some(self.stale.unwrap_or(0));
            }
            Err(RecvError::Lagged(missed)) => {
                // The missed notices may include the new connection.
                self.away &= self.client.session().is_down();
                self.stale = Some(missed);
            }
            Ok(Notified::Over) | Err(RecvError::Closed) => {
                return Err(self.client.session().down());
            }
        }
        Ok(())
    }

    /// Returns whether [`names`](Self::names) are those that exist, as far as is known.
    pub(super) const fn is_current(&self) -> bool {
        self.stale.is_none() && !self.away
    }

    /// Lists the names after `missed` notices. Returns `false` if there is no event, and a notice will report the
    /// next connection.
    async fn look_again(&mut self, missed: u64) -> Result<bool> {
        let first = self.events.len();
        let gone = self.client.session().gone();
        let done = tokio::select! {
            biased;
            done = self.look() => done,
            // A listing waits until the server is back.
            why = gone, if !self.away => {
                self.away(&why);
                return Ok(true);
            }
        };
        match done {
            Ok(()) => {}
            // The server is away again, for any error.
            Err(error) if self.client.session().is_down() => {
                if !error.is_peer_lost() {
                    self.away(&error);
                }
                return Ok(!self.events.is_empty());
            }
            // It is back already.
            Err(error) if error.is_peer_lost() && self.client.session().is_open() => {
                return Ok(true);
            }
            Err(error) => return Err(error),
        }
        self.away = false;
        self.stale = None;
        self.listed_anew = true;
        if missed > 0 {
            self.events.insert(first, WatchEvent::Missed(missed));
        }
        Ok(true)
    }

    /// Returns the names that exist, as far as [`recv`](Self::recv) has reported them.
    pub fn names(&self) -> impl Iterator<Item = &Entry> {
        self.known.values()
    }

    /// Reports once that the server is away.
    fn away(&mut self, why: &Error) {
        if !std::mem::replace(&mut self.away, true) {
            self.events.push_back(WatchEvent::Away(why.to_string()));
        }
    }

    fn covers(&self, name: &str) -> bool {
        match self.one_name {
            true => name == self.prefix,
            false => name.starts_with(&self.prefix),
        }
    }

    fn published(&mut self, entry: Entry) {
        if !self.covers(&entry.name) {
            return;
        }
        let before = self.known.insert(entry.name.clone(), entry.clone());
        if before.is_none_or(|before| before.memory != entry.memory || before.owner != entry.owner)
        {
            self.events.push_back(WatchEvent::Published(entry));
        }
    }

    fn gone(&mut self, name: &str) {
        if self.known.remove(name).is_some() {
            self.events.push_back(WatchEvent::Gone(name.into()));
        }
    }

    /// Lists everything and subscribes to notices; reports the differences.
    async fn look(&mut self) -> Result<()> {
        let (client, prefix) = (self.client.clone(), self.prefix.clone());
        let ask = Ask::Watch(Asked {
            prefix: prefix.clone(),
        });
        let Answer::Names(names) = client.again(ask, client.patience()).await? else {
            return Err(client.broken("unexpected answer to a watch"));
        };
        // Entries are sorted: a name comes before all longer names that begin with it.
        let more = names.more && !self.one_name;
        let mut now = client.pages(&prefix, names.entries, more).await?;
        now.retain(|entry| self.covers(&entry.name));
        let there: BTreeSet<_> = now.iter().map(|entry| entry.name.as_str()).collect();
        let known = self.known.keys();
        let gone: Vec<_> = known
            .filter(|name| !there.contains(name.as_str()))
            .cloned()
            .collect();
        for name in gone {
            self.gone(&name);
        }
        for entry in now {
            self.published(entry);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::tests::fake::*;
    use crate::protocol::Event;

    async fn watch(client: &Client, peer: &mut Peer) -> Watch {
        let (watch, ()) = tokio::join!(client.watch(""), async {
            let (id, _) = peer.request().await.unwrap();
            peer.answer(id, names(vec![], false)).await;
        });
        watch.unwrap()
    }

    #[tokio::test]
    async fn a_refusal_of_a_server_that_is_away_again_does_not_end_it() {
        let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
        let (client, mut peer) = fake.client(&driver).await;
        let mut watch = watch(&client, &mut peer).await;
        drop(peer);
        let (mut peer, _) = fake.greet().await;
        {
            let mut event = Box::pin(watch.recv());
            let (id, _) = tokio::select! {
                event = &mut event => panic!("{event:?}"),
                asked = peer.request() => asked.unwrap(),
            };
            // From here on there is no listing until the server is away.
            peer.refuse(id, "closing").await;
            peer.end().await;
            within(async {
                while !client.session().is_down() {
                    tokio::time::sleep(soon(2)).await;
                }
            })
            .await;
            let event = within(event).await.unwrap();
            assert!(matches!(&event, WatchEvent::Away(why) if !why.is_empty()));
        }
        let (mut peer, _) = fake.greet().await;
        let (event, ()) = within(async {
            tokio::join!(watch.recv(), async {
                let (id, _) = peer.request().await.unwrap();
                peer.answer(id, names(vec![memory.entry("x")], false)).await;
            })
        })
        .await;
        assert_eq!(event.unwrap(), WatchEvent::Published(memory.entry("x")));
        assert!(!watch.away, "the next time is told again");
    }

    #[tokio::test]
    async fn that_the_server_is_gone_is_told_while_a_look_waits_for_it() {
        let fake = Fake::at(lone_address()).await.times(20, 600_000);
        let (driver, address) = (importer(), fake.address());
        let (client, mut peer) = fake.client(&driver).await;
        let mut watch = watch(&client, &mut peer).await;
        drop(peer);
        let (mut peer, _) = fake.greet().await;
        {
            let mut event = Box::pin(watch.recv());
            tokio::select! {
                event = &mut event => panic!("{event:?}"),
                asked = peer.request() => assert!(asked.is_some()),
            }
            // The answer never comes; the next connection repeats the listing.
            drop((peer, fake));
            let event = within(event).await.unwrap();
            assert!(matches!(&event, WatchEvent::Away(why) if why.contains("nobody listens")));
        }
        let fake = Fake::at(address).await.times(20, 600_000);
        let (event, _peer) = within(async {
            tokio::join!(watch.recv(), async {
                let (mut peer, _) = fake.greet().await;
                let (id, _) = peer.request().await.unwrap();
                peer.answer(id, names(vec![Memory::new().entry("x")], false))
                    .await;
                peer
            })
        })
        .await;
        assert!(matches!(event.unwrap(), WatchEvent::Published(entry) if entry.name == "x"));
        assert!(!watch.away, "the next time is told again");
    }

    #[tokio::test]
    async fn a_first_page_out_of_order_is_refused() {
        let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
        let (client, mut peer) = fake.client(&driver).await;
        for listed in [["b", "a"], ["a", "a"]] {
            let (watch, ()) = tokio::join!(client.watch(""), async {
                let (id, _) = peer.request().await.unwrap();
                let entries = listed.map(|name| memory.entry(name));
                peer.answer(id, names(entries.into(), false)).await;
            });
            let error = watch.map(drop).unwrap_err().to_string();
            assert!(error.contains("names out of order"), "{error}");
        }
    }

    #[tokio::test]
    async fn one_that_missed_that_the_server_is_back_knows_it_all_the_same() {
        let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
        let (client, mut peer) = fake.client(&driver).await;
        let mut watch = watch(&client, &mut peer).await;
        watch.away = true;
        for _ in 0..1100 {
            peer.notice(Event::Published(memory.entry("x"))).await;
        }
        // Its answer comes after all of them.
        let (list, ()) = tokio::join!(client.list(""), async {
            let (id, _) = peer.request().await.unwrap();
            peer.answer(id, names(vec![], false)).await;
        });
        assert!(list.unwrap().is_empty());
        let (event, ()) = within(async {
            tokio::join!(watch.recv(), async {
                let (id, _) = peer.request().await.unwrap();
                peer.answer(id, names(vec![], false)).await;
            })
        })
        .await;
        assert!(matches!(event.unwrap(), WatchEvent::Missed(_)));
        assert!(!watch.away);
    }
}
