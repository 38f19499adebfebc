//! Loads certificates and keys from PEM.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CertificateError, ClientConfig, RootCertStore, ServerConfig, client, version::TLS13};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use webpki::UnknownStatusPolicy;
use zeroize::{Zeroize, Zeroizing};

use super::trust::{ALPN, End, Loaded, Trust, fault, peer_name};
use super::{TlsFiles, TlsPem};
use crate::{Error, Result};

/// Larger than any such file.
const MAX_FILE: u64 = 4 << 20;

/// Loads files.
pub(super) fn files(files: &TlsFiles) -> Result<Loaded> {
    let (ca, cert) = (read(&files.ca, false)?, read(&files.cert, false)?);
    let key = read(&files.key, true)?;
    let crl = files
        .crl
        .as_ref()
        .map(|path| read(path, false))
        .transpose()?;
    let crl_path = files.crl.as_ref().unwrap_or(&files.ca);
    let names =
        [&files.ca, &files.cert, &files.key, crl_path].map(|path| path.display().to_string());
    let pem = TlsPem {
        ca: &ca,
        cert: &cert,
        key: &key,
        crl: crl.as_ref().map(|text| &text[..]),
    };
    texts(pem, names.each_ref().map(String::as_str))
}

/// Reads a file's bytes, which are wiped when dropped.
fn read(path: &Path, secret: bool) -> Result<Zeroizing<Vec<u8>>> {
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

/// Loads texts; `names` are theirs in errors: authority, certificate, key, revocation lists.
pub(super) fn texts(pem: TlsPem<'_>, names: [&str; 4]) -> Result<Loaded> {
    let [ca, cert, _, crl] = names;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    for root in all(ca, pem.ca, "certificate")? {
        roots.add(root).map_err(|error| Error::tls(ca, error))?;
    }
    let roots = Arc::new(roots);
    let crls: Vec<CertificateRevocationListDer<'static>> = match pem.crl {
        Some(text) => all(crl, text, "revocation list")?,
        None => Vec::new(),
    };
    // What a fault of the verifiers is in.
    let what = if pem.crl.is_some() { crl } else { ca };
    let key = certified(&pem, names, &provider)?;
    let trust = Trust::new(roots.clone(), &crls).map_err(|error| Error::tls(what, error))?;
    // Whether peers that trust the same authority and have the same lists would accept this certificate at that end.
    // The lists may cover other authorities only.
    let usable = |end| {
        let now = UnixTime::now();
        let verified = trust.verify(&key.cert, end, now, UnknownStatusPolicy::Allow);
        verified.map_err(|error| match error {
            CertificateError::ExpiredRevocationListContext { .. } => {
                Error::tls(crl, fault(&error).1)
            }
            error => Error::tls(cert, fault(&error).1),
        })
    };
    let (serves, dials) = (usable(End::Server), usable(End::Client));
    let name = peer_name(key.cert.first()).map_err(|why| Error::tls(cert, why))?;
    let own = key.cert.first().map(|der| Arc::from(&der[..]));
    let ends = Ends {
        provider,
        roots,
        crls,
        resolver: Arc::new(SingleCertAndKey::from(key)),
    };
    let faulty = |error| Error::tls(what, error);
    let server = serves.and_then(|()| ends.server().map_err(faulty));
    let client = dials.and_then(|()| ends.client().map_err(faulty));
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

/// Reads all objects of a kind from a text, which has at least one.
fn all<T: PemObject>(what: &str, text: &[u8], kind: &str) -> Result<Vec<T>> {
    let list: Result<Vec<T>, _> = T::pem_slice_iter(text).collect();
    let list = list.map_err(|error| Error::tls(what, error))?;
    if list.is_empty() {
        return Err(Error::tls(what, format!("there is no {kind} in it")));
    }
    Ok(list)
}

fn certified(
    pem: &TlsPem<'_>,
    [_, cert, key, _]: [&str; 4],
    provider: &CryptoProvider,
) -> Result<CertifiedKey> {
    use rustls::{Error as Tls, InconsistentKeys};
    let chain = all(cert, pem.cert, "certificate")?;
    let mut private =
        PrivateKeyDer::from_pem_slice(pem.key).map_err(|error| Error::tls(key, error))?;
    let signing = provider.key_provider.load_private_key(private.clone_key());
    private.zeroize();
    let signing = signing.map_err(|error| Error::tls(key, error))?;
    let certified = CertifiedKey::new(chain, signing);
    match certified.keys_match() {
        Ok(()) => Ok(certified),
        Err(Tls::InconsistentKeys(InconsistentKeys::KeyMismatch)) => Err(Error::tls(
            key,
            format!("the key is not that of the certificate in {cert}"),
        )),
        Err(error) => Err(Error::tls(cert, error)),
    }
}

/// The common parts of both ends' configurations.
struct Ends {
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    /// Without revocation lists, none is consulted.
    crls: Vec<CertificateRevocationListDer<'static>>,
    resolver: Arc<SingleCertAndKey>,
}

type Built<T> = Result<Arc<T>, Box<dyn std::error::Error>>;

impl Ends {
    fn server(&self) -> Built<ServerConfig> {
        let (roots, provider) = (Arc::clone(&self.roots), Arc::clone(&self.provider));
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .with_crls(self.crls.clone())
            .enforce_revocation_expiration()
            .build()?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
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

    fn client(&self) -> Built<ClientConfig> {
        let (roots, provider) = (Arc::clone(&self.roots), Arc::clone(&self.provider));
        let verifier =
            client::WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
                .with_crls(self.crls.clone())
                .enforce_revocation_expiration()
                .build()?;
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_webpki_verifier(verifier)
            .with_client_cert_resolver(self.resolver.clone());
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = client::Resumption::disabled();
        config.enable_early_data = false;
        Ok(Arc::new(config))
    }
}
