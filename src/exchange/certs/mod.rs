//! Certificates for the exchange: a private authority, and certificates for nodes.
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

mod crl;
mod info;
mod request;
#[cfg(test)]
mod tests;
mod write;

use std::fmt;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer,
    KeyIdMethod, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, RevocationReason,
    RevokedCertParams, SerialNumber,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, UnixTime};
use time::{Duration, OffsetDateTime};
use zeroize::Zeroizing;

pub use crl::Serial;
pub use info::CertInfo;
pub use request::{CertRequest, Usage};
pub use write::{write_new, write_over};

use crate::{Error, Result};

/// Certificates are valid from this long ago on, because machines' clocks differ.
const SKEW: Duration = Duration::HOUR;
/// The longest validity in days.
const MAX_DAYS: u32 = 36_500;

fn wrong(what: &str, detail: impl fmt::Display) -> Error {
    Error::Tls {
        what: what.into(),
        detail: detail.to_string(),
    }
}

fn check_days(days: u32) -> Result<()> {
    if !(1..=MAX_DAYS).contains(&days) {
        let why = format!("{days} days");
        return Err(Error::invalid_of(
            "validity",
            why,
            format!("1 to {MAX_DAYS} days"),
        ));
    }
    Ok(())
}

fn new_key() -> Result<KeyPair> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|error| wrong("a new key", error))
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
            .map_err(|error| wrong("the authority's certificate", error))?;
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
        let (cert, key) = ("the authority's certificate", "the authority's key");
        let der = CertificateDer::from_pem_slice(cert_pem.as_bytes())
            .map_err(|error| wrong(cert, error))?;
        let pair = KeyPair::from_pem(key_pem).map_err(|error| wrong(key, error))?;
        let anchor = webpki::anchor_from_trusted_cert(&der).map_err(|error| wrong(cert, error))?;
        // The trust anchor lacks the header that states its length.
        let public = pair.subject_public_key_info();
        let header = public
            .len()
            .saturating_sub(anchor.subject_public_key_info.len());
        if !(2..=4).contains(&header) || public[header..] != anchor.subject_public_key_info[..] {
            return Err(wrong(key, "it is not that of the certificate"));
        }
        // Checked as a node's certificate, it must be refused only because it is an authority's.
        let own = webpki::EndEntityCert::try_from(&der).map_err(|error| wrong(cert, error))?;
        let checked = own.verify_for_usage(
            webpki::ALL_VERIFICATION_ALGS,
            std::slice::from_ref(&anchor),
            &[],
            UnixTime::now(),
            webpki::KeyUsage::client_auth(),
            None,
            None,
        );
        match checked.err() {
            Some(webpki::Error::CaUsedAsEndEntity) => {}
            Some(webpki::Error::CertExpired { .. }) => return Err(wrong(cert, "it has expired")),
            Some(webpki::Error::CertNotValidYet { .. }) => {
                return Err(wrong(cert, "it is not valid yet"));
            }
            Some(webpki::Error::UnsupportedCertVersion) | None => {
                return Err(wrong(cert, "it is not an authority's"));
            }
            Some(other) => return Err(wrong(cert, other)),
        }
        let issuer = Issuer::from_ca_cert_der(&der, pair).map_err(|error| wrong(cert, error))?;
        let usages = issuer.key_usages();
        if !usages.is_empty() && !usages.contains(&KeyUsagePurpose::KeyCertSign) {
            return Err(wrong(cert, "it is not for signing certificates"));
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
        self.issue_to(request, new_key()?)
    }

    /// Creates a certificate for an existing key, in PEM.
    ///
    /// # Errors
    /// As [`issue`](Self::issue), and [`Error::Tls`] for a key that cannot be parsed.
    pub fn issue_for_key(&self, request: &CertRequest, key_pem: &str) -> Result<Issued> {
        let key = KeyPair::from_pem(key_pem).map_err(|error| wrong("the private key", error))?;
        self.issue_to(request, key)
    }

    fn issue_to(&self, request: &CertRequest, key: KeyPair) -> Result<Issued> {
        let params = request.params()?;
        let certificate = params
            .signed_by(&key, &self.issuer)
            .map_err(|error| wrong("the new certificate", error))?;
        Ok(Issued {
            cert_pem: certificate.pem(),
            key_pem: Zeroizing::new(key.serialize_pem()),
        })
    }

    /// Creates a revocation list, in PEM, of all these certificates, valid for `days` from now. It replaces
    /// earlier lists: pass their certificates again.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for 0 days or too many, [`Error::Tls`] for a
    /// text that is not a certificate, or if the list cannot be signed.
    pub fn revoke<S: AsRef<str>>(&self, cert_pems: &[S], days: u32) -> Result<String> {
        check_days(days)?;
        let now = OffsetDateTime::now_utc();
        let one = |(index, pem): (usize, &S)| {
            let what = format!("certificate {index} to revoke");
            let der = CertificateDer::from_pem_slice(pem.as_ref().as_bytes())
                .map_err(|error| wrong(&what, error))?;
            let parsed =
                webpki::EndEntityCert::try_from(&der).map_err(|error| wrong(&what, error))?;
            Ok(RevokedCertParams {
                serial_number: SerialNumber::from_slice(parsed.serial()),
                revocation_time: now,
                reason_code: Some(RevocationReason::Unspecified),
                invalidity_date: None,
            })
        };
        let revoked = cert_pems.iter().enumerate().map(one);
        let params = CertificateRevocationListParams {
            this_update: now - SKEW,
            next_update: now + Duration::days(days.into()),
            // Later lists have greater numbers.
            crl_number: SerialNumber::from(now.unix_timestamp().unsigned_abs()),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect::<Result<_>>()?,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = params.signed_by(&self.issuer);
        list.and_then(|list| list.pem())
            .map_err(|error| wrong("the revocation list", error))
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
