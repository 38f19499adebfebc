mod random;

use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

use super::*;
use crate::driver::{Access, HandleTypes};
use crate::protocol::{Hello, Secret};
use crate::server::publication::{ProbeSlots, Publication};
use crate::server::quota::Quota;
use crate::share::{BootId, Description};
use crate::{Limits, Owner};

const LIFE: Duration = Duration::from_secs(30);

fn peer(n: u32) -> PeerName {
    PeerName::User(n)
}

/// A state for so many leases of each peer, with the publications 0 to 9.
fn state(leases_per_peer: usize) -> ServerState {
    let limits = Limits {
        leases_per_peer,
        ..Limits::default()
    };
    let mut state = ServerState {
        quota: Quota::new(&limits, 1 << 20),
        ..ServerState::default()
    };
    (0..10).for_each(|id| publish(&mut state, id));
    state
}

fn publish(state: &mut ServerState, id: u64) {
    let publication = Publication {
        id,
        name: id.to_string().into(),
        memory: Mutex::new(None),
        owner: Owner::Server,
        parts: 0,
        handle_types: HandleTypes::NONE,
        exports: TaskTracker::new(),
        changed: Notify::new(),
        left_by_dead: AtomicBool::default(),
        left_held: OnceLock::new(),
    };
    let description = Description {
        len: 64,
        offset: None,
        access: Access::ReadWrite,
        parts: Vec::new(),
    };
    let registered = Registered {
        publication: Arc::new(publication),
        description: Arc::new(description),
        peers: PeerList::anyone(),
        closing: false,
        until: None,
        probes: ProbeSlots::between(64, 1 << 20),
        holders: Holders::default(),
        counted: None,
    };
    state.publications.insert(id, registered);
}

fn session(state: &ServerState, id: u64, peer: PeerName) -> Arc<ServerSession> {
    let counted = state.quota.count(&peer, What::Session, 1).unwrap();
    Arc::new(ServerSession::new(id, peer, counted).unwrap())
}

fn open(state: &mut ServerState, id: u64, peer: PeerName) -> Arc<ServerSession> {
    let session = session(state, id, peer);
    state.open(Arc::clone(&session));
    session
}

fn grant(
    state: &mut ServerState,
    session: &ServerSession,
    publication: u64,
    now: Instant,
) -> Result<u64, Refused> {
    let granted = state.grant(session, publication, false, None, now)?;
    Ok(granted.0)
}

fn states(state: &ServerState, publication: u64) -> Vec<HolderState> {
    let holders = state.holders(publication).0.into_iter();
    holders.map(|holder| holder.state).collect()
}

#[test]
fn tokens_differ_and_name_their_session() {
    let mut state = state(usize::MAX);
    let [_, eight] = [7, 8].map(|id| open(&mut state, id, peer(1)));
    let found = |token: &[u8]| {
        let hello = Hello {
            magic: String::new(),
            oldest: 0,
            newest: 0,
            boot: BootId::from_bytes([0; 16]),
            resume: Secret::new(token),
            agent: String::new(),
            moves: false,
            fabric: false,
        };
        state.session_of(&hello).map(|session| session.id)
    };
    let token = eight.token.expose();
    assert_eq!(found(token), Some(8));
    for at in [0, 7, 8, 39] {
        let mut other = token.to_vec();
        other[at] ^= 15;
        assert_eq!(found(&other), None, "{at}");
    }
    for short in [&[][..], &token[..8], &token[..39]] {
        assert_eq!(found(short), None);
    }
}

#[test]
fn a_lease_lives_while_its_session_does() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let one = open(&mut state, 1, peer(1));
    let (lease, place) = state.grant(&one, 7, true, None, now).unwrap();
    assert_eq!(place, Some(64));
    assert_eq!(state.lease(1, lease).unwrap().probe, place);
    assert!(state.lease(2, lease).is_none());
    assert!(state.is_attached(1) && !state.is_attached(2));
    assert!(state.detach(1, now + LIFE).is_none() && !state.is_attached(1));
    assert!(state.expire(now + LIFE / 2).is_empty());
    assert!(state.attach(1));
    let ended = state.expire(now + 2 * LIFE);
    assert!(ended.is_empty(), "it is connected");
    assert_eq!(state.count(7), 1);
}

