//! Gathers at the limits: the largest group of one peer, and ranks that are refused.

use super::gathers::{barrier, brought, bytes, number};
use super::*;
use crate::Limits;
use crate::account::{self, Account, Accounts, CONNECTION, Charge, SESSION};
use crate::protocol::{Ask, Brought, Gather, Incomplete, MAX_GATHER_TOTAL, Operation};

/// Ranks of one peer, charged as a server charges them.
struct Crowd {
    story: Story,
    round: u64,
    size: u32,
    accounts: Arc<Accounts>,
    account: Arc<Account>,
    /// Of connections, sessions and ranks.
    _kept: Vec<Charge>,
}

impl Crowd {
    /// As many ranks as the limits allow; each has brought `memory`.
    fn new(limits: &Limits, memory: &Description) -> Self {
        let size = limits.group_size;
        let accounts = Accounts::new(limits);
        let account = accounts.of(&PeerName::certificate("node").unwrap());
        let mut story = Story::new(Rules::new(limits, SECOND));
        let join = ask(0, size);
        let kept = account::join(&Join {
            memory: Some(memory.clone()),
            ..join
        });
        let each = CONNECTION + SESSION + kept;
        let kept = (0..size).map(|_| account.charge(each).unwrap());
        let kept = kept.collect();
        let round = story.complete(size);
        Self {
            story,
            round,
            size,
            accounts,
            account,
            _kept: kept,
        }
    }

    /// All ranks enter and get their answers; the most pages possible are being written to each of them.
    fn gather(&mut self, of: u64, operation: &Operation) {
        let mut requests = Vec::new();
        let mut last = 0;
        for session in 0..self.size {
            let ask = number(self.round, of, operation.clone());
            let charge = self.account.charge(account::gather(&ask)).unwrap();
            let ask = Ask::Gather(ask);
            requests.push(self.account.charge(account::request(&ask)).unwrap());
            let Ask::Gather(ask) = ask else { continue };
            last += 1;
            let (story, waiter) = (&mut self.story, 1_000_000 * of + last);
            let rounds = &mut story.rounds;
            rounds.gather(
                at(of),
                waiter,
                session.into(),
                ask,
                Vec::new(),
                Some(charge),
            );
            story.take();
        }
        let mut page = self.story.told[&(1_000_000 * of + last)].clone();
        if let Told::Agreed(_) = page {
            let ask = Gather {
                first: Some(0),
                ..barrier(self.round, of)
            };
            let waiter = self.story.gather(at(of), 0, ask);
            page = self.story.told[&waiter].clone();
        }
        let Told::Members(roster, page) = page else {
            panic!("{}", shown(Some(&page)));
        };
        let frame = 2 * roster.reply(page, u64::MAX).len();
        // The charges of earlier results end with the earlier answers.
        self.story.told.clear();
        let frames: Vec<_> = (0..self.size).map(|_| self.account.charge(frame)).collect();
        let before = self.accounts.used();
        assert!(
            frames.iter().all(Result::is_ok),
            "of {frame} bytes each: {before}"
        );
        // Answers to slow ranks are still being written when others enter the next gather.
        let given = account::gather(&number(self.round, of, operation.clone()));
        let next: Vec<_> = (0..self.size).map(|_| self.account.charge(given)).collect();
        let kept = self.accounts.used();
        assert!(
            next.iter().all(Result::is_ok),
            "of {given} bytes each: {kept}"
        );
    }
}

#[test]
fn the_largest_group_of_one_peer_gathers_as_much_as_is_allowed() {
    let mut large = memory();
    large.parts = (0..64_u64)
        .map(|allocation| {
            let mut part = large.parts[0];
            part.identity.allocation = allocation;
            part
        })
        .collect();
    large.len = 64 << 21;
    let mut crowd = Crowd::new(&Limits::default(), &large);
    let most = bytes(7, MAX_GATHER_TOTAL / crowd.size as usize);
    let memory = Operation::Memory(Brought {
        memory: Some(large),
        fabric: vec![Secret::new(&[7; 64]).unwrap(); 64],
    });
    for (of, operation) in [(1, &most), (2, &most), (3, &memory), (4, &memory)] {
        crowd.gather(of, operation);
    }
    assert_eq!(crowd.size, 1024);
}

#[test]
fn more_bytes_than_a_gather_may_have_fail_it_for_all_at_the_first_entry() {
    let mut story = Story::new(Rules {
        gather_bytes: 30,
        ..Rules::default()
    });
    let round = story.complete(3);
    let waiters = [0, 1, 2].map(|session| {
        let ask = number(round, 1, bytes(0, 11));
        story.gather(at(1), session, ask)
    });
    for waiter in waiters {
        let why = incomplete(&story, waiter);
        assert_eq!((why.reason.as_str(), &why.ranks[..]), ("limit", &[0][..]));
        assert!(why.detail.contains("33") && why.detail.contains("30"));
    }
    for session in [0, 1, 2] {
        let waiter = story.gather(at(1), session, number(round, 2, bytes(0, 10)));
        assert_eq!(story.waits(waiter), session < 2);
    }
}

fn incomplete(story: &Story, waiter: Waiter) -> Arc<Incomplete> {
    match story.told.get(&waiter) {
        Some(Told::Incomplete(why)) => Arc::clone(why),
        other => panic!("{}", shown(other)),
    }
}

#[test]
fn a_rank_that_a_limit_refuses_fails_the_gather_for_all() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    let first = story.gather(at(1), 0, number(round, 1, brought()));
    let refuse = |story: &mut Story, session, of| {
        let ask = barrier(round, of);
        let told = story
            .rounds
            .refuse_gather(at(1), session, &ask, "9 bytes".into());
        story.take();
        told
    };
    let told = refuse(&mut story, 2, 1);
    assert!(
        matches!(told, Told::Incomplete(_)),
        "{}",
        shown(Some(&told))
    );
    let late = story.gather(at(2), 1, number(round, 1, brought()));
    for waiter in [first, late] {
        let why = incomplete(&story, waiter);
        assert_eq!((why.reason.as_str(), &why.ranks[..]), ("limit", &[2][..]));
        assert_eq!(why.detail, "rank 2: 9 bytes");
    }
    // The next call is a new one, and a session without a seat in the round changes nothing.
    let next = [0, 1].map(|session| story.gather(at(3), session, barrier(round, 2)));
    let told = refuse(&mut story, 7, 2);
    assert!(matches!(told, Told::Refused(_)), "{}", shown(Some(&told)));
    let last = story.gather(at(3), 2, barrier(round, 2));
    story.passed(&[next[0], next[1], last]);
    let told = refuse(&mut story, 2, 2);
    assert!(matches!(told, Told::Done), "it has completed");
}
