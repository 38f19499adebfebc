//! Tickets: each is valid once, and for a short time.

use std::collections::HashMap;
use std::time::Instant;

use super::token;
use crate::PeerName;
use crate::Result;
use crate::account::{Charge, shrink};
use crate::protocol::Secret;

/// Values behind tickets, by key: at most one ticket for each key.
#[derive(Debug)]
pub(super) struct Tickets<T>(HashMap<u64, Ticket<T>>);

#[derive(Debug)]
struct Ticket<T> {
    token: Secret,
    peer: PeerName,
    until: Instant,
    stands_for: T,
    /// The charge against the limit on the peer's tickets.
    _charge: Charge,
}

impl<T> Default for Tickets<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> Tickets<T> {
    /// Issues a ticket for a peer, valid until then; an earlier ticket with the same key becomes invalid.
    pub fn issue(
        &mut self,
        key: u64,
        peer: &PeerName,
        until: Instant,
        stands_for: T,
        charge: Charge,
    ) -> Result<Secret> {
        let token = token::mint(key)?;
        let ticket = Ticket {
            token: token.clone(),
            peer: peer.clone(),
            until,
            stands_for,
            _charge: charge,
        };
        self.0.insert(key, ticket);
        Ok(token)
    }

    /// Returns the value of a ticket, which stays valid.
    pub fn peek(&self, token: &Secret, now: Instant) -> Option<&T> {
        let ticket = self.0.get(&token::key(token)?)?;
        (ticket.token == *token && now < ticket.until).then_some(&ticket.stands_for)
    }

    /// Uses a ticket up; returns its key, its value, and the peer that it was issued to. A wrong guess leaves
    /// the right ticket valid.
    pub fn redeem(&mut self, token: &Secret, now: Instant) -> Option<(u64, T, PeerName)> {
        let key = token::key(token)?;
        if self.0.get(&key)?.token != *token {
            return None;
        }
        let ticket = self.remove(key)?;
        (now < ticket.until).then_some((key, ticket.stands_for, ticket.peer))
    }

    /// Invalidates a ticket.
    pub fn forget(&mut self, key: u64) {
        self.remove(key);
    }

    /// Removes expired tickets.
    pub fn expire(&mut self, now: Instant) {
        self.0.retain(|_, ticket| now < ticket.until);
        shrink(&mut self.0);
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn remove(&mut self, key: u64) -> Option<Ticket<T>> {
        let ticket = self.0.remove(&key);
        shrink(&mut self.0);
        ticket
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::account::Accounts;

    const LIFE: Duration = Duration::from_secs(5);
    const PEER: PeerName = PeerName::User(1);

    fn issue<T>(tickets: &mut Tickets<T>, key: u64, until: Instant, stands_for: T) -> Secret {
        let charge = Accounts::per_peer(1, "tickets")
            .of(&PEER)
            .charge(1)
            .unwrap();
        let ticket = tickets.issue(key, &PEER, until, stands_for, charge);
        ticket.unwrap()
    }

    #[test]
    fn a_ticket_is_good_once() {
        let now = Instant::now();
        let mut tickets = Tickets::default();
        let token = issue(&mut tickets, 1, now + LIFE, "memory");
        for _ in 0..2 {
            assert_eq!(tickets.peek(&token, now), Some(&"memory"));
        }
        assert_eq!(tickets.redeem(&token, now), Some((1, "memory", PEER)));
        assert_eq!(tickets.peek(&token, now), None);
        assert_eq!(tickets.redeem(&token, now), None);
    }

    #[test]
    fn and_for_its_time() {
        let now = Instant::now();
        let mut tickets = Tickets::default();
        let token = issue(&mut tickets, 1, now + LIFE, ());
        assert_eq!(tickets.peek(&token, now + LIFE), None);
        assert_eq!(tickets.redeem(&token, now + LIFE), None);
        issue(&mut tickets, 2, now + LIFE, ());
        issue(&mut tickets, 3, now + 2 * LIFE, ());
        tickets.expire(now + LIFE);
        assert!(!tickets.is_empty());
        tickets.expire(now + 2 * LIFE);
        assert!(tickets.is_empty());
    }

    #[test]
    fn a_guess_spoils_nothing() {
        let now = Instant::now();
        let mut tickets = Tickets::default();
        let token = issue(&mut tickets, 1, now + LIFE, ());
        let guess = token::mint(1).unwrap();
        assert_eq!(tickets.peek(&guess, now), None);
        assert_eq!(tickets.redeem(&guess, now), None);
        assert_eq!(tickets.redeem(&Secret::new(b"short").unwrap(), now), None);
        assert!(tickets.redeem(&token, now).is_some());
    }

    #[test]
    fn a_second_ticket_or_the_end_of_the_lease_ends_the_first() {
        let now = Instant::now();
        let mut tickets = Tickets::default();
        let first = issue(&mut tickets, 1, now + LIFE, 1);
        let second = issue(&mut tickets, 1, now + LIFE, 2);
        assert_eq!(tickets.redeem(&first, now), None);
        tickets.forget(1);
        assert_eq!(tickets.redeem(&second, now), None);
        assert!(tickets.is_empty());
    }
}
