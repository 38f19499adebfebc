//! `egmem certs`: a private authority, and certificates for the nodes and users of a cluster.

mod files;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use egmem::certs::{Authority, CertRequest};
use egmem::exchange::{Error, Result};

use crate::output::print;
use files::{CA, Pair, authority};

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
        Ok(print(&format!(
            "The authority '{}' is good for {} days.\n  \
             {}: give it to every node and user\n  \
             {}: a program that reads it can pass for any peer; keep it away from the nodes\n\
             Next: egmem certs issue node1.example.org --ca {} --san 10.0.0.1\n",
            self.name,
            self.days,
            pair.cert.display(),
            pair.key.display(),
            self.out.display(),
        ))?)
    }
}

impl Issue {
    fn run(&self) -> Result<()> {
        let out = self.out.as_deref().unwrap_or(&self.ca);
        let pair = Pair::new(out, file_stem(&self.name)?)?;
        let ca = self.ca.join("ca.pem");
        let authority = authority(&self.ca)?;
        let request = match &self.spiffe_id {
            Some(id) => CertRequest::new(id.as_str()).and(self.name.as_str()),
            None => CertRequest::new(self.name.as_str()),
        };
        let request = request.days(self.days);
        let request = self
            .san
            .iter()
            .fold(request, |all, name| all.and(name.as_str()));
        let issued = authority.issue(&request)?;
        pair.write(&issued.cert_pem, &issued.key_pem)?;
        let also = match self.san.len() {
            0 => String::new(),
            _ => format!(", also {}", self.san.join(", ")),
        };
        Ok(print(&format!(
            "A certificate for {}{also}, good for {} days.\n  \
             {}\n  \
             {}: its key, for its owner alone\n\
             Use them with --ca {} --cert {} --key {}\n",
            self.spiffe_id.as_ref().unwrap_or(&self.name),
            self.days,
            pair.cert.display(),
            pair.key.display(),
            ca.display(),
            pair.cert.display(),
            pair.key.display(),
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
