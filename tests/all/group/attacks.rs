//! What a stranger gets done at a rendezvous, and somebody on the ranks' transport: nothing but failures.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use egmem::exchange::group::Sealed;

use super::*;

/// Gathers under a seal, in which `change` happens to the contributions, and returns each rank's results of so many gathers.
fn sealed(secrets: [u8; 3], change: Change, gathers: u8) -> Vec<Result<Vec<Vec<Vec<u8>>>>> {
    let tables = Table::of(3, change);
    all(3, |rank| {
        let mut table = tables[rank as usize].lock().unwrap().take();
        let table = Forgiving(table.take().unwrap());
        let mut ranks = Sealed::new(table, &secret(secrets[rank as usize]))?;
        let mut first = None;
        let results: Vec<_> = (0..gathers)
            .filter_map(|number| match ranks.all_gather(&[number, rank as u8]) {
                Ok(all) => Some(all),
                Err(error) => {
                    first.get_or_insert(error);
                    None
                }
            })
            .collect();
        first.map_or(Ok(results), Err)
    })
}

/// The table, with which all ranks gather equally often whatever comes.
struct Forgiving(Table);

impl AllGather for Forgiving {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn size(&self) -> u32 {
        self.0.size()
    }

    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.0.all_gather(own)
    }
}

#[test]
fn sealed_contributions_arrive_and_cannot_be_read() {
    let results = sealed(
        [1; 3],
        |_, round, all| {
            // The first gather has the numbers that ranks draw.
            let shown = all
                .iter()
                .any(|bytes| bytes.len() < 4 || bytes.starts_with(&[0, 0]));
            assert!(round == 0 || !shown, "{all:?}");
        },
        2,
    );
    for result in results {
        let expected = |number: u8| (0..3).map(|rank| vec![number, rank]).collect::<Vec<_>>();
        assert_eq!(result.unwrap(), [expected(0), expected(1)]);
    }
}

#[test]
fn changed_swapped_and_cut_contributions_are_refused() {
    let changes: [(Change, u32); 4] = [
        (
            |_, round, all| {
                if round == 1 {
                    all[1][0] ^= 1
                }
            },
            1,
        ),
        (
            |_, round, all| {
                if round == 1 {
                    all.swap(1, 2)
                }
            },
            1,
        ),
        (
            |_, round, all| {
                if round == 1 {
                    all[2].pop().map(drop).unwrap_or(())
                }
            },
            2,
        ),
        (
            |_, round, all| {
                if round == 1 {
                    all[2].clear()
                }
            },
            2,
        ),
    ];
    for (change, rank) in changes {
        for result in sealed([1; 3], change, 1) {
            assert_eq!(result.unwrap_err(), Error::Forged { rank });
        }
    }
}

#[test]
fn replayed_contributions_are_refused() {
    // Of the gather before.
    static LAST: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let replay: Change = |rank, round, all| match round {
        1 if rank == 0 => *LAST.lock().unwrap() = all[2].clone(),
        2 if rank == 0 => all[2] = LAST.lock().unwrap().clone(),
        _ => {}
    };
    let results = sealed([1; 3], replay, 2);
    assert_eq!(*results[0].as_ref().unwrap_err(), Error::Forged { rank: 2 });
    assert!(results[1].is_ok());
    // Of an earlier job with the same secret: all that rank 2 sent then, its drawn number too.
    static JOB: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());
    let record: Change = |rank, _, all| {
        if rank == 0 {
            JOB.lock().unwrap().push(all[2].clone());
        }
    };
    assert!(sealed([1; 3], record, 1).iter().all(Result::is_ok));
    let replay: Change = |rank, round, all| {
        if rank == 0 {
            all[2] = JOB.lock().unwrap()[round as usize].clone();
        }
    };
    let results = sealed([1; 3], replay, 1);
    assert!(
        matches!(results[0], Err(Error::Forged { .. })),
        "{:?}",
        results[0]
    );
}

#[test]
fn ranks_with_another_secret_are_refused() {
    let results = sealed([1, 1, 2], |_, _, _| {}, 1);
    assert_eq!(*results[0].as_ref().unwrap_err(), Error::Forged { rank: 2 });
    assert!(results.iter().all(Result::is_err));
}

