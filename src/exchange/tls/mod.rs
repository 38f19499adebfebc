//! Mutual TLS: who the peer is, and that nobody reads along.
//!
//! TLS 1.3 (RFC 8446) alone, certificates at both ends, no resumption and no early data, so that
//! nothing can be replayed. Cryptography is ring's.

mod fault;
mod load;
mod spiffe;
#[cfg(test)]
mod tests;
mod trust;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::{ClientConfig, CommonState, ServerConfig};
use rustls_pki_types::ServerName;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

pub(crate) use fault::explain;
#[cfg(feature = "certs")]
pub(crate) use load::peer_name;
pub(crate) use trust::{Basis, Credential, End};

use super::PeerName;
use crate::{Distrust, Error, Result};
use load::{Loaded, Texts};

/// The protocol's name for TLS's negotiation of protocols (RFC 7301).
pub(crate) const ALPN: &[u8] = b"egmem/1";

/// How often the wall clock is read while certificates may expire: timers do not run while the
/// machine is suspended, and the clock may be set.
pub(crate) const WALL_CLOCK: Duration = Duration::from_secs(1);

/// Files in PEM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// The authorities that are trusted: peers' certificates are theirs.
    pub ca: PathBuf,
    /// This process's certificate, then those between it and the authority's.
    pub cert: PathBuf,
    /// Its private key: PKCS #8, SEC 1 or PKCS #1.
    pub key: PathBuf,
    /// Revocation lists of the authorities. With them, a peer whose certificate no list is about,
    /// or whose list has expired, is not trusted.
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
/// A peer's name is the SPIFFE id of its certificate, if that has one, which then must be its only
/// URI; else the first DNS name (subject alternative name). A peer whose certificate has neither is
/// refused. Clones share what is loaded.
#[derive(Clone)]
pub struct Tls {
    shared: Arc<Shared>,
    expect: Option<PeerName>,
}

struct Shared {
    files: Option<TlsFiles>,
    loaded: watch::Sender<Arc<Loaded>>,
}

impl Tls {
    /// Loads files.
    ///
    /// Warns (`tracing`) where others than the owner can read the key.
    ///
    /// # Errors
    /// [`Error::Tls`] with the file and what is wrong with it: it cannot be read, the key is not
    /// the certificate's, the certificate has expired, is not valid yet, is not of the authority,
    /// has no name; the revocation list is past its next update, or the certificate is on it.
    pub fn load(files: TlsFiles) -> Result<Self> {
        let loaded = from_files(&files)?;
        Ok(Self::new(Some(files), loaded))
    }

