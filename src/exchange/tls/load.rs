//! Loads certificates and keys from PEM.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::CryptoProvider;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, RootCertStore, ServerConfig, client, version::TLS13};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use zeroize::{Zeroize, Zeroizing};

use super::peer_name::peer_name;
use super::trust::{End, Trust};
use crate::{Error, PeerName, Result};

/// The protocol's name for TLS's application-layer protocol negotiation (RFC 7301).
pub(super) const ALPN: &[u8] = b"egmem/1";

/// Larger than any such file.
const MAX_FILE: u64 = 4 << 20;

/// PEM texts, and their names for errors.
pub(super) struct Texts<'a> {
    pub ca: (&'a str, &'a [u8]),
    pub cert: (&'a str, &'a [u8]),
    pub key: (&'a str, &'a [u8]),
    pub crl: Option<(&'a str, &'a [u8])>,
}

/// The configuration of a process as server and client.
#[derive(Debug)]
pub(super) struct Loaded {
    /// `Err` if the certificate is not for servers.
    pub server: Result<Arc<ServerConfig>>,
    /// `Err` if it is not for clients.
    pub client: Result<Arc<ClientConfig>>,
    pub name: PeerName,
    pub trust: Arc<Trust>,
    /// The process's own certificate.
    pub own: Arc<[u8]>,
    /// Counts the loads of a [`Tls`](super::Tls).
    pub number: u64,
}

/// Reads a file's bytes, which are wiped when dropped.
pub(super) fn read(path: &Path, secret: bool) -> Result<Zeroizing<Vec<u8>>> {
    let what = path.display().to_string();
    let failed = |error: std::io::Error| Error::tls(&what, error);
    let file = File::open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if !meta.is_file() || meta.len() > MAX_FILE {
        return Err(Error::tls(&what, "no file, or too big for PEM"));
    }
    if secret && meta.mode() & 0o077 != 0 {
        tracing::warn!(
            target: "egmem_exchange::tls",
            path = %what,
            mode = format_args!("{:o}", meta.mode() & 0o7777),
            "others than the owner can read a private key: chmod 600"
        );
    }
    // Full capacity from the start: a vector that grows leaves its bytes behind in freed memory.
    let mut bytes = Zeroizing::new(Vec::with_capacity(meta.len() as usize + 1));
    file.take(meta.len())
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    Ok(bytes)
}

/// Reads all objects of a kind from a text, which has at least one.
fn all<T: PemObject>((what, text): (&str, &[u8]), kind: &str) -> Result<Vec<T>> {
    let list: Result<Vec<T>, _> = T::pem_slice_iter(text).collect();
    let list = list.map_err(|error| Error::tls(what, error))?;
    match list.is_empty() {
        true => Err(Error::tls(what, format!("there is no {kind} in it"))),
        false => Ok(list),
    }
}

pub(super) fn build(texts: &Texts<'_>) -> Result<Loaded> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    for root in all::<CertificateDer<'static>>(texts.ca, "certificate")? {
        roots
            .add(root)
            .map_err(|error| Error::tls(texts.ca.0, error))?;
    }
    let crls = texts.crl.map(|crl| all(crl, "revocation list"));
    let crls: Vec<CertificateRevocationListDer<'static>> = crls.transpose()?.unwrap_or_default();
    let key = certified(texts, &provider)?;
    let roots = Arc::new(roots);
    let what = texts.crl.map_or(texts.ca.0, |(what, _)| what);
    let trust = Trust::new(roots.clone(), &crls).map_err(|error| Error::tls(what, error))?;
    let (serves, dials) = usages(texts, &key, &trust);
    let name = peer_name(key.cert.first()).map_err(|why| Error::tls(texts.cert.0, why))?;
    let own = key.cert.first().map(|der| Arc::from(&der[..]));
    let ends = Ends {
        provider,
        roots,
        crls,
        resolver: Arc::new(SingleCertAndKey::from(key)),
        what,
    };
    let server = serves.and_then(|()| ends.server());
    let client = dials.and_then(|()| ends.client());
    // A fault of the texts affects both; a certificate for one end only is kept.
    if let (Err(error), Err(_)) = (&server, &client) {
        return Err(error.clone());
    }
    Ok(Loaded {
        server,
        client,
        name,
        trust: Arc::new(trust),
        own: own.unwrap_or_default(),
        number: 0,
    })
}

