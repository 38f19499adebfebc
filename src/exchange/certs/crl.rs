//! Revocation lists, each based on the previous one.

use std::fmt;
use std::str::FromStr;

use rcgen::{
    CertificateRevocationListParams, KeyIdMethod, RevocationReason, RevokedCertParams, SerialNumber,
};
use rustls_pki_types::CertificateRevocationListDer;
use rustls_pki_types::pem::PemObject;
use time::{Duration, OffsetDateTime};
use x509_parser::revocation_list::RevokedCertificate;

use super::Authority;
use super::info::with_first;
use super::request::{AUTHORITY, SKEW, check_days};
use crate::{Error, Result};

const LIST: &str = "the revocation list";
/// The longest serial number in bytes (RFC 5280, 4.1.2.2), including a sign byte.
const MAX_SERIAL: usize = 21;

/// A certificate's serial number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Serial(Vec<u8>);

impl Serial {
    /// Leading zeros have no meaning.
    fn new(bytes: &[u8]) -> Self {
        let start = bytes.iter().position(|&byte| byte != 0);
        Self(bytes[start.unwrap_or(bytes.len())..].to_vec())
    }
}

impl FromStr for Serial {
    type Err = Error;

    /// Parses bytes in hexadecimal, with or without colons between.
    fn from_str(text: &str) -> Result<Self> {
        let digits: String = text.chars().filter(|&c| c != ':').collect();
        let bytes: Option<Vec<u8>> = (0..digits.len().div_ceil(2))
            .map(|at| {
                let pair = digits.get(2 * at..2 * at + 2)?;
                let is_hex = pair.bytes().all(|digit| digit.is_ascii_hexdigit());
                is_hex.then(|| u8::from_str_radix(pair, 16).ok()).flatten()
            })
            .collect();
        let bytes = bytes.filter(|bytes| (1..=MAX_SERIAL).contains(&bytes.len()));
        bytes.map(|bytes| Self::new(&bytes)).ok_or_else(|| {
            let why = format!("'{text}' is not 1 to {MAX_SERIAL} bytes in hexadecimal");
            Error::invalid("serial number", why)
        })
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let colon = if index > 0 { ":" } else { "" };
            write!(f, "{colon}{byte:02x}")?;
        }
        Ok(())
    }
}

impl Authority {
    /// Returns the serial number of a certificate (PEM) of this authority.
    ///
    /// # Errors
    /// [`Error::Tls`] if the text cannot be parsed, or another authority signed the certificate.
    pub fn serial_of(&self, cert_pem: &str) -> Result<Serial> {
        let what = "the certificate";
        with_first(what, cert_pem, |certificate| {
            with_first(AUTHORITY, &self.cert_pem, |own| {
                let signed = certificate.verify_signature(Some(own.public_key()));
                match certificate.issuer().as_raw() == own.subject().as_raw() && signed.is_ok() {
                    true => Ok(Serial::new(certificate.raw_serial())),
                    false => Err(Error::tls(what, "another authority has signed it")),
                }
            })
        })
    }

    /// Creates a revocation list, in PEM, with these serial numbers and the entries of the list `former`
    /// (PEM), valid for `days` from now. Its number (crlNumber) is greater than the former's.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for 0 days or too many, [`Error::Tls`] for a
    /// former list that cannot be parsed or is another authority's, or if the list cannot be signed.
    pub fn revocation_list(
        &self,
        former: Option<&str>,
        serials: &[Serial],
        days: u32,
    ) -> Result<String> {
        let (mut entries, number) = match former {
            Some(former) => self.former(former)?,
            None => (Vec::new(), 0),
        };
        for serial in serials {
            let listed =
                |entry: &RevokedCertParams| Serial::new(entry.serial_number.as_ref()) == *serial;
            if !entries.iter().any(listed) {
                entries.push(revoked(&serial.0, OffsetDateTime::now_utc()));
            }
        }
        self.list(entries, number, days)
    }

