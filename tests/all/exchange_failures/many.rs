//! A thousand clients at once.

use crate::exchange_failures::crash::parts;
use crate::exchange_failures::harness::{Role, Setup, eventually};
use egmem_tests::pki::Pki;

#[test]
fn a_thousand_clients_at_once_are_all_served() {
    let (processes, each) = (4, 250);
    let folder = tempfile::tempdir().expect("a folder");
    let pki = Pki::new(folder.path(), "ca");
    let setup = Setup::owner("tcp://127.0.0.1:0", Some(&pki.issue("owner")));
    let (mut owner, ready) = Role::start(&setup);
    let address = parts(&ready).0;
    owner.must("publish weights 4000 1");

    let mut crowds: Vec<Role> = (0..processes)
        .map(|i| {
            let files = pki.issue(&format!("crowd{i}"));
            Role::start(&Setup::peer(&address, Some(&files))).0
        })
        .collect();
    let command = format!("crowd {each} weights fabric");
    crowds.iter_mut().for_each(|crowd| crowd.tell(&command));
    for crowd in &mut crowds {
        let answer = crowd.answer(&command);
        assert!(answer.is_ok(), "{answer:?}, owner: {}", owner.must("stats"));
    }
    let holders = owner.must("importers weights");
    assert_eq!(holders.split_whitespace().count(), processes * each);
    crowds.iter_mut().for_each(|crowd| crowd.tell("disperse"));
    for crowd in &mut crowds {
        crowd.answer("disperse").expect("all are let go");
    }
    assert_eq!(owner.must("importers weights"), "");
    owner.must("check weights 1");
    crowds.into_iter().for_each(Role::finish);
    eventually("sessions end", || {
        let stats = owner.must("stats");
        stats.contains("connections: 0,") && stats.contains("sessions: 0,")
    });
    owner.finish();
}
