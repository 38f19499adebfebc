//! `egmem certs revoke`

use std::path::PathBuf;

use clap::Args;
use egmem::certs::{Serial, write_over};
use egmem::exchange::Result;

use super::files::{authority, read};
use crate::output::print;

/// `egmem certs revoke`
#[derive(Args, Debug)]
pub(super) struct Revoke {
    /// Certificates to revoke, in PEM; without any, only renews the list
    #[arg(value_name = "FILE")]
    certs: Vec<PathBuf>,
    /// The serial number of a certificate to revoke, in hexadecimal, as `egmem certs show` prints it
    #[arg(long, value_name = "HEX")]
    serial: Vec<Serial>,
    /// The folder with ca.pem and ca.key
    #[arg(long, value_name = "DIR", default_value = ".")]
    ca: PathBuf,
    /// The revocation list; by default, crl.pem in the authority's folder
    #[arg(long, value_name = "FILE")]
    crl: Option<PathBuf>,
    /// Validity of the list in days; renew the list before it ends
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
}

impl Revoke {
    pub(super) fn run(&self) -> Result<()> {
        let authority = authority(&self.ca)?;
        let path = match &self.crl {
            Some(path) => path.clone(),
            None => self.ca.join("crl.pem"),
        };
        let former = match path.exists() {
            true => Some(read(&path)?),
            false => None,
        };
        let mut serials = self.serial.clone();
        for cert in &self.certs {
            serials.push(authority.serial_of(&read(cert)?)?);
        }
        let list = authority.revocation_list(former.as_deref(), &serials, self.days)?;
        write_over(&path, list.as_bytes(), false)?;
        let shown: Vec<_> = serials.iter().map(Serial::to_string).collect();
        Ok(print(&format!(
            "Revoked: {}. The list is good for {} days.\n  {}\n\
             Give it to every server and client (tls.crl, --crl), and have them load it: SIGHUP for egmem \
             serve.\n",
            if shown.is_empty() {
                "nothing new".into()
            } else {
                shown.join(", ")
            },
            self.days,
            path.display(),
        ))?)
    }
}
