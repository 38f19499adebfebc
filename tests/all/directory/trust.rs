//! etcd with certificates and users.

use std::path::{Path, PathBuf};
use std::time::Duration;

use egmem::exchange::Error;
use egmem::exchange::directory::Directory;
use tokio::time::sleep;

use crate::directory::etcd::{self, Etcd, Tls};
use crate::directory::{LEASE, becomes, exporter, options, registered};

fn pem(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_certificates_and_a_user() {
    use rcgen::{
        BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    };

    let folder = tempfile::tempdir().unwrap();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = params.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(params, key);
    let ca = pem(folder.path(), "ca.pem", &ca);
    let issue = |name: &str, addresses: &[&str], usage| {
        let key = KeyPair::generate().unwrap();
        let sans: Vec<String> = addresses.iter().map(|&text| text.into()).collect();
        let mut params = CertificateParams::new(sans).unwrap();
        params.extended_key_usages = vec![usage];
        // etcd takes a common name for a user's.
        params.distinguished_name = rcgen::DistinguishedName::new();
        let cert = params.signed_by(&key, &issuer).unwrap().pem();
        (
            pem(folder.path(), &format!("{name}.pem"), &cert),
            pem(folder.path(), &format!("{name}.key"), &key.serialize_pem()),
        )
    };
    let (cert, key) = issue(
        "server",
        &[&etcd::host().to_string(), "localhost"],
        ExtendedKeyUsagePurpose::ServerAuth,
    );
    let (my_cert, my_key) = issue("client", &["client"], ExtendedKeyUsagePurpose::ClientAuth);
    let tls = Tls {
        ca: ca.clone(),
        cert,
        key,
    };
    let Some(mut etcd) = Etcd::start(Some(tls)) else {
        return;
    };
    for line in [
        "user add root:geheim",
        "user grant-role root root",
        "role add egmem",
        "role grant-permission egmem readwrite --prefix=true /egmem/v1/",
        "user add egmem:wort",
        "user grant-role egmem egmem",
        "auth enable",
    ] {
        let words: Vec<_> = line.split(' ').collect();
        let done = |_| etcd.ctl(Some((&ca, &my_cert, &my_key)), &words).is_some();
        if !(0..20).any(done) {
            panic!("etcdctl {line}");
        }
    }

    let good = || {
        options(&etcd)
            .ca(&ca)
            .identity(&my_cert, &my_key)
            .user("egmem", "wort")
    };
    let directory = Directory::etcd(good()).unwrap();
    let first = exporter(1);
    let one = directory.register(first.clone()).unwrap();
    one.add("a").unwrap();
    registered(&one).await;
    assert_eq!(
        directory.resolve("a").await.unwrap(),
        std::slice::from_ref(&first)
    );
    for (what, wrong) in [
        ("a wrong password", good().user("egmem", "falsch")),
        ("another prefix", good().prefix("/other/")),
        (
            "no certificate",
            options(&etcd).ca(&ca).user("egmem", "wort"),
        ),
        (
            "no user",
            options(&etcd).ca(&ca).identity(&my_cert, &my_key),
        ),
    ] {
        let refused = Directory::etcd(wrong).unwrap().resolve("a").await;
        let Err(error @ Error::Directory { .. }) = refused else {
            panic!("{what}: {refused:?}");
        };
        assert!(!error.to_string().contains("wort"), "{error}");
    }
    // Tokens do not outlive etcd: a restart takes a new one.
    etcd.restart();
    registered(&one).await;
    becomes(&directory, "a", &[&first]).await;
    sleep(LEASE + Duration::from_secs(1)).await;
    becomes(&directory, "a", &[&first]).await;
}