#[test]
fn a_transport_that_returns_too_little_is_an_error() {
    let changes: [Change; 3] = [
        |_, _, all| drop(all.pop()),
        |rank, _, all| all[rank as usize] = vec![0; 32],
        |_, _, all| all[0].clear(),
    ];
    for change in changes {
        for result in sealed([1; 3], change, 0) {
            assert!(matches!(result, Err(Error::AllGather { .. })), "{result:?}");
        }
    }
}

#[test]
fn ranks_that_get_anothers_statement_do_not_export() {
    let tables = Table::of(3, |_, round, all| {
        if round == 0 {
            all.swap(1, 2);
        }
    });
    let found = all(3, |rank| {
        let driver = fabric();
        let mut table = tables[rank as usize].lock().unwrap().take().unwrap();
        let own = Shared::from(buffer(&driver, 1, 0));
        group::gather_memory(&mut table, Some(own), &driver).unwrap_err()
    });
    for error in found {
        assert!(matches!(error, Error::AllGather { .. }), "{error:?}");
    }
}

/// A listener's address, which is free again.
fn free() -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    Address::loopback(listener.local_addr().unwrap().port())
}

fn dial(address: &Address) -> TcpStream {
    let Address::Tcp { host, port } = address else {
        panic!()
    };
    loop {
        match TcpStream::connect((host.as_str(), *port)) {
            Ok(stream) => return stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Strangers that say nothing, something else, half a hello, and a hello without the secret.
#[test]
fn strangers_take_no_ranks_place_and_keep_no_rank_out() {
    let at = free();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| rendezvous(&at, 0, 2, Some(&secret(1)), LONG));
        let mut strangers: Vec<_> = (0..200).map(|_| dial(&at)).collect();
        for (index, stranger) in strangers.iter_mut().enumerate() {
            let mut hello = b"\0\0\0\x35\xa3\x64rank\x01\x64size\x02\x65proof\x58\x20".to_vec();
            hello.extend([0; 32]);
            let sent: &[u8] = match index % 4 {
                0 => b"",
                1 => b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n",
                2 => &hello[..20],
                _ => &hello,
            };
            // It may have been hung up on.
            let _ = stranger.write_all(sent);
        }
        let wrong = rendezvous(&at, 1, 2, Some(&secret(2)), LONG).err().unwrap();
        assert!(wrong.to_string().contains("not the secret"), "{wrong}");
        let mut one = rendezvous(&at, 1, 2, Some(&secret(1)), LONG).unwrap();
        let mut zero = zero.join().unwrap().unwrap();
        let other = scope.spawn(move || zero.all_gather(b"a").unwrap());
        assert_eq!(one.all_gather(b"b").unwrap(), [b"a", b"b"]);
        other.join().unwrap();
        for mut stranger in strangers {
            stranger.set_read_timeout(Some(LONG)).unwrap();
            // All end, at the latest with the rendezvous.
            while stranger.read(&mut [0; 256]).is_ok_and(|read| read > 0) {}
        }
    });
}

/// A server that is no rank 0, and one that announces more than it may.
#[test]
fn another_server_is_recognised() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = Address::loopback(listener.local_addr().unwrap().port());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&[b'x'; 64]).unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            let mut challenge = b"\0\0\0\x28egmemgr2".to_vec();
            challenge.extend([0; 32]);
            stream.write_all(&challenge).unwrap();
            stream.read_exact(&mut [0; 57]).unwrap();
            stream.write_all(&[0xff, 0xff, 0xff, 0xff]).unwrap();
            let _ = stream.read(&mut [0; 64]);
        });
        let error = rendezvous(&at, 1, 2, Some(&secret(1)), LONG).err().unwrap();
        assert!(error.to_string().contains("not a rank 0"), "{error}");
        let error = rendezvous(&at, 1, 2, Some(&secret(1)), LONG).err().unwrap();
        assert!(matches!(error, Error::RanksMissing { .. }), "{error}");
    });
}
