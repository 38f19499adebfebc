//! Mutual TLS: authenticates the peer and encrypts the connection.
//!
//! Only TLS 1.3 (RFC 8446), with certificates at both ends, no resumption and no early data, so that nothing
//! can be replayed. Cryptography is ring's.

#[cfg(test)]
mod tests;
mod trust;

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::server::NoServerSessionStorage;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use zeroize::{Zeroize, Zeroizing};

pub(crate) use trust::{Credential, End, Loaded, explain};

use crate::{Error, PeerName, Result};
use trust::{ALPN, SpiffeVerifier, Verifiers, fault, peer_name};

/// How often the wall clock is read to find expired certificates: timers do not run while the machine is
/// suspended, and the clock may be set.
pub(crate) const WALL_CLOCK: Duration = Duration::from_secs(1);

/// Files in PEM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// The trusted authorities, which sign peers' certificates.
    pub ca: PathBuf,
    /// This process's certificate, then the chain to the authority's.
    pub cert: PathBuf,
    /// Its private key: PKCS #8, SEC 1 or PKCS #1.
    pub key: PathBuf,
    /// Revocation lists of the authorities. With them, a peer whose certificate is covered by no list, or
    /// whose list has expired, is not trusted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crl: Option<PathBuf>,
}

/// Texts in PEM: see [`TlsFiles`].
#[derive(Clone, Copy)]
pub struct TlsPem<'a> {
    /// The authorities.
    pub ca: &'a [u8],
    /// The certificate.
    pub cert: &'a [u8],
    /// Its key.
    pub key: &'a [u8],
    /// Revocation lists.
    pub crl: Option<&'a [u8]>,
}

/// A process's certificate and key, and the authorities that it trusts.
///
/// A peer's name is the SPIFFE id of its certificate, which then must be its only URI; without one, the first
/// DNS name (subject alternative name). A peer whose certificate has neither is refused. Clones share the
/// loaded certificates.
#[derive(Clone)]
pub struct Tls {
    shared: Arc<SharedTls>,
    expect: Option<PeerName>,
}

pub(crate) type Reloads = watch::Receiver<Arc<Loaded>>;

struct SharedTls {
    files: Option<TlsFiles>,
    loaded: watch::Sender<Arc<Loaded>>,
}

impl Tls {
    /// Loads files.
    ///
    /// Warns (`tracing`) if other users than the owner can read the key.
    ///
    /// # Errors
    /// [`Error::Tls`] with the file and its fault: it cannot be read, the key does not belong to the
    /// certificate, the certificate has expired, is not valid yet, is not signed by the authority, or has no
    /// name; the revocation list is past its next update, or the certificate is on it.
    pub fn load(files: TlsFiles) -> Result<Self> {
        let loaded = load_files(&files)?;
        Ok(Self::new(Some(files), loaded))
    }

    /// Loads texts.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_pem(pem: TlsPem<'_>) -> Result<Self> {
        Ok(Self::new(None, load_texts(pem, NAMES)?))
    }

    fn new(files: Option<TlsFiles>, loaded: Loaded) -> Self {
        Self {
            shared: Arc::new(SharedTls {
                files,
                loaded: watch::Sender::new(Arc::new(loaded)),
            }),
            expect: None,
        }
    }

    /// Loads the files again, after certificates were replaced. New connections of all clones use the new
    /// ones. Servers and clients verify the peers of open connections again and end those that are no longer
    /// trusted; clients whose own certificate has changed reconnect with it and resume their sessions, as soon as no request but waits and
    /// lists is outstanding.
    ///
    /// # Errors
    /// As [`load`](Self::load), and the certificates loaded before stay;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) if this was not loaded from files.
    pub fn reload(&self) -> Result<()> {
        let files = self.shared.files.as_ref();
        let files = files.ok_or_else(|| Error::invalid("TLS", "not loaded from files"))?;
        self.put(load_files(files)?);
        Ok(())
    }

    /// Loads these texts instead: see [`reload`](Self::reload).
    ///
    /// # Errors
    /// As [`load`](Self::load), and the certificates loaded before stay.
    pub fn reload_pem(&self, pem: TlsPem<'_>) -> Result<()> {
        self.put(load_texts(pem, NAMES)?);
        Ok(())
    }

    /// Sets the name that a client expects of the server's certificate, a DNS name or a SPIFFE id, instead of
    /// the address's host name or IP address.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a text that is neither.
    pub fn expect_peer(mut self, name: &str) -> Result<Self> {
        self.expect = Some(if name.starts_with("spiffe:") {
            PeerName::spiffe(name)?
        } else {
            PeerName::certificate(name)?
        });
        Ok(self)
    }

    /// Returns the name by which peers know this process.
    pub fn name(&self) -> PeerName {
        self.loaded().name.clone()
    }

    /// Returns what is loaded now.
    pub(crate) fn loaded(&self) -> Arc<Loaded> {
        Arc::clone(&self.shared.loaded.borrow())
    }

    fn put(&self, mut loaded: Loaded) {
        self.shared.loaded.send_modify(|place| {
            loaded.number = place.number + 1;
            *place = Arc::new(loaded);
        });
    }

    /// Returns a receiver of reloads.
    pub(crate) fn reloads(&self) -> Reloads {
        self.shared.loaded.subscribe()
    }

    /// Returns the configuration for one connection of a client.
    pub(crate) fn client(&self, loaded: &Loaded) -> Result<Arc<ClientConfig>> {
        let mut config = loaded.client.clone()?;
        if let Some(id @ PeerName::Spiffe(_)) = &self.expect {
            let config = Arc::make_mut(&mut config);
            let (id, servers) = (id.clone(), Arc::clone(&loaded.verifiers.servers));
            let verifier = SpiffeVerifier { id, servers };
            let mut dangerous = config.dangerous();
            dangerous.set_certificate_verifier(Arc::new(verifier));
        }
        Ok(config)
    }

    /// Returns the name that the certificate of the server at `host` must have, unless a SPIFFE id is
    /// expected.
    pub(crate) fn server_name(&self, host: &str) -> Result<ServerName<'static>> {
        let name = match &self.expect {
            Some(PeerName::Certificate(name)) => &**name,
            _ => host,
        };
        ServerName::try_from(name.to_owned())
            .map_err(|_| Error::invalid("address", "its host is neither a DNS name nor an IP"))
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("name", &self.loaded().name.to_string())
            .field("files", &self.shared.files)
            .field("expect", &self.expect)
            .finish_non_exhaustive()
    }
}

