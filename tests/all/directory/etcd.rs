//! A real etcd-server, which a test starts, kills and starts again.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// How long the server may take to start.
const START: Duration = Duration::from_secs(300);

/// An etcd-server of one member on loopback; killed when dropped.
pub struct Etcd {
    child: Option<Child>,
    program: PathBuf,
    data: TempDir,
    client: u16,
    peer: u16,
    tls: Option<Tls>,
}

/// The server's certificate, and the authority of its clients'.
#[derive(Clone)]
pub struct Tls {
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

/// Returns `etcd`; `None`, with a line that the test is skipped, where there is none.
fn program(name: &str) -> Option<PathBuf> {
    let found = find(name);
    if found.is_none() {
        assert!(
            std::env::var_os("EGMEM_REQUIRE_ETCD").is_none_or(|value| value != "1"),
            "EGMEM_REQUIRE_ETCD=1, and there is no {name}"
        );
        eprintln!("skipped: there is no {name}");
    }
    found
}

/// This process's own loopback address: while no server listens at a port of it, nothing takes that port,
/// not even a connection that is tried, which comes from 127.0.0.1.
pub fn host() -> Ipv4Addr {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 0x80 | a, b, c)
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((host(), 0)).unwrap();
    listener.local_addr().unwrap().port()
}

impl Etcd {
    /// A new one with no data; `None` where there is no etcd on this machine.
    pub fn start(tls: Option<Tls>) -> Option<Self> {
        let program = program("etcd")?;
        // Another process may take a port that was free just now.
        for _ in 0..5 {
            let mut etcd = Self {
                child: None,
                program: program.clone(),
                data: TempDir::new().unwrap(),
                client: free_port(),
                peer: free_port(),
                tls: tls.clone(),
            };
            if etcd.run() {
                return Some(etcd);
            }
        }
        panic!("etcd does not start");
    }

    /// Where clients connect.
    pub fn endpoint(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}:{}", host(), self.client)
    }

    /// Kills it, as a crash would.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Starts it again, with its data and at its ports.
    pub fn restart(&mut self) {
        self.kill();
        assert!(self.run(), "etcd does not start again");
    }

    /// Whether it answers.
    fn run(&mut self) -> bool {
        let peer = format!("http://{}:{}", host(), self.peer);
        let log = std::fs::File::create(self.data.path().join("log")).unwrap();
        let mut command = Command::new(&self.program);
        command
            .env("ETCD_UNSUPPORTED_ARCH", "arm64")
            .arg("--data-dir")
            .arg(self.data.path().join("data"))
            .args(["--listen-client-urls", &self.endpoint()])
            .args(["--advertise-client-urls", &self.endpoint()])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            // The shortest lease is half as long again as an election.
            .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        if let Some(tls) = &self.tls {
            command
                .arg("--cert-file")
                .arg(&tls.cert)
                .arg("--key-file")
                .arg(&tls.key)
                .arg("--trusted-ca-file")
                .arg(&tls.ca)
                .arg("--client-cert-auth");
        }
        let mut child = command.spawn().unwrap();
        let before = Instant::now();
        while before.elapsed() < START {
            if child.try_wait().unwrap().is_some() {
                return false;
            }
            if self.answers() {
                self.child = Some(child);
                return true;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        false
    }

    fn answers(&self) -> bool {
        // Before there is a leader nothing is answered, so that the port alone says nothing.
        match &self.tls {
            None => {
                find("etcdctl").is_none_or(|_| self.ctl(None, &["endpoint", "health"]).is_some())
            }
            Some(_) => std::net::TcpStream::connect((host(), self.client)).is_ok(),
        }
    }

    /// Returns the output of `etcdctl`; `None` if it fails.
    pub fn ctl(&self, identity: Option<(&Path, &Path, &Path)>, args: &[&str]) -> Option<Vec<u8>> {
        let mut command = Command::new(program("etcdctl")?);
        command.env("ETCDCTL_API", "3").args([
            "--endpoints",
            &self.endpoint(),
            "--command-timeout",
            "5s",
        ]);
        if let Some((ca, cert, key)) = identity {
            command
                .arg("--cacert")
                .arg(ca)
                .arg("--cert")
                .arg(cert)
                .arg("--key")
                .arg(key);
        }
        let output = command.args(args).output().unwrap();
        if !output.status.success() {
            eprintln!("etcdctl: {}", String::from_utf8_lossy(&output.stderr));
        }
        output.status.success().then_some(output.stdout)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}