#[test]
fn a_silent_holders_release_is_unconfirmed_until_it_speaks() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let one = open(&mut state, 1, peer(1));
    let lease = grant(&mut state, &one, 7, now).unwrap();
    state.detach(1, now + LIFE);
    assert_eq!(state.deadlines.first(), Some(now + LIFE));
    assert_eq!(state.expire(now + LIFE).len(), 1);
    assert!(state.sessions.is_empty());
    assert_eq!((state.count(7), state.deadlines.first()), (0, None));
    assert_eq!(
        (states(&state, 7), state.expired),
        (vec![HolderState::Expired], 1)
    );
    assert!(!state.attach(1), "the session is no more");
    assert!(state.lease(1, lease).is_none());
    // Another peer cannot release it; the first can, from a new session.
    let [other, first] = [(3, 2), (2, 1)].map(|(id, who)| open(&mut state, id, peer(who)));
    assert!(!state.release(&other, lease));
    assert!(state.release(&first, lease));
    assert!(states(&state, 7).is_empty());
}

#[test]
fn an_expired_lease_is_forgotten_with_its_process_and_a_live_one_is_not() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let process = HolderProcess::of(std::process::id()).unwrap();
    let one = open(&mut state, 1, peer(1));
    let [_, unknown] = [Some(process.clone()), None]
        .map(|process| state.grant(&one, 7, false, process, now).unwrap().0);
    state.process_ended(&process);
    assert_eq!(state.count(7), 2, "it is not followed");
    state.end_session(1);
    state.expire(now);
    state.process_ended(&process);
    assert_eq!(state.holders(7).0.len(), 1);
    assert!(state.is_held(7));
    let publication = &state.publications[&7].publication;
    assert!(publication.left_by_dead.load(Relaxed));
    let two = open(&mut state, 2, peer(1));
    assert!(state.release(&two, unknown));
    assert!(!state.is_held(7));
}

#[test]
fn nobody_knows_whether_a_later_local_session_is_the_silent_holder() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let one = open(&mut state, 1, PeerName::Local);
    let lease = grant(&mut state, &one, 7, now).unwrap();
    state.detach(1, now);
    state.expire(now);
    let two = open(&mut state, 2, PeerName::Local);
    assert!(!state.release(&two, lease));
    assert_eq!(states(&state, 7), [HolderState::Expired]);
    // A live lease is released by its own session.
    let lease = grant(&mut state, &two, 8, now).unwrap();
    assert!(state.release(&two, lease));
}

#[test]
fn only_its_session_releases_a_live_lease() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let [one, two] = [1, 2].map(|id| open(&mut state, id, peer(1)));
    let lease = grant(&mut state, &one, 7, now).unwrap();
    assert!(!state.release(&two, lease));
    assert!(state.release(&one, lease));
    assert!(!state.release(&one, lease));
}

#[test]
fn a_session_that_holds_nothing_ends_with_its_connection() {
    let mut state = state(usize::MAX);
    open(&mut state, 1, peer(1));
    assert!(state.detach(1, Instant::now() + LIFE).is_some());
    assert!(state.sessions.is_empty());
}

#[test]
fn limits_are_each_peers_own() {
    let now = Instant::now();
    let mut state = state(2);
    let [one, two] = [1, 2].map(|id| open(&mut state, id, peer(1)));
    let three = open(&mut state, 3, peer(2));
    let first = grant(&mut state, &one, 7, now).unwrap();
    grant(&mut state, &two, 7, now).unwrap();
    assert_eq!(
        grant(&mut state, &one, 7, now).unwrap_err().0,
        Refusal::Limit
    );
    grant(&mut state, &three, 7, now).unwrap();
    assert!(state.release(&one, first));
    grant(&mut state, &one, 7, now).unwrap();
    state.detach(3, now);
    state.expire(now);
    assert_eq!(state.clear().count(), 2);
    let used = [What::Lease, What::Record].map(|what| state.quota.used(what));
    assert_eq!(used, [0, 0]);
    state.unpublish(7, "");
    publish(&mut state, 7);
    let one = open(&mut state, 1, peer(1));
    for limited in [false, false, true] {
        assert_eq!(grant(&mut state, &one, 7, now).is_err(), limited);
    }
    let nine = session(&state, 9, peer(1));
    let refused = grant(&mut state, &nine, 7, now).unwrap_err();
    assert_eq!(refused.0, Refusal::Expired);
}

