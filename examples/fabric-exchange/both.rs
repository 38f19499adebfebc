//! Both ends on this machine, as two processes.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use egmem::Machine;
use egmem::exchange::{Error, Result};

use super::args::Args;

/// Starts both roles; whether both verified everything.
pub fn run(args: &Args) -> Result<bool> {
    let folder = Folder::new()?;
    let [owner_files, peer_files] = certificates(&folder.0)?;
    let deadline = Instant::now() + args.patience();

    let mut command = role(args, &folder, "owner", &owner_files)?;
    command.args(["--address", &args.address.to_string()]);
    let mut owner = Running::start("owner", command.stderr(Stdio::piped()))?;
    let address = listening(&mut owner.0, deadline)?;

    let mut command = role(args, &folder, "peer", &peer_files)?;
    command.args(["--address", &address]);
    if let Some(via) = args.via {
        let name = match via {
            super::args::Via::Fabric => "fabric",
            super::args::Via::Fd => "fd",
        };
        command.args(["--via", name]);
    }
    let mut peer = Running::start("peer", &mut command)?;

    let peer = peer.verified(deadline)?;
    // Without a peer the owner waits in vain.
    let deadline = if peer {
        deadline
    } else {
        Instant::now() + Duration::from_secs(2)
    };
    Ok(owner.verified(deadline)? && peer)
}

/// This program again, in a role.
fn role(args: &Args, folder: &Folder, role: &str, files: &[String]) -> Result<Command> {
    let program = std::env::current_exe()
        .map_err(|error| Error::system("finding this program's path", &error))?;
    // Under an emulator it does not start by itself.
    let runner = std::env::var("EGMEM_TEST_RUNNER").unwrap_or_default();
    let mut words = runner.split_whitespace();
    let mut command = match words.next() {
        Some(first) => {
            let mut command = Command::new(first);
            command.args(words).arg(program);
            command
        }
        None => Command::new(program),
    };
    command.arg(role).args(files);
    // The files that a killed end leaves behind are deleted with the folder.
    command
        .env("TMPDIR", &folder.0)
        .env_remove("XDG_RUNTIME_DIR");
    command.args(["--name", &args.name, "--gpu", &args.gpu.to_string()]);
    command.args([
        "--size",
        &args.size.0.to_string(),
        "--wait",
        &args.wait.to_string(),
    ]);
    if args.json {
        command.arg("--json");
    }
    match &args.sim {
        Some(name) => command.args(["--sim", name]),
        None if args.cuda => command.arg("--cuda"),
        // The role finds it in the environment too.
        None if Machine::from_env()?.is_some() => &mut command,
        None => command.args(["--sim", "gh200"]),
    };
    Ok(command)
}

/// The address that the owner says it listens at; the rest of its output is passed on.
fn listening(owner: &mut Child, deadline: Instant) -> Result<String> {
    let (sender, receiver) = mpsc::channel();
    if let Some(output) = owner.stderr.take() {
        std::thread::spawn(move || {
            for line in BufReader::new(output)
                .lines()
                .map_while(std::io::Result::ok)
            {
                eprintln!("{line}");
                if let Some((_, address)) = line.split_once("listening at ") {
                    sender.send(address.to_owned()).ok();
                }
            }
        });
    }
    let left = deadline.saturating_duration_since(Instant::now());
    receiver.recv_timeout(left).map_err(|_| {
        Error::Share(egmem::share::Error::PeerLost {
            peer: "the owner".into(),
            why: "it ended, or took too long, before it listened".into(),
        })
    })
}

/// A child process; killed when dropped.
struct Running(Child);

impl Running {
    fn start(what: &str, command: &mut Command) -> Result<Self> {
        let child = command.stdin(Stdio::null()).spawn();
        child
            .map(Self)
            .map_err(|error| Error::system(format!("starting the {what}"), &error))
    }

    /// Waits for its end; whether it verified everything.
    fn verified(&mut self, deadline: Instant) -> Result<bool> {
        while Instant::now() < deadline {
            let ended = self.0.try_wait();
            match ended.map_err(|error| Error::system("waiting for a child process", &error))? {
                Some(status) => return Ok(status.success()),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
        Ok(false)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// A folder for certificates, of this user alone; removed when dropped.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new() -> Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        let id = egmem::share::InstanceId::random()?;
        let path = std::env::temp_dir().join(format!("fabric-exchange-{id}"));
        let mut builder = std::fs::DirBuilder::new();
        match builder.mode(0o700).create(&path) {
            Ok(()) => Ok(Self(path)),
            Err(error) => Err(Error::system(
                format!("creating {}", path.display()),
                &error,
            )),
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// The arguments that give each end its certificate, made for this run.
#[cfg(feature = "certs")]
fn certificates(folder: &Path) -> Result<[Vec<String>; 2]> {
    use egmem::certs::{Authority, CertRequest, write_new};

    let authority = Authority::create("fabric-exchange", 1)?;
    let path = |name: &str| folder.join(name).display().to_string();
    let ca = path("ca.pem");
    write_new(Path::new(&ca), authority.cert_pem().as_bytes(), false)?;
    let issue = |name: &str| {
        let request = CertRequest::new(name).and("localhost").and("127.0.0.1");
        let issued = authority.issue(&request.days(1))?;
        let (cert, key) = (path(&format!("{name}.pem")), path(&format!("{name}.key")));
        write_new(Path::new(&cert), issued.cert_pem.as_bytes(), false)?;
        write_new(Path::new(&key), issued.key_pem.as_bytes(), true)?;
        let arguments = ["--ca", &ca, "--cert", &cert, "--key", &key];
        Ok::<_, Error>(arguments.map(str::to_owned).to_vec())
    };
    Ok([issue("owner")?, issue("peer")?])
}

/// Without the feature `certs` the two ends speak plainly, on loopback.
#[cfg(not(feature = "certs"))]
fn certificates(_folder: &Path) -> Result<[Vec<String>; 2]> {
    Ok([Vec::new(), Vec::new()])
}