    /// Takes texts.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_pem(pem: TlsPem<'_>) -> Result<Self> {
        Ok(Self::new(None, from_texts(&pem)?))
    }

    fn new(files: Option<TlsFiles>, loaded: Loaded) -> Self {
        Self {
            shared: Arc::new(Shared {
                files,
                loaded: watch::Sender::new(Arc::new(loaded)),
            }),
            expect: None,
        }
    }

    /// Loads the files again, for certificates that were replaced. New connections of all clones use
    /// what is there now. Servers and clients verify the peers of open ones again and end those that
    /// are not trusted any more; clients with another certificate than before connect anew with it
    /// and go on with their sessions.
    ///
    /// # Errors
    /// As [`load`](Self::load), and what was loaded stays; [`Error::InvalidArgument`] where there
    /// are no files.
    pub fn reload(&self) -> Result<()> {
        let files = self.shared.files.as_ref();
        let files = files.ok_or_else(|| Error::invalid("TLS", "not loaded from files"))?;
        self.put(from_files(files)?);
        Ok(())
    }

    /// Replaces what is loaded by these texts: see [`reload`](Self::reload).
    ///
    /// # Errors
    /// As [`load`](Self::load), and what was loaded stays.
    pub fn reload_pem(&self, pem: TlsPem<'_>) -> Result<()> {
        self.put(from_texts(&pem)?);
        Ok(())
    }

    /// For clients: the server's certificate must be for this DNS name or have this SPIFFE id,
    /// instead of being for the host name or IP address that is connected to.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what is neither.
    pub fn expect_peer(mut self, name: &str) -> Result<Self> {
        self.expect = Some(match name.starts_with("spiffe:") {
            true => PeerName::spiffe(name)?,
            false => PeerName::certificate(name)?,
        });
        Ok(self)
    }

    /// By what name peers know this process.
    pub fn name(&self) -> PeerName {
        self.get().name.clone()
    }

    fn get(&self) -> Arc<Loaded> {
        Arc::clone(&self.shared.loaded.borrow())
    }

    fn put(&self, mut loaded: Loaded) {
        self.shared.loaded.send_modify(|place| {
            loaded.number = place.number + 1;
            *place = Arc::new(loaded);
        });
    }

    /// What is loaded now: to be read before the configuration of a handshake, so that a reload in
    /// between is noticed.
    pub(crate) fn basis(&self) -> Basis {
        let loaded = self.shared.loaded.borrow();
        Basis {
            number: loaded.number,
            own: Arc::clone(&loaded.own),
        }
    }

    /// Whether something else was loaded since the handshake.
    pub(crate) fn has_reloaded(&self, since: &Credential) -> bool {
        self.shared.loaded.borrow().number != since.basis.number
    }

    /// Tells when something else is loaded.
    pub(crate) fn reloads(&self) -> Reloads {
        Reloads(self.shared.loaded.subscribe())
    }

    /// Verifies a peer once more, by what is loaded now.
    ///
    /// # Errors
    /// Why it is not trusted any more.
    pub(crate) fn verify(&self, credential: &Credential, now: SystemTime) -> Result<(), String> {
        credential.verify(&self.get().trust, now)
    }

    /// Whether this process shows another certificate now than in the handshake.
    pub(crate) fn is_renewed(&self, since: &Credential) -> bool {
        self.shared.loaded.borrow().own != since.basis.own
    }

    /// For one connection of a server.
    pub(crate) fn server(&self) -> Result<Arc<ServerConfig>> {
        self.get().server.clone()
    }

    /// For one connection of a client.
    pub(crate) fn client(&self) -> Result<Arc<ClientConfig>> {
        let loaded = self.get();
        let config = loaded.client.clone()?;
        Ok(match &self.expect {
            Some(id @ PeerName::Spiffe(_)) => spiffe::expecting(&config, id, &loaded.trust),
            _ => config,
        })
    }

    /// What the certificate of the server at `host` must be for, unless a SPIFFE id is expected.
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
            .field("name", &self.get().name.to_string())
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

fn from_files(files: &TlsFiles) -> Result<Loaded> {
    let shown = |path: &PathBuf| path.display().to_string();
    let ca = load::read(&files.ca, false)?;
    let cert = load::read(&files.cert, false)?;
    let key = load::read(&files.key, true)?;
    let crl = match &files.crl {
        Some(path) => Some((shown(path), load::read(path, false)?)),
        None => None,
    };
    load::build(&Texts {
        ca: (&shown(&files.ca), &ca),
        cert: (&shown(&files.cert), &cert),
        key: (&shown(&files.key), &key),
        crl: crl.as_ref().map(|(what, text)| (what.as_str(), &text[..])),
    })
}

fn from_texts(pem: &TlsPem<'_>) -> Result<Loaded> {
    load::build(&Texts {
        ca: ("authority", pem.ca),
        cert: ("certificate", pem.cert),
        key: ("key", pem.key),
        crl: pem.crl.map(|text| ("revocation list", text)),
    })
}

/// Waits for reloads of a [`Tls`].
#[derive(Debug)]
pub(crate) struct Reloads(watch::Receiver<Arc<Loaded>>);

impl Reloads {
    /// Waits for the next one.
    ///
    /// # Cancel safety
    /// Nothing is missed when it is dropped.
    pub(crate) async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            // Nobody is left who could reload it.
            std::future::pending().await
        }
    }
}

/// Whom a finished handshake has proved the peer at that end to be, and by which certificates.
///
/// # Errors
/// [`Error::NotTrusted`] for a certificate without a name or a chain that is too long,
/// [`Error::Protocol`] for a peer that has not agreed on this protocol.
pub(crate) fn proved(
    peer: &str,
    state: &CommonState,
    end: End,
    basis: Basis,
) -> Result<(PeerName, Arc<Credential>)> {
    if state.alpn_protocol() != Some(ALPN) {
        return Err(Error::Protocol {
            peer: peer.into(),
            detail: "no agreement on egmem/1 in TLS".into(),
        });
    }
    let chain = state.peer_certificates().unwrap_or_default();
    load::peer_name(chain.first())
        .and_then(|name| {
            let credential = Credential::new(chain, end, basis)?;
            Ok((name, Arc::new(credential)))
        })
        .map_err(|why| Error::NotTrusted {
            peer: peer.into(),
            cause: Distrust::Certificate,
            why,
        })
}
