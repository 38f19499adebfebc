//! Reads existing certificates.

use std::net::IpAddr;
use std::time::SystemTime;

use rcgen::{KeyPair, PublicKeyData};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use time::OffsetDateTime;
use x509_parser::extensions::GeneralName;
use x509_parser::parse_x509_certificate;
use x509_parser::prelude::X509Certificate;

use super::request::{CertRequest, MAX_DAYS, Usage};
use crate::tls::peer_name;
use crate::{Error, Result};

const DAY: i64 = 86_400;

/// The contents of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CertInfo {
    /// The subject, for display.
    pub subject: String,
    /// The issuer's subject, for display.
    pub issuer: String,
    /// The name for access lists of a peer with this certificate; `None` if it has none.
    pub peer: Option<String>,
    /// The subject alternative names: DNS names, IP addresses and URIs, in the certificate's order.
    pub names: Vec<String>,
    /// The serial number: bytes in hexadecimal, with colons between.
    pub serial: String,
    /// From when it is valid.
    pub not_before: SystemTime,
    /// The last second in which it is valid.
    pub not_after: SystemTime,
    /// Whether it is an authority's.
    pub authority: bool,
    /// Whether servers may use it.
    pub server: bool,
    /// Whether clients may use it.
    pub client: bool,
    /// The SHA-256 of its bytes (DER) in hexadecimal.
    pub sha256: String,
    public_key: Vec<u8>,
}

impl CertInfo {
    /// Parses all certificates of a text in PEM, in their order.
    ///
    /// # Errors
    /// [`Error::Tls`] if there is none, or one cannot be parsed.
    pub fn read(pem: &str) -> Result<Vec<Self>> {
        let what = "a certificate";
        let ders: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
            .collect::<Result<_, _>>()
            .map_err(|error| Error::tls(what, error))?;
        match ders.is_empty() {
            true => Err(Error::tls(what, "there is none in the text")),
            false => ders.iter().map(|der| Self::of(what, der)).collect(),
        }
    }

    pub(super) fn of(what: &str, der: &CertificateDer<'_>) -> Result<Self> {
        let parsed = parse(what, der)?;
        let bad = |error: x509_parser::error::X509Error| Error::tls(what, error);
        let names = parsed.subject_alternative_name().map_err(bad)?;
        let names = names.map_or(&[][..], |names| &names.value.general_names);
        let usage = parsed.extended_key_usage().map_err(bad)?;
        let usage = usage.map(|usage| usage.value);
        let time = |at: x509_parser::time::ASN1Time| SystemTime::from(at.to_datetime());
        let sha256 = ring::digest::digest(&ring::digest::SHA256, der);
        let sha256 = sha256.as_ref();
        Ok(Self {
            subject: parsed.subject().to_string(),
            issuer: parsed.issuer().to_string(),
            peer: peer_name(Some(der)).ok().map(|name| name.to_string()),
            names: names.iter().filter_map(shown).collect(),
            serial: parsed.raw_serial_as_string(),
            not_before: time(parsed.validity().not_before),
            not_after: time(parsed.validity().not_after),
            authority: parsed.is_ca(),
            server: usage.is_none_or(|usage| usage.server_auth || usage.any),
            client: usage.is_none_or(|usage| usage.client_auth || usage.any),
            sha256: sha256.iter().map(|byte| format!("{byte:02x}")).collect(),
            public_key: parsed.public_key().raw.to_vec(),
        })
    }

    /// Returns the whole days for which it is still valid at `now`; negative once it has expired.
    pub fn days_left(&self, now: SystemTime) -> i64 {
        (seconds(self.not_after) - seconds(now)).div_euclid(DAY)
    }

    /// Returns whether this private key (PEM) belongs to the certificate.
    ///
    /// # Errors
    /// [`Error::Tls`] if the key cannot be parsed.
    pub fn is_key(&self, key_pem: &str) -> Result<bool> {
        let pair =
            KeyPair::from_pem(key_pem).map_err(|error| Error::tls("the private key", error))?;
        Ok(self.is_of(&pair))
    }

    pub(super) fn is_of(&self, pair: &KeyPair) -> bool {
        pair.subject_public_key_info() == self.public_key
    }

    /// Returns a request for another certificate with the same names, usage and length of validity.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an authority's certificate, and for one
    /// without a peer name.
    pub fn request(&self) -> Result<CertRequest> {
        let Some(peer) = self.peer.as_ref().filter(|_| !self.authority) else {
            let why = "only those of nodes and users with a peer name can be renewed";
            return Err(Error::invalid("certificate", why));
        };
        let usage = match (self.server, self.client) {
            (true, false) => Usage::Server,
            (false, true) => Usage::Client,
            _ => Usage::Both,
        };
        let days = self.days_left(self.not_before).clamp(1, MAX_DAYS.into());
        let request = CertRequest::new(peer).usage(usage).days(days as u32);
        let others = self.names.iter().filter(|name| *name != peer);
        Ok(others.fold(request, |request, name| request.and(name)))
    }
}

/// Formats a subject alternative name; `None` for kinds that the exchange does not use.
fn shown(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some(name.to_ascii_lowercase()),
        GeneralName::URI(uri) => Some((*uri).to_owned()),
        GeneralName::IPAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
            let ip = v4.or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from));
            ip.ok().map(|ip| ip.to_string())
        }
        _ => None,
    }
}

/// Parses the first certificate of a text and calls `f` with it.
pub(super) fn with_first<T>(
    what: &str,
    pem: &str,
    use_it: impl FnOnce(&X509Certificate<'_>) -> Result<T>,
) -> Result<T> {
    let der =
        CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|error| Error::tls(what, error))?;
    use_it(&parse(what, &der)?)
}

fn parse<'a>(what: &str, der: &'a [u8]) -> Result<X509Certificate<'a>> {
    match parse_x509_certificate(der).map_err(|error| Error::tls(what, error))? {
        ([], parsed) => Ok(parsed),
        _ => Err(Error::tls(what, "there are bytes after the certificate")),
    }
}

/// Returns a time in whole seconds, as certificates have it.
pub(super) fn seconds(at: SystemTime) -> i64 {
    OffsetDateTime::from(at).unix_timestamp()
}
