//! `egmem certs show`

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::Args;
use egmem::certs::CertInfo;
use egmem::exchange::Result;
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::files::{read, read_key};
use crate::output::print;

/// `egmem certs show`
#[derive(Args, Debug)]
pub(super) struct Show {
    /// Certificates in PEM
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// The private key to compare with; by default, FILE with the extension .key, if that exists
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Show {
    pub(super) fn run(&self) -> Result<()> {
        let now = SystemTime::now();
        let (mut values, mut texts) = (Vec::new(), String::new());
        for file in &self.files {
            let beside = file.with_extension("key");
            let key = match &self.key {
                Some(key) => Some(key.as_path()),
                None => Some(beside.as_path()).filter(|key| key.exists()),
            };
            for (index, info) in CertInfo::read(&read(file)?)?.iter().enumerate() {
                // The key belongs to the first certificate; the others form the chain to the authority.
                let key = key.filter(|_| index == 0);
                let fits = match key {
                    Some(key) => Some(info.is_key(&read_key(key)?)?),
                    None => None,
                };
                match self.json {
                    true => values.push(value(file, info, now, fits)),
                    false => texts += &text(file, info, now, key.zip(fits)),
                }
            }
        }
        if self.json {
            texts = format!("{:#}\n", Value::Array(values));
        }
        Ok(print(&texts)?)
    }
}

fn value(file: &Path, info: &CertInfo, now: SystemTime, fits: Option<bool>) -> Value {
    json!({
        "file": file.display().to_string(),
        "subject": info.subject,
        "issuer": info.issuer,
        "peer": info.peer,
        "names": info.names,
        "serial": info.serial,
        "not_before": shown(info.not_before),
        "not_after": shown(info.not_after),
        "days_left": info.days_left(now),
        "authority": info.authority,
        "server": info.server,
        "client": info.client,
        "sha256": info.sha256,
        "key_matches": fits,
    })
}

fn text(file: &Path, info: &CertInfo, now: SystemTime, key: Option<(&Path, bool)>) -> String {
    let left = match (now < info.not_before, info.days_left(now)) {
        (true, _) => "not valid yet".to_owned(),
        (_, days @ 0..) => format!("{days} days left"),
        (_, days) => format!("expired, {} days ago", -days),
    };
    let usage = match (info.authority, info.server, info.client) {
        (true, ..) => "an authority",
        (_, true, true) => "server and client",
        (_, true, false) => "server",
        (_, false, true) => "client",
        _ => "neither server nor client",
    };
    let key = match key {
        Some((key, true)) => format!("{} matches", key.display()),
        Some((key, false)) => format!("{} DOES NOT MATCH", key.display()),
        None => "not compared".to_owned(),
    };
    let names = match info.names.is_empty() {
        true => "none".to_owned(),
        false => info.names.join(", "),
    };
    format!(
        "{}\n  peer name    {}\n  names        {names}\n  subject      {}\n  issuer       {}\n  \
         serial       {}\n  valid        {} to {} ({left})\n  usage        {usage}\n  \
         key          {key}\n  SHA-256      {}\n",
        file.display(),
        info.peer.as_deref().unwrap_or("none"),
        info.subject,
        info.issuer,
        info.serial,
        shown(info.not_before),
        shown(info.not_after),
        info.sha256,
    )
}

/// Formats a time in UTC as RFC 3339 does.
pub(super) fn shown(at: SystemTime) -> String {
    let at = OffsetDateTime::from(at);
    format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z",
        at.year(),
        u8::from(at.month()),
        at.day(),
        at.hour(),
        at.minute(),
        at.second()
    )
}
