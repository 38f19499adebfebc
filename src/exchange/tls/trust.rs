//! Verifies peers' certificates: in handshakes, and again while a session lasts.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    AlertDescription, CertificateError, ClientConfig, CommonState, DigitallySignedStruct,
    InvalidMessage, OtherError, RootCertStore, ServerConfig, SignatureScheme,
};
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

use crate::{Distrust, Error, PeerName, Result};

/// The protocol's name for TLS's application-layer protocol negotiation (RFC 7301).
pub(super) const ALPN: &[u8] = b"egmem/1";
/// The longest certificate chain of a peer in bytes: a server keeps it for each session.
pub(super) const MAX_CHAIN: usize = 16 << 10;

/// The end of a connection that presents a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Server,
    Client,
}

/// The configuration of a process as server and client.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// `Err` if the certificate is not for servers.
    pub(crate) server: Result<Arc<ServerConfig>>,
    /// `Err` if it is not for clients.
    pub(crate) client: Result<Arc<ClientConfig>>,
    pub(super) name: PeerName,
    pub(super) verifiers: Verifiers,
    /// The process's own certificate.
    pub(crate) own: Arc<[u8]>,
    /// Counts the loads of a [`Tls`](super::Tls).
    pub(super) number: u64,
}

/// Verify peers against the authorities and revocation lists: all of a chain, and no list past its next update.
#[derive(Debug)]
pub(super) struct Verifiers {
    pub servers: Arc<WebPkiServerVerifier>,
    pub clients: Arc<dyn ClientCertVerifier>,
}