    /// Creates a revocation list, in PEM, of all these certificates, valid for `days` from now. It replaces
    /// earlier lists: pass their certificates again.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for 0 days or too many, [`Error::Tls`] for a
    /// text that is not a certificate, or if the list cannot be signed.
    pub fn revoke<S: AsRef<str>>(&self, cert_pems: &[S], days: u32) -> Result<String> {
        let one = |(index, pem): (usize, &S)| {
            let what = format!("certificate {index} to revoke");
            with_first(&what, pem.as_ref(), |certificate| {
                Ok(revoked(certificate.raw_serial(), OffsetDateTime::now_utc()))
            })
        };
        let all = cert_pems.iter().enumerate().map(one);
        self.list(all.collect::<Result<_>>()?, 0, days)
    }

    /// Signs a list of these entries, whose number is greater than `former`.
    fn list(&self, entries: Vec<RevokedCertParams>, former: u64, days: u32) -> Result<String> {
        check_days(days)?;
        let now = OffsetDateTime::now_utc();
        // Lists without a former one are numbered by the time.
        let number = now.unix_timestamp().unsigned_abs();
        let params = CertificateRevocationListParams {
            this_update: now - SKEW,
            next_update: now + Duration::days(days.into()),
            crl_number: SerialNumber::from(number.max(former.saturating_add(1))),
            issuing_distribution_point: None,
            revoked_certs: entries,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = params.signed_by(&self.issuer);
        list.and_then(|list| list.pem())
            .map_err(|error| Error::tls(LIST, error))
    }

    /// Returns the entries and the number of an earlier list of this authority.
    fn former(&self, pem: &str) -> Result<(Vec<RevokedCertParams>, u64)> {
        let der = CertificateRevocationListDer::from_pem_slice(pem.as_bytes())
            .map_err(|error| Error::tls(LIST, error))?;
        let (_, list) =
            x509_parser::parse_x509_crl(&der).map_err(|error| Error::tls(LIST, error))?;
        with_first(AUTHORITY, &self.cert_pem, |own| {
            let signed = list.verify_signature(own.public_key());
            match list.issuer().as_raw() == own.subject().as_raw() && signed.is_ok() {
                true => Ok(()),
                false => Err(Error::tls(LIST, "another authority has signed it")),
            }
        })?;
        // This authority's lists have no number beyond 64 bits.
        let number = list.crl_number();
        let number = number.map_or(0, |number| u64::try_from(number).unwrap_or(u64::MAX));
        Ok((
            list.iter_revoked_certificates().map(entry).collect(),
            number,
        ))
    }
}

/// Returns the entry of a certificate that is revoked at a time, for no stated reason.
fn revoked(serial: &[u8], at: OffsetDateTime) -> RevokedCertParams {
    RevokedCertParams {
        serial_number: SerialNumber::from_slice(serial),
        revocation_time: at,
        reason_code: Some(RevocationReason::Unspecified),
        invalidity_date: None,
    }
}

fn entry(entry: &RevokedCertificate<'_>) -> RevokedCertParams {
    use RevocationReason as Reason;
    let reason = entry.reason_code().map(|(_, code)| match code.0 {
        1 => Reason::KeyCompromise,
        2 => Reason::CaCompromise,
        3 => Reason::AffiliationChanged,
        4 => Reason::Superseded,
        5 => Reason::CessationOfOperation,
        6 => Reason::CertificateHold,
        8 => Reason::RemoveFromCrl,
        9 => Reason::PrivilegeWithdrawn,
        10 => Reason::AaCompromise,
        _ => Reason::Unspecified,
    });
    RevokedCertParams {
        reason_code: reason,
        invalidity_date: entry.invalidity_date().map(|(_, at)| at.to_datetime()),
        ..revoked(entry.raw_serial(), entry.revocation_date.to_datetime())
    }
}
