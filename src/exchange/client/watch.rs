//! Watching names.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{broadcast, watch};

use super::Client;
use super::session::Link;
use crate::protocol::{Ask, Entry, Event, Watch as Asked};
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
    notices: broadcast::Receiver<Arc<Event>>,
    link: watch::Receiver<Link>,
    /// The connection on which the names were listed.
    connection: u64,
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
        let mut watch = Watch::new(self, prefix.into(), false);
        watch.refresh().await?;
        watch.stale = None;
        Ok(watch)
    }
}

impl Watch {
    /// Returns a watch that [`update`](Self::update) starts, of one name or of all with a prefix.
    pub(super) fn new(client: &Client, prefix: String, one_name: bool) -> Self {
        Self {
            // Before the first listing, so that nothing is missed.
            notices: client.session().notices(),
            link: client.session().link.subscribe(),
            connection: client.session().connection(),
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

    /// Takes in what has come, or else lists the names if a listing is due, or waits for what comes next. Cancel safe.
    pub(super) async fn update(&mut self) -> Result<()> {
        self.catch_up()?;
        if !self.events.is_empty() {
            return Ok(());
        }
        if let Some(missed) = self.stale {
            let session = self.client.session().clone();
            let connection = session.connection();
            // The listing says more than the notices before it.
            self.notices = self.notices.resubscribe();
            let refreshed = tokio::select! {
                biased;
                refreshed = self.refresh() => refreshed,
                // A listing waits until the server is back.
                why = session.away(), if !self.away => {
                    self.report_away(&why);
                    return Ok(());
                }
            };
            match refreshed {
                Ok(()) => {
                    self.connection = connection;
                    self.away = false;
                    self.stale = None;
                    self.listed_anew = true;
                    if missed > 0 {
                        self.events.push_front(WatchEvent::Missed(missed));
                    }
                    return Ok(());
                }
                // The server is away again, for any error.
                Err(error) if session.is_down() => {
                    if !error.is_peer_lost() {
                        self.report_away(&error);
                    }
                    if !self.events.is_empty() {
                        return Ok(());
                    }
                }
                // It is back already.
                Err(error) if error.is_peer_lost() && session.is_open() => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        tokio::select! {
            biased;
            notice = self.notices.recv() => match notice {
                Ok(notice) => self.handle_notice(&notice),
                Err(RecvError::Lagged(missed)) => self.stale = Some(missed),
                Err(RecvError::Closed) => {}
            },
            // The session has the sender.
            _ = self.link.changed() => self.link.mark_changed(),
        }
        Ok(())
    }

    /// Takes in the notices that have come, and the state of the connection.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        loop {
            match self.notices.try_recv() {
                Ok(notice) => self.handle_notice(&notice),
                Err(TryRecvError::Lagged(missed)) => {
                    self.stale = Some(missed);
                    break;
                }
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        if !self.link.has_changed().unwrap_or(false) {
            return Ok(());
        }
        let link = self.link.borrow_and_update().clone();
        match link {
            Link::Up(connection) => {
                self.away = false;
                if connection != self.connection {
                    self.stale.get_or_insert(0);
                }
            }
            Link::Down { .. } => {
                if let Some(why) = link.away() {
                    self.report_away(why);
                }
            }
            Link::Over(why) => return Err(why),
        }
        Ok(())
    }

    fn handle_notice(&mut self, notice: &Event) {
        match notice {
            Event::Published(entry) => self.published(entry.clone()),
            Event::Gone(gone) => self.gone(&gone.name),
            _ => {}
        }
    }

    /// Returns whether [`names`](Self::names) are those that exist, as far as is known.
    pub(super) const fn is_current(&self) -> bool {
        self.stale.is_none() && !self.away
    }

    /// Returns the names that exist, as far as [`recv`](Self::recv) has reported them.
    pub fn names(&self) -> impl Iterator<Item = &Entry> {
        self.known.values()
    }

    /// Reports once that the server is away.
    fn report_away(&mut self, why: &Error) {
        if !std::mem::replace(&mut self.away, true) {
            self.events.push_back(WatchEvent::Away(why.to_string()));
        }
    }

    fn matches(&self, name: &str) -> bool {
        if self.one_name {
            name == self.prefix
        } else {
            name.starts_with(&self.prefix)
        }
    }

    fn published(&mut self, entry: Entry) {
        if !self.matches(&entry.name) {
            return;
        }
        let limit = self.client.session().dial.options.limits.names;
        if self.known.len() >= limit && !self.known.contains_key(&entry.name) {
            // The listing that follows refuses so many.
            self.stale.get_or_insert(0);
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
    async fn refresh(&mut self) -> Result<()> {
        let client = self.client.clone();
        let prefix = self.prefix.clone();
        let names = client.names(Ask::Watch(Asked { prefix })).await?;
        // Entries are sorted: a name comes before all longer names that begin with it.
        let more = names.more && !self.one_name;
        let mut now = client.pages(&self.prefix, names.entries, more).await?;
        now.retain(|entry| self.matches(&entry.name));
        let there: BTreeSet<_> = now.iter().map(|entry| &entry.name).collect();
        let known: BTreeSet<_> = self.known.keys().cloned().collect();
        for name in known.iter().filter(|name| !there.contains(name)) {
            self.gone(name);
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