opaque!(TlsPem<'_>);

/// What errors call the texts of a [`TlsPem`].
const NAMES: [&str; 4] = ["authority", "certificate", "key", "revocation list"];

/// Waits for the next reload, if there may be one.
///
/// # Cancel safety
/// No reload is missed.
pub(crate) async fn reloaded(reloads: &mut Option<Reloads>) {
    if let Some(reloads) = reloads
        && reloads.changed().await.is_ok()
    {
        return;
    }
    // No handle is left that could reload it.
    std::future::pending().await
}

/// Larger than any such file.
const MAX_FILE: u64 = 4 << 20;

/// Loads files.
fn load_files(files: &TlsFiles) -> Result<Loaded> {
    let (ca, cert) = (read(&files.ca, false)?, read(&files.cert, false)?);
    let key = read(&files.key, true)?;
    let lists = files.crl.as_deref().map(|path| read(path, false));
    let crl = lists.transpose()?;
    let crl_path = files.crl.as_ref().unwrap_or(&files.ca);
    let names =
        [&files.ca, &files.cert, &files.key, crl_path].map(|path| path.display().to_string());
    let pem = TlsPem {
        ca: &ca,
        cert: &cert,
        key: &key,
        crl: crl.as_ref().map(|text| &text[..]),
    };
    load_texts(pem, names.each_ref().map(String::as_str))
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
fn load_texts(pem: TlsPem<'_>, names: [&str; 4]) -> Result<Loaded> {
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
    let verifiers = |strict| {
        let verifiers = Verifiers::new((&roots, &crls), &provider, strict);
        verifiers.map_err(|error| Error::tls(what, error))
    };
    // Whether peers that trust the same authority and have the same lists would accept this certificate at that end.
    // The lists may cover other authorities only.
    let lenient = verifiers(false)?;
    let usable = |end| match lenient.verify(&key.cert, end, UnixTime::now()) {
        Ok(()) => Ok(()),
        Err(error @ CertificateError::ExpiredRevocationListContext { .. }) => {
            Err(Error::tls(crl, fault(&error).1))
        }
        Err(error) => Err(Error::tls(cert, fault(&error).1)),
    };
    let (serves, dials) = (usable(End::Server), usable(End::Client));
    let name = peer_name(key.cert.first()).map_err(|why| Error::tls(cert, why))?;
    let own = key.cert.first().map(|der| Arc::from(&der[..]));
    let verifiers = verifiers(true)?;
    let key = Arc::new(SingleCertAndKey::from(key));
    let faulty = |error| Error::tls(what, error);
    let server = serves.and_then(|()| server(&provider, &verifiers, &key).map_err(faulty));
    let client = dials.and_then(|()| client(&provider, &verifiers, &key).map_err(faulty));
    // A fault of the texts affects both; a certificate for one end only is kept.
    if let (Err(error), Err(_)) = (&server, &client) {
        return Err(error.clone());
    }
    Ok(Loaded {
        server,
        client,
        name,
        verifiers,
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
    let certified = CertifiedKey::from_der(chain, private.clone_key(), provider);
    private.zeroize();
    certified.map_err(|error| match error {
        Tls::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            let why = format!("the key is not that of the certificate in {cert}");
            Error::tls(key, why)
        }
        Tls::InvalidCertificate(_) => Error::tls(cert, error),
        _ => Error::tls(key, error),
    })
}

/// Returns the configuration of a server.
fn server(
    provider: &Arc<CryptoProvider>,
    verifiers: &Verifiers,
    key: &Arc<SingleCertAndKey>,
) -> Result<Arc<ServerConfig>, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::clone(&verifiers.clients))
        .with_cert_resolver(key.clone());
    config.alpn_protocols = vec![ALPN.to_vec()];
    // Each connection authenticates its peer anew, and no data is sent before.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    config.send_half_rtt_data = false;
    Ok(Arc::new(config))
}

/// Returns the configuration of a client.
fn client(
    provider: &Arc<CryptoProvider>,
    verifiers: &Verifiers,
    key: &Arc<SingleCertAndKey>,
) -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .with_webpki_verifier(Arc::clone(&verifiers.servers))
        .with_client_cert_resolver(key.clone());
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
    Ok(Arc::new(config))
}
