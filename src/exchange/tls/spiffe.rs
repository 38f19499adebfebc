//! Verifies servers by a SPIFFE id, at any address.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, OtherError, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use super::fault::{OtherName, of_webpki};
use super::peer_name::peer_name;
use super::trust::{End, Trust};
use crate::PeerName;

/// Returns the configuration that requires this SPIFFE id of servers.
pub(super) fn expecting(
    config: &ClientConfig,
    id: &PeerName,
    trust: &Arc<Trust>,
) -> Arc<ClientConfig> {
    let mut config = config.clone();
    let verifier = Verifier {
        id: id.clone(),
        trust: Arc::clone(trust),
        algorithms: config.crypto_provider().signature_verification_algorithms,
    };
    let mut dangerous = config.dangerous();
    dangerous.set_certificate_verifier(Arc::new(verifier));
    Arc::new(config)
}

/// Verifies the chain like rustls, and the SPIFFE id instead of the host name.
#[derive(Debug)]
struct Verifier {
    id: PeerName,
    trust: Arc<Trust>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let chain: Vec<_> = std::iter::once(end_entity)
            .chain(intermediates)
            .cloned()
            .collect();
        let unknown = webpki::UnknownStatusPolicy::Deny;
        self.trust
            .verify(&chain, End::Server, now, unknown)
            .map_err(|error| rustls::Error::from(of_webpki(error)))?;
        match peer_name(Some(end_entity)) {
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
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
