//! Verified peers: stores the certificates of a handshake, so that they can be verified again.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::RootCertStore;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use webpki::{
    CertRevocationList, EndEntityCert, ExpirationPolicy, KeyUsage, OwnedCertRevocationList,
    RevocationCheckDepth, RevocationOptions, RevocationOptionsBuilder, UnknownStatusPolicy,
};

use super::fault::{certificate, of_webpki};

/// The longest certificate chain of a peer in bytes: a server keeps it for each session.
pub(super) const MAX_CHAIN: usize = 16 << 10;

/// The end of a connection that presents a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Server,
    Client,
}

impl End {
    fn usage(self) -> KeyUsage {
        match self {
            Self::Server => KeyUsage::server_auth(),
            Self::Client => KeyUsage::client_auth(),
        }
    }
}

/// The authorities and revocation lists that peers are verified against.
pub(super) struct Trust {
    pub roots: Arc<RootCertStore>,
    crls: Vec<CertRevocationList<'static>>,
}

impl Trust {
    /// # Errors
    /// The parser's error, for a revocation list.
    pub fn new(
        roots: Arc<RootCertStore>,
        crls: &[CertificateRevocationListDer<'_>],
    ) -> Result<Self, webpki::Error> {
        let parse = |der: &CertificateRevocationListDer<'_>| {
            OwnedCertRevocationList::from_der(der).map(CertRevocationList::Owned)
        };
        Ok(Self {
            roots,
            crls: crls.iter().map(parse).collect::<Result<_, _>>()?,
        })
    }

    /// Verifies a chain at a time. With revocation lists, `unknown` decides about certificates that no list
    /// covers.
    pub fn verify(
        &self,
        chain: &[CertificateDer<'_>],
        end: End,
        at: UnixTime,
        unknown: UnknownStatusPolicy,
    ) -> Result<(), webpki::Error> {
        let (own, between) = chain.split_first().ok_or(webpki::Error::BadDer)?;
        let crls: Vec<_> = self.crls.iter().collect();
        EndEntityCert::try_from(own)?
            .verify_for_usage(
                webpki::ALL_VERIFICATION_ALGS,
                &self.roots.roots,
                between,
                at,
                end.usage(),
                revocation(&crls, unknown),
                None,
            )
            .map(|_| ())
    }
}

/// As rustls does in a handshake: the whole chain, and no list past its next update.
fn revocation<'a>(
    crls: &'a [&'a CertRevocationList<'a>],
    unknown: UnknownStatusPolicy,
) -> Option<RevocationOptions<'a>> {
    // Without lists the builder fails, and none is consulted.
    let builder = RevocationOptionsBuilder::new(crls).ok()?;
    let options = builder
        .with_depth(RevocationCheckDepth::Chain)
        .with_status_policy(unknown)
        .with_expiration_policy(ExpirationPolicy::Enforce)
        .build();
    Some(options)
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trust")
            .field("roots", &self.roots.len())
            .field("revocation lists", &self.crls.len())
            .finish()
    }
}

/// The certificates that a handshake has verified.
pub(crate) struct Credential {
    chain: Vec<CertificateDer<'static>>,
    end: End,
    /// For each certificate, the first moment at which it is no longer valid, sorted.
    expiries: Vec<SystemTime>,
    /// When the next certificate expires. Set to the first one, so that one that has expired already is found.
    due: Option<SystemTime>,
    /// Its number is that of the last verification.
    pub(super) basis: Basis,
}

/// The certificates and revocation lists that were loaded when a handshake began.
#[derive(Clone)]
pub(crate) struct Basis {
    /// Differs after each reload.
    pub(super) number: u64,
    /// The certificate that this process presents.
    pub(super) own: Arc<[u8]>,
}

impl Credential {
    pub(super) fn new(
        chain: &[CertificateDer<'_>],
        end: End,
        basis: Basis,
    ) -> Result<Self, String> {
        if chain.iter().map(|one| one.len()).sum::<usize>() > MAX_CHAIN {
            return Err(format!(
                "its certificate chain is longer than {MAX_CHAIN} bytes"
            ));
        }
        let mut expiries: Vec<_> = chain.iter().filter_map(expiry).collect();
        expiries.sort_unstable();
        Ok(Self {
            chain: chain.iter().map(|one| one.clone().into_owned()).collect(),
            end,
            due: expiries.first().copied(),
            expiries,
            basis,
        })
    }

    /// Returns how long it is until the next certificate of the chain expires.
    pub(crate) fn left(&self, now: SystemTime) -> Option<Duration> {
        let due = self.due?;
        Some(due.duration_since(now).unwrap_or_default())
    }

    /// Verifies the chain again, if these are other certificates than before or one of the chain has expired since.
    /// A peer may send certificates that its trust does not depend on, so each expiry counts once.
    pub(super) fn check(
        &mut self,
        trust: &Trust,
        number: u64,
        now: SystemTime,
    ) -> Result<(), String> {
        if self.basis.number == number && self.due.is_none_or(|due| due > now) {
            return Ok(());
        }
        let since = now.duration_since(SystemTime::UNIX_EPOCH);
        let at = UnixTime::since_unix_epoch(since.unwrap_or_default());
        trust
            .verify(&self.chain, self.end, at, UnknownStatusPolicy::Deny)
            .map_err(|error| certificate(&of_webpki(error)).1)?;
        self.basis.number = number;
        self.due = self.expiries.iter().copied().find(|&expiry| expiry > now);
        Ok(())
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("end", &self.end)
            .field("expiries", &self.expiries)
            .finish_non_exhaustive()
    }
}

/// Returns the first moment at which a certificate is no longer valid.
///
/// webpki has no accessor for it, but reports it in the error of a verification at a later time, which it
/// checks before issuer and purpose.
fn expiry(certificate: &CertificateDer<'_>) -> Option<SystemTime> {
    let end_of_time = UnixTime::since_unix_epoch(Duration::from_secs(u64::MAX));
    let parsed = EndEntityCert::try_from(certificate).ok()?;
    let verified = parsed.verify_for_usage(
        webpki::ALL_VERIFICATION_ALGS,
        &[],
        &[],
        end_of_time,
        KeyUsage::client_auth(),
        None,
        None,
    );
    match verified.err()? {
        webpki::Error::CertExpired { not_after, .. } => {
            let first = Duration::from_secs(not_after.as_secs().checked_add(1)?);
            SystemTime::UNIX_EPOCH.checked_add(first)
        }
        _ => None,
    }
}
