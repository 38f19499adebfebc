//! The ranks of a launcher's job, from the environment variables that it sets.

use std::path::PathBuf;
use std::time::Duration;

use ring::digest::{SHA256, digest};

use super::{AllGather, GroupSecret, rendezvous};
use crate::share::socket::make_private;
use crate::{Address, Error, Result};

/// Meets the other ranks of this process's job, which the environment describes. The first of these that is set:
///
/// | launcher | rank and size | rank 0 listens |
/// |---|---|---|
/// | any | `EGMEM_RANK`, `EGMEM_SIZE` | `EGMEM_ADDRESS` |
/// | torchrun | `RANK`, `WORLD_SIZE` | at the port after `MASTER_PORT` of `MASTER_ADDR` |
/// | mpirun of Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | `EGMEM_ADDRESS` |
/// | srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | at a port of the job's on the first node of `SLURM_STEP_NODELIST` |
/// | a Kubernetes Job | `JOB_COMPLETION_INDEX`, `EGMEM_SIZE` | `EGMEM_ADDRESS` |
///
/// `EGMEM_ADDRESS` (`host:port` or `unix:/path`) goes before a launcher's address. If the launcher says that all ranks are
/// on this machine and there is no `EGMEM_ADDRESS`, they meet at a Unix socket of this user's. Otherwise they meet over
/// TCP and need a secret, the same in all ranks: `EGMEM_SECRET`, or the file that `EGMEM_SECRET_FILE` names. With a secret
/// each gather is sealed.
///
/// `deadline` is that of [`rendezvous`].
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument), which names the launcher and its variables, if no set is
/// complete, one is half set, or if `RANK` and `WORLD_SIZE` that torchrun has not set, or Slurm's variables, name another rank
/// of as many than a later set does. Those of [`rendezvous`].
pub fn from_env(deadline: Duration) -> Result<Box<dyn AllGather + Send>> {
    let get = |name: &str| {
        let value = std::env::var_os(name).filter(|value| !value.is_empty());
        value.map(|value| value.to_string_lossy().into_owned())
    };
    let world = World::read(&get)?;
    let secret = secret(&get)?;
    tracing::debug!(?world, "ranks meet");
    rendezvous(
        &world.address,
        world.rank,
        world.size,
        secret.as_ref(),
        deadline,
    )
}

/// The sets of variables, in the order in which they are tried: launcher, rank, size.
const SETS: [(&str, &str, &str); 5] = [
    ("EGMEM_*", "EGMEM_RANK", "EGMEM_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Kubernetes", "JOB_COMPLETION_INDEX", "EGMEM_SIZE"),
];

/// Returns an environment variable.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

#[derive(Debug, PartialEq)]
struct World {
    launcher: &'static str,
    rank: u32,
    size: u32,
    /// Where the ranks meet.
    address: Address,
}

fn wrong(launcher: &str, why: &str) -> Error {
    Error::invalid("environment", format!("{launcher}: {why}"))
}