#[test]
fn the_leases_of_a_session_are_returned_in_parts() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let one = open(&mut state, 1, peer(1));
    let mut granted: Vec<u64> = (0..5)
        .map(|_| grant(&mut state, &one, 7, now).unwrap())
        .collect();
    granted.sort_unstable();
    let after = |last| state.of_session(1, last).collect::<Vec<_>>();
    assert_eq!(after(None), granted);
    // Also if that one is gone.
    assert_eq!(after(Some(granted[1] + 1)), granted[2..]);
    assert!(after(Some(granted[4])).is_empty());
    assert_eq!(state.of_session(2, None).count(), 0);
}

#[test]
fn a_publication_ends_with_all_its_leases() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let sessions = [1, 2, 3].map(|id| open(&mut state, id, peer(id as u32)));
    for session in &sessions {
        grant(&mut state, session, 7, now).unwrap();
    }
    state.detach(3, now);
    state.expire(now);
    state.withdraw(7, LIFE);
    use HolderState::*;
    assert_eq!(states(&state, 7), [Withdrawing, Withdrawing, Expired]);
    assert_eq!(
        sessions.each_ref().map(|session| session.waiting()),
        [1, 1, 0]
    );
    state.unpublish(7, "");
    let used = state.quota.used(What::Lease);
    assert_eq!(
        (used, state.holders(7).0.len(), state.leases.len()),
        (0, 0, 0)
    );
    // In place of the recall.
    let Some(Event::Ended { why, .. }) = sessions[0].notice() else {
        panic!("it is not told")
    };
    assert_eq!(why.reason, Refusal::Closing.word());
}

#[test]
fn notices_of_ended_leases_have_the_room_of_expired_ones() {
    let now = Instant::now();
    let mut state = state(2);
    let [one, two] = [1, 2].map(|id| open(&mut state, id, peer(1)));
    grant(&mut state, &one, 7, now).unwrap();
    grant(&mut state, &two, 7, now).unwrap();
    state.detach(2, now);
    state.expire(now);
    let count = || state.quota.count(&peer(1), What::Record, 1).ok();
    let _others: Vec<_> = std::iter::from_fn(count).collect();
    state.unpublish(7, "");
    assert!(matches!(one.notice(), Some(Event::Ended { .. })));
}

#[test]
fn not_every_expired_holder_is_remembered_but_all_are_counted() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let since = |session| now + Duration::from_secs(session);
    for id in 0..MAX_EXPIRED as u64 + 5 {
        let session = open(&mut state, id, peer(1));
        grant(&mut state, &session, 7, since(id)).unwrap();
        state.detach(id, since(id));
        state.expire(since(id));
    }
    let (list, more) = state.holders(7);
    assert_eq!((list.len(), more), (MAX_EXPIRED, 5));
    assert_eq!(list[0].since, since(5), "the oldest are forgotten");
    assert_eq!(state.leases.len(), MAX_EXPIRED);
    let last = open(&mut state, u64::MAX, peer(1));
    for lease in list {
        assert!(state.release(&last, lease.lease));
    }
    assert!(state.is_held(7), "five may have it mapped");
}

#[test]
fn a_process_is_waited_for_only_while_a_lease_of_it_is_followed() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let process = HolderProcess::without(1);
    let one = open(&mut state, 1, peer(1));
    let grant = |state: &mut ServerState| {
        let granted = state.grant(&one, 7, false, Some(process.clone()), now);
        granted.unwrap().0
    };
    let followed = |state: &ServerState| state.followed.keys().cloned().collect::<Vec<_>>();
    let [first, second] = [(); 2].map(|()| grant(&mut state));
    assert!(followed(&state).is_empty(), "it has a connection");
    state.detach(1, now + LIFE);
    assert_eq!(followed(&state), std::slice::from_ref(&process));
    assert!(state.release(&one, first));
    assert_eq!(followed(&state), std::slice::from_ref(&process));
    assert!(state.release(&one, second));
    assert!(followed(&state).is_empty());

    let third = grant(&mut state);
    state.detach(1, now + LIFE);
    assert_eq!(followed(&state), std::slice::from_ref(&process));
    // Its connection reports its state again, and a process that has ended had passed it on.
    assert!(state.attach(1));
    state.process_ended(&process);
    assert!(followed(&state).is_empty() && state.lease(1, third).is_some());
    state.detach(1, now + LIFE);
    state.process_ended(&process);
    assert!(followed(&state).is_empty() && !state.is_held(7));
}

