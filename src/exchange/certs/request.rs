//! The requested contents of a certificate.

use std::net::IpAddr;
use std::time::SystemTime;

use rcgen::string::Ia5String;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyUsagePurpose, SanType};
use time::{Duration, OffsetDateTime};

use crate::{Error, PeerName, Result};

/// An authority's certificate, in errors.
pub(super) const AUTHORITY: &str = "the authority's certificate";
/// Certificates are valid from this long ago on, because machines' clocks differ.
pub(super) const SKEW: Duration = Duration::HOUR;
/// The longest validity in days.
pub(super) const MAX_DAYS: u32 = 36_500;
/// The most further names of a certificate.
const MAX_NAMES: usize = 100;

/// Which end of a connection may use a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Usage {
    /// Both: a node that exports and imports. The default.
    #[default]
    Both,
    /// Servers only.
    Server,
    /// Clients only.
    Client,
}

/// The requested contents of a certificate: see [`Authority::issue`](super::Authority::issue).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertRequest {
    name: String,
    more: Vec<String>,
    days: u32,
    usage: Usage,
    from: Option<SystemTime>,
    lasting: Option<std::time::Duration>,
}

impl CertRequest {
    /// Requests a certificate for 365 days. `name`, a DNS name or a SPIFFE id, is the first of its subject
    /// alternative names: the name by which peers know the node or program.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            more: Vec::new(),
            days: 365,
            usage: Usage::Both,
            from: None,
            lasting: None,
        }
    }

    /// Adds a DNS name or IP address that clients connect to.
    pub fn and(mut self, name: impl Into<String>) -> Self {
        self.more.push(name.into());
        self
    }

    /// Sets the validity in days, 1 to 36,500.
    pub fn days(mut self, days: u32) -> Self {
        self.days = days;
        self.lasting = None;
        self
    }

    /// Sets the validity as a duration: at least a second, at most 36,500 days.
    pub fn lasting(mut self, duration: std::time::Duration) -> Self {
        self.lasting = Some(duration);
        self
    }

    /// Sets which end of a connection may use it.
    pub fn usage(mut self, usage: Usage) -> Self {
        self.usage = usage;
        self
    }

    /// Sets the start of the validity, instead of an hour ago.
    pub fn from(mut self, start: SystemTime) -> Self {
        self.from = Some(start);
        self
    }

    pub(super) fn params(&self) -> Result<CertificateParams> {
        let days = check_lasting(self.days, self.lasting)?;
        let own = match self.name.starts_with("spiffe:") {
            true => PeerName::spiffe(&self.name)?,
            false => PeerName::certificate(&self.name)?,
        };
        let name = own.to_string();
        if self.more.len() > MAX_NAMES {
            let why = format!("more than {MAX_NAMES}");
            return Err(Error::invalid("further names", why));
        }
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        // X.520: a common name has at most 64 characters. It is for display.
        let common: String = name.chars().take(64).collect();
        params.distinguished_name.push(DnType::CommonName, common);
        params.subject_alt_names = vec![match own {
            PeerName::Spiffe(_) => text(&name, "a SPIFFE id").map(SanType::URI)?,
            _ => text(&name, "a DNS name").map(SanType::DnsName)?,
        }];
        for more in &self.more {
            params.subject_alt_names.push(match more.parse::<IpAddr>() {
                Ok(ip) => SanType::IpAddress(ip),
                Err(_) => text(&further(more)?, "a DNS name").map(SanType::DnsName)?,
            });
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        params.extended_key_usages = match self.usage {
            Usage::Both => vec![ServerAuth, ClientAuth],
            Usage::Server => vec![ServerAuth],
            Usage::Client => vec![ClientAuth],
        };
        params.use_authority_key_identifier_extension = true;
        // The validity ends `days` from now, without the allowance for clocks.
        let (start, days) = match self.from {
            Some(start) => (OffsetDateTime::from(start), days),
            None => (OffsetDateTime::now_utc() - SKEW, days + SKEW),
        };
        params.not_before = start;
        params.not_after = start
            .checked_add(days)
            .filter(|end| end.year() < 10_000)
            .ok_or_else(|| Error::invalid("validity", "it ends after the year 9999"))?;
        Ok(params)
    }
}

/// Checks a further DNS name. A numeric last label means a mistyped IP address: no DNS name has such a label
/// (RFC 3696).
fn further(name: &str) -> Result<String> {
    let why = match name.rsplit('.').next() {
        Some(last) if last.bytes().all(|byte| byte.is_ascii_digit()) => "is not an IP address",
        _ => match PeerName::certificate(name) {
            Ok(own) => return Ok(own.to_string()),
            Err(_) => "is not a DNS name",
        },
    };
    Err(Error::invalid_of(
        "further name",
        format!("'{name}' {why}"),
        "a DNS name, an IPv4 address (four numbers of 0 to 255) or an IPv6 address",
    ))
}

pub(super) fn check_days(days: u32) -> Result<()> {
    if (1..=MAX_DAYS).contains(&days) {
        return Ok(());
    }
    let (why, valid) = (format!("{days} days"), format!("1 to {MAX_DAYS} days"));
    Err(Error::invalid_of("validity", why, valid))
}

fn check_lasting(days: u32, lasting: Option<std::time::Duration>) -> Result<Duration> {
    let Some(lasting) = lasting else {
        check_days(days)?;
        return Ok(Duration::days(days.into()));
    };
    let most = Duration::days(MAX_DAYS.into());
    let lasting = Duration::try_from(lasting).ok();
    lasting
        .filter(|&lasting| Duration::SECOND <= lasting && lasting <= most)
        .ok_or_else(|| {
            let why = format!("not from a second to {MAX_DAYS} days");
            Error::invalid("validity", why)
        })
}

fn text(name: &str, what: &str) -> Result<Ia5String> {
    name.try_into().map_err(|error| Error::tls(what, error))
}
