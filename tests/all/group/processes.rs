//! Ranks as processes, which the environment describes as a launcher does.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};

use egmem_tests::child;

use super::*;

/// A rank in a process of its own; killed when dropped.
struct Rank {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Rank {
    fn start(environment: &[(&str, String)], machine: &str) -> Self {
        let mut child = child(module_path!(), "child_rank");
        for (name, _) in std::env::vars() {
            let launchers = [
                "OMPI_",
                "PMIX_",
                "SLURM_",
                "EGMEM_RANK",
                "RANK",
                "WORLD_SIZE",
            ];
            if launchers.iter().any(|start| name.starts_with(start)) {
                child.env_remove(name);
            }
        }
        child.env("EGMEM_TEST_GROUP", machine);
        child.envs(environment.iter().map(|(name, value)| (name, value)));
        let mut child = { child }
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Returns the next line that the rank has for its test.
    fn says(&mut self) -> String {
        for line in self.lines.by_ref() {
            if let Some((_, text)) = line.unwrap().split_once("rank says ") {
                return text.to_owned();
            }
        }
        panic!("the rank has ended without a word");
    }

    fn go(&mut self) {
        self.child
            .stdin
            .as_mut()
            .unwrap()
            .write_all(b"go\n")
            .unwrap();
    }

    fn end(mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Run as a process of its own by the tests below.
#[test]
fn child_rank() {
    let Ok(machine) = std::env::var("EGMEM_TEST_GROUP") else {
        return;
    };
    let driver = Driver::simulated(Machine::preset(&machine).unwrap()).unwrap();
    let mut ranks = match group::from_env(LONG) {
        Ok(ranks) => ranks,
        Err(error) => return println!("rank says {error}"),
    };
    let rank = ranks.rank();
    let own = Shared::from(buffer(&driver, 1, 1000 + u64::from(rank)));
    println!("rank says met");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let memory = match group::gather_memory(&mut *ranks, Some(own), &driver) {
        Ok(memory) => memory,
        Err(error) => return println!("rank says {error}"),
    };
    for other in (0..memory.size()).filter(|other| *other != rank) {
        let mapped = memory.rank(other).unwrap();
        assert_eq!(mapped.get(0), Ok(1000 + u64::from(other)));
        mapped
            .put(8 * (1 + u64::from(rank)), u64::from(rank))
            .unwrap();
    }
    if ranks.all_gather(&[]).is_ok() {
        let own = memory.memory().unwrap().buffer().unwrap();
        for other in (0..u64::from(memory.size())).filter(|other| *other != u64::from(rank)) {
            assert_eq!(own.get(8 * (1 + other)), Ok(other));
        }
    }
    println!("rank says mapped by {}", memory.via());
    std::io::stdin().read_line(&mut String::new()).unwrap();
    drop(memory);
    println!("rank says held {}", driver.sim().unwrap().held());
}

/// Starts ranks as a launcher does: the environment of each.
fn start(size: u32, environment: impl Fn(u32) -> String, machine: &str) -> Vec<Rank> {
    let start = |rank| {
        let environment = environment(rank);
        let pairs = environment
            .split(' ')
            .filter_map(|pair| pair.split_once('='));
        let pairs: Vec<_> = pairs
            .map(|(name, value)| (name, value.to_owned()))
            .collect();
        Rank::start(&pairs, machine)
    };
    (0..size).map(start).collect()
}

fn exchange(size: u32, environment: impl Fn(u32) -> String) {
    let mut ranks = start(size, environment, "gh200");
    for rank in &mut ranks {
        assert_eq!(rank.says(), "met");
        rank.go();
    }
    for rank in &mut ranks {
        assert_eq!(rank.says(), "mapped by POSIX fd");
        rank.go();
    }
    for mut rank in ranks {
        assert!(rank.says().starts_with("held"));
        rank.end();
    }
}

#[test]
fn processes_of_each_launcher_map_each_others_memory() {
    let id = std::process::id();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("group");
    exchange(4, |rank| by_variables(rank, 4, &path));
    exchange(3, |rank| {
        format!(
            "RANK={rank} WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_ADDR=localhost MASTER_PORT=29500 TORCHELASTIC_RUN_ID={id}"
        )
    });
    exchange(2, |rank| {
        format!(
            "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE={id}"
        )
    });
    exchange(2, |rank| {
        format!(
            "SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_JOB_ID={id} SLURM_STEP_ID=0"
        )
    });
}

/// The environment of a rank that meets others at `path`.
fn by_variables(rank: u32, size: u32, path: &Path) -> String {
    let address = path.display();
    format!("EGMEM_RANK={rank} EGMEM_SIZE={size} EGMEM_ADDRESS=unix:{address}")
}

#[test]
fn a_rank_killed_before_it_gathers_fails_all_alike() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("group");
    let environment = |rank| by_variables(rank, 4, &path);
    for killed in [3, 0] {
        let mut ranks = start(4, environment, "gh200");
        for rank in &mut ranks {
            assert_eq!(rank.says(), "met");
        }
        drop(ranks.remove(killed));
        ranks.iter_mut().for_each(Rank::go);
        let expected = format!("rank {killed} of 4 is missing");
        for mut rank in ranks {
            assert_eq!(rank.says(), expected);
            rank.end();
        }
    }
}

#[test]
fn mappings_outlive_a_killed_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("group");
    let environment = |rank| by_variables(rank, 3, &path);
    let mut ranks = start(3, environment, "gh200x4");
    for rank in &mut ranks {
        assert_eq!(rank.says(), "met");
        rank.go();
    }
    for rank in &mut ranks {
        assert_eq!(rank.says(), "mapped by POSIX fd");
    }
    drop(ranks.remove(1));
    for mut rank in ranks {
        rank.go();
        assert!(rank.says().starts_with("held"));
        rank.end();
    }
}

#[test]
fn a_set_that_is_not_complete_is_named() {
    let mut rank = Rank::start(&[("RANK", "0".into())], "gh200");
    let text = rank.says();
    assert!(
        text.contains("torchrun: RANK is set and WORLD_SIZE is not"),
        "{text}"
    );
    rank.end();
}
