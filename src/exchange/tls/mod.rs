//! Mutual TLS: authenticates the peer and encrypts the connection.
//!
//! Only TLS 1.3 (RFC 8446), with certificates at both ends, no resumption and no early data, so that nothing
//! can be replayed. Cryptography is ring's.

mod load;
#[cfg(test)]
mod tests;
mod trust;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

pub(crate) use trust::{Credential, End, Loaded, explain};

use crate::{Error, PeerName, Result};
use trust::SpiffeVerifier;

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
        let loaded = load::files(&files)?;
        Ok(Self::new(Some(files), loaded))
    }

    /// Loads texts.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_pem(pem: TlsPem<'_>) -> Result<Self> {
        Ok(Self::new(None, load::texts(pem, NAMES)?))
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
    /// trusted; clients whose own certificate has changed reconnect with it and resume their sessions.
    ///
    /// # Errors
    /// As [`load`](Self::load), and the certificates loaded before stay;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) if this was not loaded from files.
    pub fn reload(&self) -> Result<()> {
        let files = self.shared.files.as_ref();
        let files = files.ok_or_else(|| Error::invalid("TLS", "not loaded from files"))?;
        self.put(load::files(files)?);
        Ok(())
    }

    /// Loads these texts instead: see [`reload`](Self::reload).
    ///
    /// # Errors
    /// As [`load`](Self::load), and the certificates loaded before stay.
    pub fn reload_pem(&self, pem: TlsPem<'_>) -> Result<()> {
        self.put(load::texts(pem, NAMES)?);
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
        Reloads(self.shared.loaded.subscribe())
    }

    /// Verifies a peer again, with the certificates loaded now, if there was a reload or one of its certificates has
    /// expired since it was verified last.
    ///
    /// # Errors
    /// The reason why it is no longer trusted.
    pub(crate) fn check(&self, peer: &mut Credential, now: SystemTime) -> Result<(), String> {
        peer.check(&self.loaded(), now)
    }

    /// Returns whether this process presents another certificate now than in the handshake.
    pub(crate) fn is_renewed(&self, since: &Credential) -> bool {
        self.loaded().own != since.own
    }

    /// Returns the configuration for one connection of a client.
    pub(crate) fn client(&self, loaded: &Loaded) -> Result<Arc<ClientConfig>> {
        let mut config = loaded.client.clone()?;
        if let Some(id @ PeerName::Spiffe(_)) = &self.expect {
            let config = Arc::make_mut(&mut config);
            let verifier = SpiffeVerifier {
                id: id.clone(),
                trust: Arc::clone(&loaded.trust),
                algorithms: config.crypto_provider().signature_verification_algorithms,
            };
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

impl fmt::Debug for TlsPem<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsPem(redacted)")
    }
}

/// What errors call the texts of a [`TlsPem`].
const NAMES: [&str; 4] = ["authority", "certificate", "key", "revocation list"];

/// Waits for reloads of a [`Tls`].
#[derive(Debug)]
pub(crate) struct Reloads(watch::Receiver<Arc<Loaded>>);

impl Reloads {
    /// Waits for the next reload.
    ///
    /// # Cancel safety
    /// No reload is missed.
    pub(crate) async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            // No handle is left that could reload it.
            std::future::pending().await
        }
    }

    /// Waits for the next reload of one that there may be.
    pub(crate) async fn next_of(reloads: &mut Option<Self>) {
        match reloads {
            Some(reloads) => reloads.next().await,
            None => std::future::pending().await,
        }
    }
}
