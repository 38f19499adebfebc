//! `egmem certs renew`

use std::path::PathBuf;

use clap::Args;
use egmem::certs::{CertInfo, write_over};
use egmem::exchange::{Error, Result};

use super::files::{authority, read, read_key};
use super::show::shown;
use crate::output::print;

/// `egmem certs renew`
#[derive(Args, Debug)]
pub(super) struct Renew {
    /// The certificate, in PEM
    #[arg(value_name = "FILE")]
    cert: PathBuf,
    /// Its key; by default, FILE with the extension .key
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// The folder with ca.pem and ca.key
    #[arg(long, value_name = "DIR", default_value = ".")]
    ca: PathBuf,
    /// Validity in days; by default, that of the old one
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: Option<u32>,
    /// Keep the private key instead of creating a new one
    #[arg(long)]
    keep_key: bool,
}

impl Renew {
    pub(super) fn run(&self) -> Result<()> {
        let key = match &self.key {
            Some(key) => key.clone(),
            None => self.cert.with_extension("key"),
        };
        let authority = authority(&self.ca)?;
        let old = read(&self.cert)?;
        // This authority renews only certificates that it signed itself.
        authority.serial_of(&old)?;
        let info = CertInfo::read(&old)?.swap_remove(0);
        let mut request = info.request()?;
        if let Some(days) = self.days {
            request = request.days(days);
        }
        let issued = match self.keep_key {
            true => {
                let old_key = read_key(&key)?;
                if !info.is_key(&old_key)? {
                    let why = format!("{} is not that of the certificate", key.display());
                    return Err(Error::invalid("key", why));
                }
                authority.issue_for_key(&request, &old_key)?
            }
            false => {
                let issued = authority.issue(&request)?;
                // A reader between the two renames finds a pair that does not match, and keeps the loaded
                // one.
                write_over(&key, issued.key_pem.as_bytes(), true)?;
                issued
            }
        };
        write_over(&self.cert, issued.cert_pem.as_bytes(), false)?;
        let renewed = CertInfo::read(&issued.cert_pem)?.swap_remove(0);
        Ok(print(&format!(
            "A new certificate for {}, good until {}.\n  {}\n  {}: its {} key\n\
             Load it in what runs: SIGHUP for egmem serve. The old one is valid until {}: revoke {} where \
             its key is lost.\n",
            renewed.peer.as_deref().unwrap_or("its names"),
            shown(renewed.not_after),
            self.cert.display(),
            key.display(),
            if self.keep_key { "old" } else { "new" },
            shown(info.not_after),
            info.serial,
        ))?)
    }
}
