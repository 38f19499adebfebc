//! Certificates for the exchange: a private authority, and certificates for nodes. To renew and revoke
//! certificates, use an authority such as step-ca, cert-manager or SPIRE; the exchange reads its files.
//!
//! Use it for clusters that have no authority yet. Certificates of another authority work as well, if each
//! node's first DNS name (subject alternative name) is the name that peers know it by. Keys are ECDSA on
//! P-256; an authority signs only nodes, no further authorities (path length 0).
//!
//! ```
//! use egmem::certs::{Authority, CertRequest};
//! use egmem::exchange::{Tls, TlsPem};
//!
//! let authority = Authority::create("our cluster", 3650)?;
//! let node = authority.issue(&CertRequest::new("node7.cluster").and("10.0.0.7").days(90))?;
//! let tls = Tls::from_pem(TlsPem {
//!     ca: authority.cert_pem().as_bytes(),
//!     cert: node.cert_pem.as_bytes(),
//!     key: node.key_pem.as_bytes(),
//!     crl: None,
//! })?;
//! assert_eq!(tls.name().to_string(), "node7.cluster");
//! # Ok::<(), egmem::exchange::Error>(())
//! ```

#[cfg(test)]
mod tests;

use std::fs::OpenOptions;
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration as StdDuration;

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use time::{Duration, OffsetDateTime};
use x509_parser::parse_x509_certificate;
use zeroize::Zeroizing;

use crate::{Error, PeerName, Result};

/// An authority's certificate, in errors.
const AUTHORITY: &str = "the authority's certificate";
/// Certificates are valid from this long ago on, because machines' clocks differ.
const SKEW: Duration = Duration::HOUR;
/// The longest validity in days.
const MAX_DAYS: u32 = 36_500;
/// The most characters of a common name (X.520).
const MAX_COMMON: usize = 64;
/// The most further names of a certificate.
const MAX_NAMES: usize = 100;

fn new_key() -> Result<KeyPair> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|error| Error::tls("a new key", error))
}

/// A certificate authority: peers trust its certificate, and its key signs others.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    cert_pem: String,
}

impl Authority {
    /// Creates an authority. `name` is for display.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an empty or long name, or 0 days or too
    /// many; [`Error::Tls`] if the system has no randomness.
    pub fn create(name: &str, days: u32) -> Result<Self> {
        let lasting = validity(self::days(days))?;
        if name.is_empty() || name.chars().count() > MAX_COMMON {
            let why = "it is empty or has more than 64 characters";
            return Err(Error::invalid("authority's name", why));
        }
        let key = new_key()?;
        let now = OffsetDateTime::now_utc();
        let mut params = named(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.not_before = now - SKEW;
        params.not_after = now + lasting;
        let certificate = params
            .self_signed(&key)
            .map_err(|error| Error::tls(AUTHORITY, error))?;
        Ok(Self {
            cert_pem: certificate.pem(),
            issuer: Issuer::new(params, key),
        })
    }

    /// Loads an existing authority, with any kind of key that ring signs with.
    ///
    /// # Errors
    /// [`Error::Tls`] if the texts cannot be parsed, the certificate is not an authority's or has expired, or
    /// the key does not belong to it.
    pub fn load(cert_pem: &str, key_pem: &str) -> Result<Self> {
        let (cert, key) = (AUTHORITY, "the authority's key");
        let der = CertificateDer::from_pem_slice(cert_pem.as_bytes())
            .map_err(|error| Error::tls(cert, error))?;
        // Refuses unknown critical extensions, and bytes after the certificate.
        webpki::EndEntityCert::try_from(&der).map_err(|error| Error::tls(cert, error))?;
        let (_, parsed) = parse_x509_certificate(&der).map_err(|error| Error::tls(cert, error))?;
        let pair = KeyPair::from_pem(key_pem).map_err(|error| Error::tls(key, error))?;
        if pair.subject_public_key_info() != parsed.public_key().raw {
            return Err(Error::tls(key, "it is not that of the certificate"));
        }
        let now = OffsetDateTime::now_utc();
        let validity = parsed.validity();
        let faults = [
            (now > validity.not_after.to_datetime(), "it has expired"),
            (
                now < validity.not_before.to_datetime(),
                "it is not valid yet",
            ),
            (!parsed.is_ca(), "it is not an authority's"),
        ];
        if let Some((_, fault)) = faults.iter().find(|(is_so, _)| *is_so) {
            return Err(Error::tls(cert, fault));
        }
        let issuer =
            Issuer::from_ca_cert_der(&der, pair).map_err(|error| Error::tls(cert, error))?;
        let usages = issuer.key_usages();
        if !usages.is_empty() && !usages.contains(&KeyUsagePurpose::KeyCertSign) {
            return Err(Error::tls(cert, "it is not for signing certificates"));
        }
        Ok(Self {
            issuer,
            cert_pem: cert_pem.into(),
        })
    }

    /// Returns its certificate, which peers trust: not secret.
    pub fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    /// Returns its key, in PKCS #8: with it one can impersonate every peer.
    pub fn key_pem(&self) -> Zeroizing<String> {
        Zeroizing::new(self.issuer.key().serialize_pem())
    }

    /// Creates a certificate and its key.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a name that is neither a DNS name nor a
    /// SPIFFE id, or 0 days or too many; [`Error::Tls`] if signing fails.
    pub fn issue(&self, request: &CertRequest) -> Result<Issued> {
        self.sign(request.params()?)
    }

    fn sign(&self, params: CertificateParams) -> Result<Issued> {
        let key = new_key()?;
        let certificate = params
            .signed_by(&key, &self.issuer)
            .map_err(|error| Error::tls("the new certificate", error))?;
        Ok(Issued {
            cert_pem: certificate.pem(),
            key_pem: Zeroizing::new(key.serialize_pem()),
        })
    }
}

/// A certificate and its key.
pub struct Issued {
    /// The certificate, in PEM: not secret.
    pub cert_pem: String,
    /// Its key, in PKCS #8 and PEM; wiped when dropped.
    pub key_pem: Zeroizing<String>,
}

opaque!(Authority Issued);

/// The requested contents of a certificate: see [`Authority::issue`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertRequest {
    name: String,
    more: Vec<String>,
    lasting: StdDuration,
}

