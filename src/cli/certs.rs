//! `egmem certs`: a private authority, and certificates for the nodes and users of a cluster.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use egmem::certs::{Authority, CertRequest, write_new};
use egmem::exchange::{Error, Result};
use zeroize::Zeroizing;

use crate::output::print;

/// `egmem certs`
#[derive(Args, Debug)]
pub struct Certs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Create an authority: ca.pem for every node, ca.key for you alone
    Init(Init),
    /// Create a certificate and its key for one node or user, signed by the authority from `init`
    Issue(Issue),
}

#[derive(Args, Debug)]
struct Init {
    /// The folder for ca.pem and ca.key; created if missing
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
    /// The authority's name, for display
    #[arg(long, default_value = "egmem")]
    name: String,
    /// Validity in days
    #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
}

#[derive(Args, Debug)]
struct Issue {
    /// The peer's name for access lists: a DNS name such as node1.example.org
    #[arg(value_name = "NAME")]
    name: String,
    /// More names and addresses that clients connect to: node1, 10.0.0.1
    #[arg(long, value_name = "DNS|IP,…", value_delimiter = ',')]
    san: Vec<String>,
    /// A SPIFFE id, spiffe://trust-domain/path: it becomes the peer's name, and NAME a further name
    #[arg(long, value_name = "ID")]
    spiffe_id: Option<String>,
    /// Validity in days
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
    /// The folder with ca.pem and ca.key
    #[arg(long, value_name = "DIR", default_value = ".")]
    ca: PathBuf,
    /// The folder for NAME.pem and NAME.key; by default, the authority's
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Certs {
    /// Creates the files and reports them.
    pub fn run(&self) -> Result<()> {
        match &self.command {
            Command::Init(init) => init.run(),
            Command::Issue(issue) => issue.run(),
        }
    }
}

impl Init {
    fn run(&self) -> Result<()> {
        let pair = Pair::new(&self.out, CA)?;
        let authority = Authority::create(&self.name, self.days)?;
        pair.write(authority.cert_pem(), &authority.key_pem())?;
        let Self { out, name, days } = self;
        let [cert, key, out] = [&pair.cert, &pair.key, out].map(|path| path.display());
        Ok(print(&format!(
            "The authority '{name}' is valid for {days} days.\n  \
             {cert}: give it to every node and user\n  \
             {key}: a program that reads it can pass for any peer; keep it away from the nodes\n\
             Next: egmem certs issue node1.example.org --ca {out} --san 10.0.0.1\n",
        ))?)
    }
}

impl Issue {
    fn run(&self) -> Result<()> {
        let pair = Pair::new(
            self.out.as_ref().unwrap_or(&self.ca),
            file_stem(&self.name)?,
        )?;
        let authority = authority(&self.ca)?;
        let mut request = CertRequest::new(self.spiffe_id.as_ref().unwrap_or(&self.name).as_str());
        if self.spiffe_id.is_some() {
            request = request.and(self.name.as_str());
        }
        for name in &self.san {
            request = request.and(name.as_str());
        }
        let issued = authority.issue(&request.days(self.days))?;
        pair.write(&issued.cert_pem, &issued.key_pem)?;
        let mut names = self.spiffe_id.as_ref().unwrap_or(&self.name).clone();
        if !self.san.is_empty() {
            names += &format!(", also {}", self.san.join(", "));
        }
        let ca = self.ca.join("ca.pem");
        let [ca, cert, key] = [&ca, &pair.cert, &pair.key].map(|path| path.display());
        Ok(print(&format!(
            "A certificate for {names}, valid for {} days.\n  \
             {cert}\n  \
             {key}: its key, for its owner alone\n\
             Use them with --ca {ca} --cert {cert} --key {key}\n",
            self.days,
        ))?)
    }
}

/// Checks that a name can be a file name too.
fn file_stem(name: &str) -> Result<&str> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name.is_empty() || name.starts_with(['.', '-']) || !name.chars().all(fits) || name == CA {
        return Err(Error::invalid_of(
            "name",
            format!("'{name}' names no file and no peer"),
            "letters, digits, '-', '_' and '.', not first '-' or '.', not 'ca'",
        ));
    }
    Ok(name)
}

/// The authority's files.
const CA: &str = "ca";

/// Loads the authority in a folder.
fn authority(folder: &Path) -> Result<Authority> {
    let [cert, key] = ["ca.pem", "ca.key"].map(|name| folder.join(name));
    if !cert.exists() {
        return Err(Error::invalid_of(
            "--ca",
            format!("there is no ca.pem in '{}'", folder.display()),
            "the folder that `egmem certs init --out` wrote ca.pem and ca.key to",
        ));
    }
    let read = |path: &Path| {
        // A key is wiped when dropped.
        let text = fs::read_to_string(path).map(Zeroizing::new);
        text.map_err(|error| Error::system(format!("cannot read {}", path.display()), &error))
    };
    Authority::load(&read(&cert)?, &read(&key)?)
}

/// The paths of a certificate and its key; neither file exists yet.
struct Pair {
    cert: PathBuf,
    key: PathBuf,
}

impl Pair {
    /// Returns the paths of a new pair in a folder, which it creates.
    fn new(folder: &Path, stem: &str) -> Result<Self> {
        let pair = Self {
            cert: folder.join(format!("{stem}.pem")),
            key: folder.join(format!("{stem}.key")),
        };
        for path in [&pair.cert, &pair.key] {
            if path.symlink_metadata().is_ok() {
                let why = format!("{} is there already and is not overwritten", path.display());
                return Err(Error::invalid("output", why));
            }
        }
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|error| Error::system(format!("cannot make {}", folder.display()), &error))?;
        Ok(pair)
    }

    /// Writes both, or neither.
    fn write(&self, cert: &str, key: &str) -> Result<()> {
        write_new(&self.key, key.as_bytes(), true)?;
        write_new(&self.cert, cert.as_bytes(), false).inspect_err(|_| {
            let _ = fs::remove_file(&self.key);
        })
    }
}
