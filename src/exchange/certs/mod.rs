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

mod request;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKeyData,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use time::{Duration, OffsetDateTime};
use x509_parser::parse_x509_certificate;
use zeroize::Zeroizing;

pub use request::{CertRequest, Usage};

use request::{AUTHORITY, SKEW, check_days};

use crate::{Error, Result};

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
        check_days(days)?;
        // X.520: a common name has at most 64 characters.
        if name.is_empty() || name.chars().count() > 64 {
            let why = "it is empty or has more than 64 characters";
            return Err(Error::invalid("authority's name", why));
        }
        let key = new_key()?;
        let now = OffsetDateTime::now_utc();
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.not_before = now - SKEW;
        params.not_after = now + Duration::days(days.into());
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
        let key = new_key()?;
        let params = request.params()?;
        let certificate = params
            .signed_by(&key, &self.issuer)
            .map_err(|error| Error::tls("the new certificate", error))?;
        Ok(Issued {
            cert_pem: certificate.pem(),
            key_pem: Zeroizing::new(key.serialize_pem()),
        })
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

/// A certificate and its key.
pub struct Issued {
    /// The certificate, in PEM: not secret.
    pub cert_pem: String,
    /// Its key, in PKCS #8 and PEM; wiped when dropped.
    pub key_pem: Zeroizing<String>,
}

impl fmt::Debug for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Issued(redacted)")
    }
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