impl Verifiers {
    /// With revocation lists, `strict` verifiers refuse certificates that no list covers. Without, none is consulted.
    ///
    /// # Errors
    /// The parser's error, for a revocation list.
    pub fn new(
        (roots, crls): (
            &Arc<RootCertStore>,
            &[CertificateRevocationListDer<'static>],
        ),
        provider: &Arc<CryptoProvider>,
        strict: bool,
    ) -> Result<Self, VerifierBuilderError> {
        let both = || (Arc::clone(roots), Arc::clone(provider));
        let (roots, provider) = both();
        let mut servers = WebPkiServerVerifier::builder_with_provider(roots, provider)
            .with_crls(crls.to_vec())
            .enforce_revocation_expiration();
        let (roots, provider) = both();
        let mut clients = WebPkiClientVerifier::builder_with_provider(roots, provider)
            .with_crls(crls.to_vec())
            .enforce_revocation_expiration();
        if !strict {
            servers = servers.allow_unknown_revocation_status();
            clients = clients.allow_unknown_revocation_status();
        }
        Ok(Self {
            servers: servers.build()?,
            clients: clients.build()?,
        })
    }

    /// Verifies a chain at a time, as a handshake does, and no name.
    pub fn verify(
        &self,
        chain: &[CertificateDer<'_>],
        end: End,
        at: UnixTime,
    ) -> Result<(), CertificateError> {
        let (own, between) = chain.split_first().ok_or(CertificateError::BadEncoding)?;
        let verified = match end {
            End::Server => verify_server(&self.servers, own, between, at),
            End::Client => (self.clients.verify_client_cert(own, between, at)).map(|_| ()),
        };
        verified.map_err(|error| match error {
            rustls::Error::InvalidCertificate(reason) => reason,
            other => CertificateError::Other(OtherError(Arc::new(other))),
        })
    }
}

/// Verifies a server's chain, and no name: rustls compares that after everything else.
fn verify_server(
    verifier: &WebPkiServerVerifier,
    own: &CertificateDer<'_>,
    between: &[CertificateDer<'_>],
    at: UnixTime,
) -> Result<(), rustls::Error> {
    use CertificateError::{NotValidForName, NotValidForNameContext};
    let nobody = ServerName::from(std::net::Ipv4Addr::UNSPECIFIED);
    match verifier.verify_server_cert(own, between, &nobody, &[], at) {
        Ok(_)
        | Err(rustls::Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. })) => {
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Returns the fault of a certificate, as a code for programs and in rustls' words.
pub(super) fn fault(reason: &CertificateError) -> (Distrust, String) {
    use CertificateError as Bad;
    let (cause, hint) = match reason {
        Bad::Expired | Bad::ExpiredContext { .. } => (Distrust::Validity, ""),
        Bad::NotValidYet | Bad::NotValidYetContext { .. } => (Distrust::Validity, ""),
        Bad::Revoked => (Distrust::Revoked, ": its certificate is revoked"),
        Bad::UnknownIssuer | Bad::BadSignature => {
            let hint = ": its certificate is from an authority that is not trusted here";
            (Distrust::Authority, hint)
        }
        Bad::UnknownRevocationStatus => {
            let hint = ": no revocation list here is of its certificate's authority";
            (Distrust::RevocationList, hint)
        }
        Bad::ExpiredRevocationList | Bad::ExpiredRevocationListContext { .. } => {
            (Distrust::RevocationList, "")
        }
        Bad::NotValidForName | Bad::NotValidForNameContext { .. } => (Distrust::Name, ""),
        Bad::Other(other) if other.0.is::<OtherName>() => {
            return (Distrust::Name, other.to_string());
        }
        _ => (Distrust::Certificate, ""),
    };
    (cause, format!("{reason}{hint}"))
}

/// Converts a connection's I/O error: to TLS's own error, if it contains one. In TLS 1.3 a client learns only after its
/// own part of the handshake, when it reads, that the server refuses its certificate.
pub(crate) fn explain(peer: &str, doing: &str, error: &io::Error) -> Error {
    use rustls::Error as Tls;
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    let Some(error) = inner else {
        return Error::peer_lost(peer, format!("{doing}: {error}"));
    };
    let (cause, why) = match error {
        Tls::InvalidCertificate(reason) => fault(reason),
        Tls::NoCertificatesPresented | Tls::PeerIncompatible(_) | Tls::NoApplicationProtocol => {
            (Distrust::Certificate, error.to_string())
        }
        Tls::AlertReceived(alert) if is_about_trust(*alert) => {
            let why = format!("it does not trust this process: {error}");
            (Distrust::ByPeer, why)
        }
        Tls::InvalidMessage(InvalidMessage::InvalidContentType) => {
            let peer = peer.into();
            return Error::TlsAtOneEnd { peer, here: true };
        }
        _ => return Error::protocol(peer, format!("TLS: {error}")),
    };
    Error::not_trusted(peer, cause, why)
}

/// Returns whether a peer's alert is about this process's certificate or about TLS's version, ciphers or protocol.
fn is_about_trust(alert: AlertDescription) -> bool {
    use AlertDescription as Alert;
    matches!(
        alert,
        Alert::CertificateExpired
            | Alert::CertificateRevoked
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::CertificateRequired
            | Alert::NoCertificate
            | Alert::UnsupportedCertificate
            | Alert::BadCertificate
            | Alert::DecryptError
            | Alert::AccessDenied
            | Alert::ProtocolVersion
            | Alert::HandshakeFailure
            | Alert::InsufficientSecurity
            | Alert::NoApplicationProtocol
    )
}

/// Returns the name of a peer with this certificate: its SPIFFE id, or else its first DNS name.
pub(super) fn peer_name(certificate: Option<&CertificateDer<'_>>) -> Result<PeerName, String> {
    let der = certificate.ok_or("there is no certificate")?;
    let end = EndEntityCert::try_from(der)
        .map_err(|error| format!("the certificate cannot be read: {error}"))?;
    let is_spiffe = |uri: &&str| {
        let scheme = uri.get(..7);
        scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case("spiffe:"))
    };
    if let Some(id) = end.valid_uri_names().find(is_spiffe) {
        // X.509-SVID, section 2: exactly one URI.
        if end.valid_uri_names().count() > 1 {
            return Err("the certificate has a SPIFFE id and further URIs".into());
        }
        return PeerName::spiffe(id)
            .map_err(|error| format!("the certificate's URI is not a peer name: {error}"));
    }
    let first = end.valid_dns_names().next();
    let name = first.ok_or(
        "the certificate has neither a SPIFFE id nor a DNS name, which would be its peer name",
    )?;
    PeerName::certificate(name)
        .map_err(|error| format!("the certificate's first DNS name is not a peer name: {error}"))
}

/// Verifies a server's chain like rustls, and a SPIFFE id instead of the host name, at any address.
#[derive(Debug)]
pub(super) struct SpiffeVerifier {
    pub id: PeerName,
    pub servers: Arc<WebPkiServerVerifier>,
}

/// The server has another name than the expected SPIFFE id.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct OtherName(String);

impl ServerCertVerifier for SpiffeVerifier {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        verify_server(&self.servers, own, between, now)?;
        match peer_name(Some(own)) {
            Ok(name) if name == self.id => Ok(ServerCertVerified::assertion()),
            Ok(name) => {
                let why = format!("its certificate is for {name}, not for {}", self.id);
                Err(CertificateError::Other(OtherError(Arc::new(OtherName(why)))).into())
            }
            Err(_) => Err(CertificateError::NotValidForName.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not spoken".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        (self.servers).verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.servers.supported_verify_schemes()
    }
}

/// The certificates that a handshake has verified.
#[derive(Debug)]
pub(crate) struct Credential {
    chain: Vec<CertificateDer<'static>>,
    end: End,
    /// When the next certificate expires. At first the first one, so that one that has expired already is found.
    due: Option<SystemTime>,
    /// The number of the load that the chain was verified against last.
    number: u64,
    /// The certificate that this process presented in the handshake.
    pub(crate) own: Arc<[u8]>,
}

impl Credential {
    /// Returns the peer that a finished handshake has authenticated at that end, and its certificates.
    ///
    /// # Errors
    /// [`NotTrusted`](crate::ShareError::NotTrusted) for a certificate without a name or a chain that is too long,
    /// [`Protocol`](crate::ShareError::Protocol) for a peer that has not agreed on this protocol.
    pub(crate) fn of(
        peer: &str,
        state: &CommonState,
        end: End,
        loaded: &Loaded,
    ) -> Result<(PeerName, Self)> {
        if state.alpn_protocol() != Some(ALPN) {
            return Err(Error::protocol(peer, "no agreement on egmem/1 in TLS"));
        }
        let wrong = |why| Error::not_trusted(peer, Distrust::Certificate, why);
        let chain = state.peer_certificates().unwrap_or_default();
        let name = peer_name(chain.first()).map_err(wrong)?;
        if chain.iter().map(|one| one.len()).sum::<usize>() > MAX_CHAIN {
            let why = format!("its certificate chain is longer than {MAX_CHAIN} bytes");
            return Err(wrong(why));
        }
        let credential = Self {
            chain: chain.iter().map(|one| one.clone().into_owned()).collect(),
            end,
            due: chain.iter().filter_map(expiry).min(),
            number: loaded.number,
            own: Arc::clone(&loaded.own),
        };
        Ok((name, credential))
    }

    /// Returns how long it is until the next certificate of the chain expires.
    pub(crate) fn left(&self, now: SystemTime) -> Option<Duration> {
        let due = self.due?;
        Some(due.duration_since(now).unwrap_or_default())
    }

    /// Verifies the chain again, if these are other certificates than before or one of the chain has expired since. An
    /// error says why the peer is no longer trusted.
    ///
    /// A peer may send certificates that its trust does not depend on, so each expiry counts once.
    pub(crate) fn check(&mut self, loaded: &Loaded, now: SystemTime) -> Result<(), String> {
        if self.number == loaded.number && self.due.is_none_or(|due| due > now) {
            return Ok(());
        }
        let since = now.duration_since(SystemTime::UNIX_EPOCH);
        let at = UnixTime::since_unix_epoch(since.unwrap_or_default());
        let verified = loaded.verifiers.verify(&self.chain, self.end, at);
        verified.map_err(|error| fault(&error).1)?;
        self.number = loaded.number;
        let expiries = self.chain.iter().filter_map(expiry);
        self.due = expiries.filter(|&expiry| expiry > now).min();
        Ok(())
    }
}

/// Returns the first moment at which a certificate is no longer valid.
///
/// webpki has no accessor for it, but reports it in the error of a verification at a later time, which it
/// checks before issuer and purpose.
fn expiry(certificate: &CertificateDer<'_>) -> Option<SystemTime> {
    let late = UnixTime::since_unix_epoch(Duration::from_secs(u64::MAX));
    let (algorithms, usage) = (webpki::ALL_VERIFICATION_ALGS, KeyUsage::client_auth());
    let parsed = EndEntityCert::try_from(certificate).ok()?;
    let verified = parsed.verify_for_usage(algorithms, &[], &[], late, usage, None, None);
    match verified.err()? {
        webpki::Error::CertExpired { not_after, .. } => {
            let first = Duration::from_secs(not_after.as_secs().checked_add(1)?);
            SystemTime::UNIX_EPOCH.checked_add(first)
        }
        _ => None,
    }
}
