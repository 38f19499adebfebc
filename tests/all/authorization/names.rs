//! Names of others: a peer neither sees, fetches nor deletes them, and makes none without the right.

use egmem::driver::HandleType;
use egmem::exchange::Owner;
use egmem::exchange::protocol::{Answer, Ask, Fetch, List, Names};

use crate::authorization::raw::{Raw, answer};
use crate::authorization::stage::{ABSENT, HIDDEN, OTHER, OWNER, STRANGER, Stage, create, fetch};

fn wait(name: &str) -> Ask {
    let name = name.into();
    Ask::Wait { name, ms: 100 }
}

fn delete(name: &str) -> Ask {
    let name = name.into();
    Ask::Delete { name, ms: 100 }
}

#[test]
fn list_of_names_of_others() {
    let stage = Stage::new();
    let before = stage.snapshot();
    for peer in [OTHER, STRANGER] {
        let list = |raw: &mut Raw, prefix: &str| {
            let prefix = prefix.into();
            raw.ask_bytes(Ask::List(List {
                prefix,
                after: None,
            }))
        };
        let mut raw = stage.peer(peer);
        let listed = list(&mut raw, "owner.test/hid");
        assert_eq!(answer(&listed), Answer::Names(Names::default()));
        assert_eq!(listed, list(&mut raw, "owner.test/abs"));
        assert_eq!(listed, list(&mut raw, ""));
    }
    assert_eq!(stage.snapshot(), before);
    stage.end();
}

#[test]
fn wait_for_a_name_of_others() {
    let stage = Stage::new();
    for peer in [OTHER, STRANGER] {
        let raw = &mut stage.peer(peer);
        stage.nothing_comes_of(raw, wait(HIDDEN), wait(ABSENT), "timed_out");
    }
    stage.end();
}

/// A request for a name that must have this owner, if any is given.
fn expecting(name: &str, owner: Option<Owner>) -> Ask {
    match fetch(name, HandleType::Fabric) {
        Ask::Fetch(fetch) => Ask::Fetch(Fetch { owner, ..fetch }),
        other => other,
    }
}

#[test]
fn fetch_of_a_name_of_others() {
    let stage = Stage::new();
    for peer in [OTHER, STRANGER] {
        let owners = [
            None,
            Some(Owner::Server),
            Some(Owner::Peer(OWNER.parse().unwrap())),
        ];
        for owner in owners {
            let ask = |name| expecting(name, owner.clone());
            let (hidden, absent) = (ask(HIDDEN), ask(ABSENT));
            let raw = &mut stage.peer(peer);
            stage.nothing_comes_of(raw, hidden, absent, "not_found");
        }
    }
    stage.end();
}

#[test]
fn create_without_the_right() {
    let stage = Stage::new();
    let raw = &mut stage.peer(STRANGER);
    stage.nothing_comes_of(raw, create(HIDDEN), create(ABSENT), "forbidden");
    stage.end();
}

#[test]
fn create_under_a_prefix_of_others() {
    let stage = Stage::new();
    let raw = &mut stage.peer(OTHER);
    stage.nothing_comes_of(raw, create(HIDDEN), create(ABSENT), "wrong_prefix");
    stage.end();
}

#[test]
fn delete_of_a_name_of_others() {
    let stage = Stage::new();
    for peer in [OTHER, STRANGER] {
        let raw = &mut stage.peer(peer);
        stage.nothing_comes_of(raw, delete(HIDDEN), delete(ABSENT), "not_found");
    }
    stage.end();
}
