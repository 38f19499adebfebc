//! Why a peer is not trusted.

/// Why a peer is not trusted, or does not trust this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Distrust {
    /// The user of its process is not on the list.
    User,
    /// Its certificate does not have the expected name.
    Name,
    /// Its certificate is expired, or not valid yet.
    Validity,
    /// Its certificate is revoked.
    Revoked,
    /// No authority that this process trusts has issued its certificate.
    Authority,
    /// This end's revocation list has expired, or does not cover its certificate.
    RevocationList,
    /// Another fault of its certificate, or of TLS.
    Certificate,
    /// The peer does not trust this process.
    ByPeer,
}

crate::driver::remedies! {
    Distrust {
        Self::User =>
            "run both ends as the same user, or list the peer's user: `--server-user` and \
             `share::Peers` for a server's, `[local] users` of `egmem serve` for a client's",
        Self::Name =>
            "connect by a name that the certificate has, expect one of them (`--expect-peer`, \
             `Tls::expect_peer`), or issue it anew for the expected name (`egmem certs issue --san`)",
        Self::Validity =>
            "renew the certificate and load it, or set the clocks right",
        Self::Revoked =>
            "issue another certificate (`egmem certs issue`): this one stays revoked",
        Self::Authority =>
            "give both ends certificates of one authority (`egmem certs issue`), and its ca.pem",
        Self::RevocationList =>
            "get the authority's new revocation list and load it",
        Self::Certificate =>
            "compare the certificate (`openssl x509 -text`) with what this end requires",
        Self::ByPeer =>
            "check this process's certificate (`openssl x509 -text`): authority, validity, revocation; \
             the peer's log says more",
    }
}
