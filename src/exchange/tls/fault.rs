//! Converts rustls' errors to this crate's.

use std::sync::Arc;
use std::{fmt, io};

use rustls::{AlertDescription, CertificateError, InvalidMessage, OtherError};

use crate::{Distrust, Error};

/// Converts a connection's I/O error: to TLS's own error, if it contains one.
pub(crate) fn explain(peer: &str, doing: &str, error: &io::Error) -> Error {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(inner) => refuse(peer, inner),
        None => Error::peer_lost(peer, format!("{doing}: {error}")),
    }
}

/// Converts a failed handshake, or an alert that came later: in TLS 1.3 a client learns only after its own
/// part of the handshake that the server refuses its certificate.
pub(super) fn refuse(peer: &str, error: &rustls::Error) -> Error {
    use rustls::Error as Tls;
    let (cause, why) = match error {
        Tls::InvalidCertificate(reason) => certificate(reason),
        Tls::NoCertificatesPresented => {
            (Distrust::Certificate, "it presents no certificate".into())
        }
        Tls::AlertReceived(alert) => match blame(*alert) {
            Some(why) => (
                Distrust::ByPeer,
                format!("it does not trust this process: {why}"),
            ),
            None => return Error::protocol(peer, format!("TLS alert {alert:?}")),
        },
        Tls::PeerIncompatible(_) => {
            let why = format!("no TLS 1.3 connection to it: {error}");
            (Distrust::Certificate, why)
        }
        Tls::InvalidMessage(InvalidMessage::InvalidContentType) => {
            let peer = peer.into();
            return Error::TlsAtOneEnd { peer, here: true };
        }
        Tls::NoApplicationProtocol => (Distrust::Certificate, "it does not speak egmem/1".into()),
        _ => return Error::protocol(peer, format!("TLS: {error}")),
    };
    Error::not_trusted(peer, cause, why)
}

/// Formats the names of a certificate from rustls' debug texts such as `DnsName("node-a")`.
fn names(presented: &[String]) -> String {
    let plain = |name: &String| {
        let inner = name
            .split_once('(')
            .and_then(|(_, rest)| rest.strip_suffix(')'));
        inner.unwrap_or(name).trim_matches('"').to_owned()
    };
    match presented {
        [] => "no name".into(),
        names => names.iter().map(plain).collect::<Vec<_>>().join(", "),
    }
}

/// Returns the fault of a certificate, as a code for programs and as text.
pub(super) fn certificate(reason: &CertificateError) -> (Distrust, String) {
    use CertificateError as Bad;
    let (cause, why) = match reason {
        Bad::Expired | Bad::ExpiredContext { .. } => {
            (Distrust::Validity, "its certificate has expired")
        }
        Bad::NotValidYet | Bad::NotValidYetContext { .. } => {
            (Distrust::Validity, "its certificate is not valid yet")
        }
        Bad::Revoked => (Distrust::Revoked, "its certificate is revoked"),
        Bad::UnknownIssuer | Bad::BadSignature => {
            let why = "its certificate is from an authority that is not trusted here";
            (Distrust::Authority, why)
        }
        Bad::ExpiredRevocationList | Bad::ExpiredRevocationListContext { .. } => (
            Distrust::RevocationList,
            "the revocation list here has expired",
        ),
        Bad::UnknownRevocationStatus => {
            let why = "no revocation list here is of its certificate's authority";
            (Distrust::RevocationList, why)
        }
        Bad::NotValidForNameContext {
            expected,
            presented,
        } => {
            let (names, expected) = (names(presented), expected.to_str());
            let why = format!("its certificate is for {names}, not for {expected}");
            return (Distrust::Name, why);
        }
        Bad::NotValidForName => (Distrust::Name, "its certificate is for another name"),
        Bad::InvalidPurpose | Bad::InvalidPurposeContext { .. } => {
            let why = "its certificate is not for this end of a connection";
            (Distrust::Certificate, why)
        }
        Bad::Other(other) if other.0.is::<OtherName>() => {
            return (Distrust::Name, other.0.to_string());
        }
        Bad::Other(other) => {
            return (
                Distrust::Certificate,
                format!("its certificate: {}", other.0),
            );
        }
        other => return (Distrust::Certificate, format!("its certificate: {other}")),
    };
    (cause, why.into())
}

/// Converts webpki's error to rustls'.
pub(super) fn of_webpki(error: webpki::Error) -> CertificateError {
    use webpki::Error as Bad;
    match error {
        Bad::CertExpired { .. } => CertificateError::Expired,
        Bad::CertNotValidYet { .. } => CertificateError::NotValidYet,
        Bad::CertRevoked => CertificateError::Revoked,
        Bad::UnknownIssuer => CertificateError::UnknownIssuer,
        Bad::InvalidSignatureForPublicKey => CertificateError::BadSignature,
        Bad::CrlExpired { .. } => CertificateError::ExpiredRevocationList,
        Bad::UnknownRevocationStatus => CertificateError::UnknownRevocationStatus,
        Bad::RequiredEkuNotFoundContext(_) => CertificateError::InvalidPurpose,
        other => CertificateError::Other(OtherError(Arc::new(other))),
    }
}

/// Describes a peer's alert about this process's certificate; `None` for another alert.
fn blame(alert: AlertDescription) -> Option<&'static str> {
    use AlertDescription as Alert;
    Some(match alert {
        Alert::CertificateExpired => "the certificate has expired, or is not valid yet",
        Alert::CertificateRevoked => "the certificate is revoked",
        Alert::UnknownCA => "the certificate is from an authority that is not trusted there",
        Alert::CertificateRequired | Alert::NoCertificate => "it wants a certificate",
        Alert::UnsupportedCertificate => "the certificate is not for this end of a connection",
        Alert::BadCertificate | Alert::CertificateUnknown => "the certificate is not accepted",
        Alert::DecryptError => "the certificate's signature is wrong",
        Alert::AccessDenied => "access is denied",
        Alert::ProtocolVersion | Alert::HandshakeFailure | Alert::InsufficientSecurity => {
            "there is no common version or cipher of TLS"
        }
        Alert::NoApplicationProtocol => "it does not speak egmem/1",
        _ => return None,
    })
}

/// The server has another name than the expected SPIFFE id.
#[derive(Debug)]
pub(super) struct OtherName(pub(super) String);

impl fmt::Display for OtherName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for OtherName {}