impl World {
    fn read(get: Lookup<'_>) -> Result<Self> {
        let mut found: Vec<(&'static str, u32, u32)> = Vec::new();
        for (launcher, rank, size) in SETS {
            let is_kubernetes = launcher == "Kubernetes";
            match (get(rank), get(size)) {
                (Some(own), Some(all)) => {
                    let (own, all) = (number(launcher, rank, &own)?, number(launcher, size, &all)?);
                    if own >= all {
                        let why = format!("{rank} is {own} and {size} is {all}");
                        return Err(wrong(launcher, &why));
                    }
                    found.push((launcher, own, all));
                }
                (None, None) => {}
                // Slurm's script and Kubernetes' pods have a rank without being one of several.
                (Some(_), None) if launcher == "Slurm" || is_kubernetes && !found.is_empty() => {}
                // The size of a Kubernetes Job, whose rank is elsewhere.
                (None, Some(_))
                    if size == "EGMEM_SIZE" && (is_kubernetes || get(SETS[4].1).is_some()) => {}
                (Some(_), None) => {
                    return Err(wrong(launcher, &format!("{rank} is set and {size} is not")));
                }
                (None, Some(_)) => {
                    return Err(wrong(launcher, &format!("{size} is set and {rank} is not")));
                }
            }
        }
        let Some(&(launcher, rank, size)) = found.first() else {
            let why = "no rank: start it with torchrun, mpirun or srun, or set EGMEM_RANK, EGMEM_SIZE and EGMEM_ADDRESS";
            return Err(Error::invalid("environment", why));
        };
        agree(&found, get)?;
        Ok(Self {
            launcher,
            rank,
            size,
            address: address(launcher, size, get)?,
        })
    }
}

/// Returns the secret of the ranks, if one is set.
fn secret(get: Lookup<'_>) -> Result<Option<GroupSecret>> {
    match (get("EGMEM_SECRET"), get("EGMEM_SECRET_FILE")) {
        (Some(_), Some(_)) => {
            let why = "EGMEM_SECRET and EGMEM_SECRET_FILE are both set";
            Err(wrong("EGMEM_*", why))
        }
        (Some(secret), None) => GroupSecret::new(secret.trim_ascii_end()).map(Some),
        (None, Some(path)) => GroupSecret::from_file(path).map(Some),
        (None, None) => Ok(None),
    }
}

fn number(launcher: &str, name: &str, text: &str) -> Result<u32> {
    let number = text.trim().parse();
    number.map_err(|_| wrong(launcher, &format!("{name} is '{text}', not a number")))
}

/// Checks that no other set names another rank of as many. Launchers nest, so most sets of another size are of an outer
/// one; torchrun numbers its ranks anew, and mpirun starts its own below srun.
fn agree(found: &[(&'static str, u32, u32)], get: Lookup<'_>) -> Result<()> {
    let (launcher, rank, size) = found[0];
    let renumbers = match launcher {
        "torchrun" => get("TORCHELASTIC_RUN_ID").is_some(),
        launcher => launcher != "Slurm",
    };
    let mut others = found.iter().filter(|(_, _, all)| *all == size);
    let other = others.find(|(_, other, _)| *other != rank);
    if let Some((other, index, _)) = other.filter(|_| !renumbers) {
        let what = "set EGMEM_RANK, EGMEM_SIZE and EGMEM_ADDRESS";
        let why = format!("this is rank {rank} of {size}, but rank {index} by {other}; {what}");
        return Err(wrong(launcher, &why));
    }
    Ok(())
}

/// Returns where the ranks meet.
fn address(launcher: &str, size: u32, get: Lookup<'_>) -> Result<Address> {
    if let Some(address) = get("EGMEM_ADDRESS") {
        return address.parse();
    }
    let need = |name: &str| {
        let why = || format!("{name} is not set; set it, or EGMEM_ADDRESS, in all ranks");
        get(name).ok_or_else(|| wrong(launcher, &why()))
    };
    let here = |count: &str| get(count).and_then(|count| count.parse().ok()) == Some(size);
    // At a socket whose name all ranks of the job know.
    let on_this_machine = |parts: &[Option<String>]| {
        let text = format!("{launcher} {parts:?}");
        let hex = digest(&SHA256, text.as_bytes());
        let hex = hex.as_ref()[..12].iter().map(|byte| format!("{byte:02x}"));
        Ok(Address::Unix(
            private_folder()?.join(hex.collect::<String>()),
        ))
    };
    let tcp = |host: &str, port: u32| {
        if host.contains(':') {
            return format!("[{host}]:{port}").parse();
        }
        format!("{host}:{port}").parse()
    };
    match launcher {
        "torchrun" => {
            let (host, port) = (need("MASTER_ADDR")?, need("MASTER_PORT")?);
            if here("LOCAL_WORLD_SIZE") {
                let round = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"].map(get);
                return on_this_machine(&[&[Some(port)], &round[..]].concat());
            }
            // A number beyond the ports is refused as an address.
            tcp(
                &host,
                number(launcher, "MASTER_PORT", &port)?.saturating_add(1),
            )
        }
        "Open MPI" if here("OMPI_COMM_WORLD_LOCAL_SIZE") => {
            let job = ["PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"].map(get);
            if job == [None, None] {
                // Two jobs of this user would meet.
                need("PMIX_NAMESPACE")?;
            }
            on_this_machine(&job)
        }
        "Slurm" => {
            let (job, step) = (need("SLURM_JOB_ID")?, need("SLURM_STEP_ID")?);
            if get("SLURM_STEP_NUM_NODES").as_deref() == Some("1") {
                return on_this_machine(&[Some(job), Some(step)]);
            }
            // The highest ports, as many as steps are likely to run at once.
            let port = 61_440 + (number(launcher, "SLURM_JOB_ID", &job)? % 4096);
            tcp(&first_node(&need("SLURM_STEP_NODELIST")?), port)
        }
        _ => need("EGMEM_ADDRESS")?.parse(),
    }
}

/// Returns the first node of Slurm's list: `a[03-05,9],b` begins with `a03`.
fn first_node(list: &str) -> String {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (first, rest) = list.split_at(end);
    match rest.strip_prefix('[') {
        Some(rest) => first.to_owned() + rest.split([',', '-', ']']).next().unwrap_or(""),
        None => first.to_owned(),
    }
}

/// Returns a folder for sockets that only this user can enter: in the system's folder for temporary files, the same in
/// every process of the user.
pub(super) fn private_folder() -> Result<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let path = std::env::temp_dir().join(format!("egmem-{user}-ranks"));
    let failed = |error| Error::system(format!("the folder {}", path.display()), &error);
    make_private(&path).map_err(failed)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Looks a name up in `name=value` pairs.
    fn lookup(pairs: &str) -> impl Fn(&str) -> Option<String> {
        move |name| {
            let pairs = pairs.split_whitespace();
            let mut pairs = pairs.filter_map(|pair| pair.split_once('='));
            let found = pairs.find(|(key, _)| *key == name);
            found.map(|(_, value)| value.to_owned())
        }
    }

    fn read(pairs: &str) -> Result<World> {
        World::read(&lookup(pairs))
    }

    fn is(pairs: &str, launcher: &str, rank: u32, size: u32, address: &str) {
        let world = read(pairs).unwrap();
        assert_eq!(
            (world.launcher, world.rank, world.size),
            (launcher, rank, size),
            "{pairs}"
        );
        let folder = private_folder().unwrap();
        match world.address {
            Address::Unix(path) if path.starts_with(folder) => {
                assert_eq!(address, "here", "{pairs}")
            }
            at => assert_eq!(at.to_string(), address, "{pairs}"),
        }
    }

    const TORCH: &str = "RANK=3 WORLD_SIZE=4 MASTER_ADDR=node-a MASTER_PORT=29500";
    const OMPI: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 PMIX_NAMESPACE=a PMIX_RANK=1";
    const SLURM: &str = "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 SLURM_JOB_ID=4097 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[03-05,9],m";

    #[test]
    fn each_launcher_is_known() {
        is(
            "EGMEM_RANK=0 EGMEM_SIZE=2 EGMEM_ADDRESS=unix:/a",
            "EGMEM_*",
            0,
            2,
            "unix:/a",
        );
        is(TORCH, "torchrun", 3, 4, "tcp://node-a:29501");
        is(
            &format!("{TORCH} LOCAL_WORLD_SIZE=4"),
            "torchrun",
            3,
            4,
            "here",
        );
        is(
            &format!("{TORCH} LOCAL_WORLD_SIZE=2"),
            "torchrun",
            3,
            4,
            "tcp://node-a:29501",
        );
        is(
            &format!("{OMPI} OMPI_COMM_WORLD_LOCAL_SIZE=4"),
            "Open MPI",
            1,
            4,
            "here",
        );
        is(
            &format!("{OMPI} EGMEM_ADDRESS=a:1"),
            "Open MPI",
            1,
            4,
            "tcp://a:1",
        );
        is(SLURM, "Slurm", 2, 4, "tcp://n03:61441");
        is(
            &format!("{SLURM} SLURM_STEP_NUM_NODES=1"),
            "Slurm",
            2,
            4,
            "here",
        );
        is(
            "JOB_COMPLETION_INDEX=1 EGMEM_SIZE=2 EGMEM_ADDRESS=j-0.j:7",
            "Kubernetes",
            1,
            2,
            "tcp://j-0.j:7",
        );
    }

    #[test]
    fn launchers_nest() {
        // In a script of Slurm's, which is no step, and below srun.
        let here = format!("{OMPI} OMPI_COMM_WORLD_LOCAL_SIZE=4");
        is(&format!("{here} SLURM_PROCID=0"), "Open MPI", 1, 4, "here");
        is(&format!("{here} {SLURM}"), "Open MPI", 1, 4, "here");
        is(
            &format!("{TORCH} SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2"),
            "torchrun",
            3,
            4,
            "tcp://node-a:29501",
        );
        is(
            &format!("{TORCH} TORCHELASTIC_RUN_ID=x {OMPI}"),
            "torchrun",
            3,
            4,
            "tcp://node-a:29501",
        );
        is(
            &format!("EGMEM_RANK=0 EGMEM_SIZE=4 EGMEM_ADDRESS=a:1 {TORCH}"),
            "EGMEM_*",
            0,
            4,
            "tcp://a:1",
        );
        is(
            &format!("{TORCH} JOB_COMPLETION_INDEX=0"),
            "torchrun",
            3,
            4,
            "tcp://node-a:29501",
        );
    }

    #[test]
    fn half_a_set_and_two_that_disagree_are_refused_by_name() {
        for (pairs, expected) in [
            ("", "EGMEM_RANK"),
            (
                "EGMEM_RANK=0",
                "EGMEM_*: EGMEM_RANK is set and EGMEM_SIZE is not",
            ),
            (
                "EGMEM_SIZE=2",
                "EGMEM_*: EGMEM_SIZE is set and EGMEM_RANK is not",
            ),
            ("EGMEM_RANK=0 EGMEM_SIZE=2", "EGMEM_ADDRESS is not set"),
            (
                "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2",
                "PMIX_NAMESPACE is not set",
            ),
            ("RANK=0", "torchrun: RANK is set and WORLD_SIZE is not"),
            ("RANK=0 WORLD_SIZE=2", "torchrun: MASTER_ADDR is not set"),
            (
                "RANK=2 WORLD_SIZE=2",
                "torchrun: RANK is 2 and WORLD_SIZE is 2",
            ),
            ("RANK=x WORLD_SIZE=2", "torchrun: RANK is 'x', not a number"),
            (OMPI, "Open MPI: EGMEM_ADDRESS is not set"),
            (
                "OMPI_COMM_WORLD_SIZE=2",
                "Open MPI: OMPI_COMM_WORLD_SIZE is set",
            ),
            (
                "JOB_COMPLETION_INDEX=0",
                "Kubernetes: JOB_COMPLETION_INDEX is set and EGMEM_SIZE is not",
            ),
            ("SLURM_PROCID=0", "no rank"),
            (
                &format!("{TORCH} {OMPI}"),
                "torchrun: this is rank 3 of 4, but rank 1 by Open MPI",
            ),
        ] {
            let error = read(pairs).unwrap_err().to_string();
            assert!(error.contains(expected), "{pairs}: {error}");
        }
    }

    #[test]
    fn ranks_of_one_job_meet_at_one_place_and_other_jobs_elsewhere() {
        let place = |pairs: String| read(&pairs).unwrap().address;
        let torch = |more: &str| place(format!("{TORCH} LOCAL_WORLD_SIZE=4 {more}"));
        let other = TORCH.replace("RANK=3", "RANK=0");
        assert_eq!(torch(""), place(format!("{other} LOCAL_WORLD_SIZE=4")));
        assert_ne!(torch(""), torch("TORCHELASTIC_RESTART_COUNT=1"));
        assert_ne!(
            torch("TORCHELASTIC_RUN_ID=a"),
            torch("TORCHELASTIC_RUN_ID=b")
        );
    }

    #[test]
    fn secrets_come_from_one_place() {
        let secret = |pairs: &str| super::secret(&lookup(pairs));
        assert!(secret("").unwrap().is_none());
        assert!(secret("EGMEM_SECRET=0123456789abcdef").unwrap().is_some());
        assert!(secret("EGMEM_SECRET=short").is_err());
        assert!(secret("EGMEM_SECRET_FILE=/no/such/file").is_err());
        let both = "EGMEM_SECRET=0123456789abcdef EGMEM_SECRET_FILE=/a";
        assert!(secret(both).unwrap_err().to_string().contains("both set"));
    }

    #[test]
    fn the_first_node_of_a_list() {
        for (list, first) in [
            ("a", "a"),
            ("a,b", "a"),
            ("a[03-05,9],b", "a03"),
            ("n-[7]", "n-7"),
        ] {
            assert_eq!(first_node(list), first);
        }
    }

    #[test]
    fn the_folder_is_this_users_alone() {
        let path = private_folder().unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }
}
