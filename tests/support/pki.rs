//! Certificates, good and bad, made on the spot.

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    RevokedCertParams, SerialNumber, date_time_ymd,
};
use serde::{Deserialize, Serialize};
use x509_parser::pem::parse_x509_pem;

/// The files of a process's certificate.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Files {
    /// The authority's certificate.
    pub ca: PathBuf,
    /// Its own certificate.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// An authority, and the folder for the certificates that it issues.
pub struct Pki {
    issuer: Issuer<'static, KeyPair>,
    ca: PathBuf,
    folder: PathBuf,
}

impl Pki {
    /// Creates an authority; `name` makes its files' names different from another's in the same folder.
    pub fn new(folder: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        let ca = folder.join(format!("{name}.ca.pem"));
        let certificate = params.self_signed(&key).expect("signed");
        std::fs::write(&ca, certificate.pem()).expect("written");
        Self {
            issuer: Issuer::new(params, key),
            ca,
            folder: folder.to_owned(),
        }
    }

    /// Returns the authority's own certificate.
    pub fn ca(&self) -> &Path {
        &self.ca
    }

    /// Issues a good certificate: `name` is the peer's, and it is for loopback too.
    pub fn issue(&self, name: &str) -> Files {
        self.issue_for(name, &[name, "localhost", "127.0.0.1"], |_| ())
    }

    /// Issues one that ended long ago.
    pub fn expired(&self, name: &str) -> Files {
        self.issue_for(name, &[name, "localhost", "127.0.0.1"], |params| {
            params.not_before = date_time_ymd(2001, 1, 1);
            params.not_after = date_time_ymd(2002, 1, 1);
        })
    }

    /// Issues one for these names and addresses only.
    pub fn issue_for(
        &self,
        file: &str,
        names: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> Files {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("names");
        params.distinguished_name.push(DnType::CommonName, file);
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        change(&mut params);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("signed");
        let files = Files {
            ca: self.ca.clone(),
            cert: self.folder.join(format!("{file}.pem")),
            key: self.folder.join(format!("{file}.key")),
        };
        std::fs::write(&files.cert, certificate.pem()).expect("written");
        write_private(&files.key, &key.serialize_pem());
        files
    }
}

/// Returns a revocation list (PEM) of an authority, valid for decades, that names these certificates (PEM).
pub fn crl(authority: (&str, &str), revoked: &[&str]) -> String {
    let (cert, key) = authority;
    let key = KeyPair::from_pem(key).expect("a key");
    let issuer = Issuer::from_ca_cert_pem(cert, key).expect("an authority");
    let revoked = revoked.iter().map(|pem| {
        let (_, pem) = parse_x509_pem(pem.as_bytes()).expect("PEM");
        let cert = pem.parse_x509().expect("a certificate");
        RevokedCertParams {
            serial_number: SerialNumber::from_slice(cert.raw_serial()),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        }
    });
    let params = CertificateRevocationListParams {
        this_update: date_time_ymd(2020, 1, 1),
        next_update: date_time_ymd(2099, 1, 1),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: revoked.collect(),
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let list = params.signed_by(&issuer).expect("signed");
    list.pem().expect("PEM")
}

/// Keys that others may read are refused.
fn write_private(path: &Path, text: &str) {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = std::fs::File::options();
    let file = options.write(true).create(true).truncate(true).mode(0o600);
    file.open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .expect("written");
}
