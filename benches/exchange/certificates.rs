//! An authority, a server's and a client's certificate, made anew for each run.

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject};

/// In PEM, as files and other programs take them.
pub struct Certificates {
    pub ca: String,
    pub server_cert: String,
    pub server_key: String,
    pub client_cert: String,
    pub client_key: String,
}

impl Certificates {
    pub fn create() -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(DnType::CommonName, "benchmark's authority");
        let ca = params.self_signed(&key).expect("the authority").pem();
        let issuer = Issuer::new(params, key);
        let issue = |name: &str| {
            let key = KeyPair::generate().expect("a key");
            let names = [name, "localhost", "127.0.0.1"].map(String::from);
            let mut params = CertificateParams::new(names).expect("parameters");
            params.distinguished_name.push(DnType::CommonName, name);
            let cert = params.signed_by(&key, &issuer).expect("a certificate");
            (cert.pem(), key.serialize_pem())
        };
        let (server_cert, server_key) = issue("server.bench");
        let (client_cert, client_key) = issue("client.bench");
        Self {
            ca,
            server_cert,
            server_key,
            client_cert,
            client_key,
        }
    }

    pub fn authority(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(self.ca.as_bytes()).expect("the authority")
    }

    pub fn server(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        parse(&self.server_cert, &self.server_key)
    }

    pub fn client(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        parse(&self.client_cert, &self.client_key)
    }
}

fn parse(cert: &str, key: &str) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let cert = CertificateDer::from_pem_slice(cert.as_bytes()).expect("a certificate");
    let key = PrivatePkcs8KeyDer::from_pem_slice(key.as_bytes()).expect("a key");
    (vec![cert], key.into())
}