/// The common parts of both ends' configurations.
struct Ends<'a> {
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    /// Without revocation lists, none is consulted.
    crls: Vec<CertificateRevocationListDer<'static>>,
    resolver: Arc<SingleCertAndKey>,
    /// The text that a fault of the verifier is in.
    what: &'a str,
}

impl Ends<'_> {
    fn server(&self) -> Result<Arc<ServerConfig>> {
        let (roots, provider) = (Arc::clone(&self.roots), Arc::clone(&self.provider));
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .with_crls(self.crls.clone())
            .enforce_revocation_expiration()
            .build()
            .map_err(|error| Error::tls(self.what, error))?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| Error::tls("TLS 1.3", error))?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(self.resolver.clone());
        config.alpn_protocols = vec![ALPN.to_vec()];
        // Each connection authenticates its peer anew, and no data is sent before.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        config.max_early_data_size = 0;
        config.send_half_rtt_data = false;
        Ok(Arc::new(config))
    }

    fn client(&self) -> Result<Arc<ClientConfig>> {
        let (roots, provider) = (Arc::clone(&self.roots), Arc::clone(&self.provider));
        let builder =
            client::WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider));
        let verifier = builder
            .with_crls(self.crls.clone())
            .enforce_revocation_expiration()
            .build()
            .map_err(|error| Error::tls(self.what, error))?;
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| Error::tls("TLS 1.3", error))?
            .with_webpki_verifier(verifier)
            .with_client_cert_resolver(self.resolver.clone());
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = client::Resumption::disabled();
        config.enable_early_data = false;
        Ok(Arc::new(config))
    }
}

fn certified(texts: &Texts<'_>, provider: &CryptoProvider) -> Result<CertifiedKey> {
    use rustls::{Error as Tls, InconsistentKeys};
    let chain = all(texts.cert, "certificate")?;
    let (what, text) = texts.key;
    let mut key = PrivateKeyDer::from_pem_slice(text).map_err(|error| Error::tls(what, error))?;
    let signing = provider.key_provider.load_private_key(key.clone_key());
    key.zeroize();
    let signing = signing.map_err(|error| Error::tls(what, error))?;
    let certified = CertifiedKey::new(chain, signing);
    match certified.keys_match() {
        Ok(()) => Ok(certified),
        Err(Tls::InconsistentKeys(InconsistentKeys::KeyMismatch)) => Err(Error::tls(
            what,
            format!("the key is not that of the certificate in {}", texts.cert.0),
        )),
        Err(error) => Err(Error::tls(texts.cert.0, error)),
    }
}

/// Returns whether peers that trust the same authority and have the same revocation lists would accept this
/// process's own certificate for a server, and for a client.
fn usages(texts: &Texts<'_>, key: &CertifiedKey, trust: &Trust) -> (Result<()>, Result<()>) {
    let bad = |error: webpki::Error| {
        use webpki::Error as Bad;
        let detail = match error {
            Bad::CertExpired { .. } => "the certificate has expired".into(),
            Bad::CertNotValidYet { .. } => "the certificate is not valid yet".into(),
            Bad::CertRevoked => "the certificate is revoked".into(),
            Bad::CrlExpired { time, next_update } => {
                let late = time.as_secs().saturating_sub(next_update.as_secs());
                let what = texts.crl.map_or("revocation list", |(what, _)| what);
                let late = Duration::from_secs(late);
                let why = format!("the revocation list is {late:?} past its next update; renew it");
                return Error::tls(what, why);
            }
            Bad::UnknownIssuer | Bad::InvalidSignatureForPublicKey => {
                format!("the certificate is not of the authority in {}", texts.ca.0)
            }
            Bad::RequiredEkuNotFoundContext(_) => {
                "the certificate is not for this end of a connection".into()
            }
            other => other.to_string(),
        };
        Error::tls(texts.cert.0, detail)
    };
    let check = |end| {
        // The lists may cover other authorities only.
        let unknown = webpki::UnknownStatusPolicy::Allow;
        trust
            .verify(&key.cert, end, UnixTime::now(), unknown)
            .map_err(bad)
    };
    (check(End::Server), check(End::Client))
}
