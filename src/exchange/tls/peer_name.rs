//! The name of a peer, in its certificate.

use rustls_pki_types::CertificateDer;

use crate::PeerName;

/// Returns the name of a peer with this certificate: its SPIFFE id, or else its first DNS name.
pub(crate) fn peer_name(certificate: Option<&CertificateDer<'_>>) -> Result<PeerName, String> {
    let der = certificate.ok_or("there is no certificate")?;
    let end = webpki::EndEntityCert::try_from(der)
        .map_err(|error| format!("the certificate cannot be read: {error}"))?;
    let mut uris = end.valid_uri_names();
    let is_spiffe = |uri: &&str| {
        let scheme = uri.get(..7);
        scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case("spiffe:"))
    };
    if let Some(id) = end.valid_uri_names().find(is_spiffe) {
        // X.509-SVID, section 2: exactly one URI.
        return match (uris.next(), uris.next()) {
            (Some(_), None) => PeerName::spiffe(id)
                .map_err(|error| format!("the certificate's URI is not a peer name: {error}")),
            _ => Err("the certificate has a SPIFFE id and further URIs".into()),
        };
    }
    let first = end.valid_dns_names().next();
    let name = first.ok_or(
        "the certificate has neither a SPIFFE id nor a DNS name, which would be its peer name",
    )?;
    PeerName::certificate(name)
        .map_err(|error| format!("the certificate's first DNS name is not a peer name: {error}"))
}