impl CertRequest {
    /// Requests a certificate for 365 days. `name`, a DNS name or a SPIFFE id, is the first of its subject
    /// alternative names: the name by which peers know the node or program.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            more: Vec::new(),
            lasting: days(365),
        }
    }

    /// Adds a DNS name or IP address that clients connect to.
    pub fn and(mut self, name: impl Into<String>) -> Self {
        self.more.push(name.into());
        self
    }

    /// Sets the validity in days, 1 to 36,500.
    pub fn days(self, count: u32) -> Self {
        self.lasting(days(count))
    }

    setters! {
        /// Sets the validity as a duration: at least a second, at most 36,500 days.
        lasting: StdDuration;
    }

    fn params(&self) -> Result<CertificateParams> {
        let lasting = validity(self.lasting)?;
        let own = if self.name.starts_with("spiffe:") {
            PeerName::spiffe(&self.name)?
        } else {
            PeerName::certificate(&self.name)?
        };
        let name = own.to_string();
        if self.more.len() > MAX_NAMES {
            let why = format!("more than {MAX_NAMES}");
            return Err(Error::invalid("further names", why));
        }
        // It is for display.
        let common: String = name.chars().take(MAX_COMMON).collect();
        let mut params = named(&common);
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
        params.extended_key_usages = vec![ServerAuth, ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let now = OffsetDateTime::now_utc();
        params.not_before = now - SKEW;
        params.not_after = now + lasting;
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

const fn days(count: u32) -> StdDuration {
    StdDuration::from_secs(count as u64 * 86_400)
}

/// Checks how long a certificate is to be valid.
fn validity(lasting: StdDuration) -> Result<Duration> {
    if !(StdDuration::from_secs(1)..=days(MAX_DAYS)).contains(&lasting) {
        let (why, valid) = (format!("{lasting:?}"), format!("1 s to {MAX_DAYS} days"));
        return Err(Error::invalid_of("validity", why, valid));
    }
    Duration::try_from(lasting).map_err(|error| Error::invalid("validity", error.to_string()))
}

/// Returns the parameters of a certificate with this common name.
fn named(common: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common);
    params
}

fn text(name: &str, what: &str) -> Result<Ia5String> {
    name.try_into().map_err(|error| Error::tls(what, error))
}

/// Writes a new file; fails if one exists. With `secret` only its owner may read it, otherwise any user; the
/// umask may restrict it further.
///
/// # Errors
/// [`System`](crate::MemoryError::System) if the file exists or cannot be written; a partial file is removed.
pub fn write_new(path: &Path, contents: &[u8], secret: bool) -> Result<()> {
    let failed =
        |error: std::io::Error| Error::system(format!("writing {}", path.display()), &error);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(if secret { 0o600 } else { 0o644 })
        .open(path)
        .map_err(failed)?;
    let written = file.write_all(contents).and_then(|()| file.sync_all());
    written.map_err(|error| {
        // A partial key would block the next attempt.
        let _ = std::fs::remove_file(path);
        failed(error)
    })
}
