//! TLS as a program of another make speaks it.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use crate::pki::Files;

/// Returns a client's configuration of rustls, with a certificate or without one.
///
/// # Panics
/// If a file has no certificate or no key, or they do not match.
pub fn tls_config(ca: &Path, own: Option<&Files>) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(ca).expect("a certificate"))
        .expect("an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some(files) => {
            let (chain, key) = identity(files);
            builder.with_client_auth_cert(chain, key).expect("a pair")
        }
    };
    config.alpn_protocols = vec![b"egmem/1".to_vec()];
    Arc::new(config)
}

/// Reads a certificate's chain and its key.
///
/// # Panics
/// If a file has none.
pub fn identity(files: &Files) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let chain = CertificateDer::pem_file_iter(&files.cert).expect("a file");
    let chain = chain.collect::<Result<_, _>>().expect("certificates");
    let key = PrivateKeyDer::from_pem_file(&files.key).expect("a key");
    (chain, key)
}