#[test]
fn leases_that_are_recalled_alone_end_in_the_order_of_their_times() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let one = open(&mut state, 1, peer(1));
    let leases = [(); 3].map(|()| grant(&mut state, &one, 7, now).unwrap());
    let at = |seconds| now + Duration::from_secs(seconds);
    for (lease, seconds) in [(0, 30), (1, 10), (2, 20), (1, 25)] {
        state.recall(leases[lease], LIFE, Some(at(seconds)));
    }
    assert_eq!(state.deadlines.first(), Some(at(20)));
    state.expire(at(19));
    let live = |state: &ServerState| leases.map(|lease| state.lease(1, lease).is_some());
    assert_eq!(live(&state), [true; 3]);
    state.expire(at(20));
    assert_eq!(live(&state), [true, true, false]);
    state.expire(at(25));
    assert_eq!(live(&state), [true, false, false]);
    assert!(state.release(&one, leases[0]));
    assert!(state.deadlines.0.is_empty());
}

#[test]
fn an_earlier_recall_stands_and_a_peer_on_the_list_again_keeps_its_lease() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let sessions = [1, 2].map(|id| open(&mut state, id, peer(id as u32)));
    let leases = sessions.map(|session| grant(&mut state, &session, 7, now).unwrap());
    state.set_peers(7, PeerList::nobody(), LIFE);
    let first = state.deadlines.first().unwrap();
    state.set_peers(7, PeerList::nobody(), 2 * LIFE);
    assert_eq!(state.deadlines.first(), Some(first));
    assert!(state.recalled(leases[0]).unwrap() <= LIFE);
    state.set_peers(7, PeerList::only(peer(2)), LIFE);
    assert_eq!(state.recalled(leases[1]), None);
    state.expire(first);
    use HolderState::*;
    assert_eq!(states(&state, 7), [Held, Expired]);
}

#[test]
fn no_recall_of_a_returned_lease_is_kept() {
    let mut state = state(9);
    let holder = open(&mut state, 1, peer(1));
    let now = Instant::now();
    let leases = [(); 3].map(|()| grant(&mut state, &holder, 7, now).unwrap());
    state.withdraw(7, LIFE);
    for (returned, lease) in (1..).zip(leases) {
        assert!(state.release(&holder, lease));
        assert_eq!(holder.waiting(), 3 - returned);
    }
}

#[test]
fn the_leases_of_a_session_that_has_ended_expire_in_parts() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let [one, other] = [(1, 1), (2, 2)].map(|(id, who)| open(&mut state, id, peer(who)));
    let granted = |_| grant(&mut state, &one, 7, now).unwrap();
    let leases: Vec<u64> = (0..2 * AT_ONCE).map(granted).collect();
    state.detach(1, now);
    assert_eq!(state.expire(now), [(1, peer(1))]);
    let left = state.count(7);
    assert!((AT_ONCE..2 * AT_ONCE).contains(&left), "{left}");
    // Meanwhile its peer may release them from a new session, and no other peer may.
    let again = open(&mut state, 3, peer(1));
    let live = *state.live(7).last().unwrap();
    assert!(!state.release(&other, live));
    assert!(state.release(&again, live));
    for _ in 0..2 {
        assert!(state.expire(now).is_empty());
    }
    let expired = state.holders(7).0;
    assert_eq!((state.count(7), expired.len()), (0, leases.len() - 1));
    assert!(state.ending.is_empty());
}

#[test]
fn a_recall_that_is_cancelled_is_not_told() {
    let now = Instant::now();
    let mut state = state(usize::MAX);
    let one = open(&mut state, 1, peer(1));
    let lease = grant(&mut state, &one, 7, now).unwrap();
    for (closing, left) in [(false, HolderState::Held), (true, HolderState::Withdrawing)] {
        state.recall_others(7, &PeerList::nobody(), LIFE);
        assert_eq!(states(&state, 7), [HolderState::Withdrawing]);
        if closing {
            state.withdraw(7, LIFE);
        }
        state.recall_others(7, &PeerList::anyone(), LIFE);
        assert_eq!(states(&state, 7), [left]);
        assert_eq!(one.waiting(), usize::from(closing), "of lease {lease}");
        assert_eq!(state.deadlines.first(), None);
    }
}
