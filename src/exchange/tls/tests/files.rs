//! Loading from files, and reloading.

use super::*;

#[tokio::test]
async fn a_revoked_certificate_is_refused_after_a_reload() {
    let ca = Ca::new();
    let (a, b) = (ca.sign(|_| {}), ca.sign(|_| {}));
    let now = time::OffsetDateTime::from(SystemTime::now());
    let der = CertificateDer::from_pem_slice(b.cert.as_bytes()).unwrap();
    let serial = webpki::EndEntityCert::try_from(&der)
        .unwrap()
        .serial()
        .to_vec();
    let list = |next: time::OffsetDateTime| {
        let params = rcgen::CertificateRevocationListParams {
            this_update: now - time::Duration::DAY * 2,
            next_update: next,
            crl_number: rcgen::SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: vec![rcgen::RevokedCertParams {
                serial_number: rcgen::SerialNumber::from_slice(&serial),
                revocation_time: now,
                reason_code: None,
                invalidity_date: None,
            }],
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        params.signed_by(&ca.issuer).unwrap().pem().unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let files = TlsFiles {
        ca: put("ca", &ca.pem),
        cert: put("cert", &a.cert),
        key: put("key", &a.key),
        crl: None,
    };
    // Without a list the other one is trusted.
    let (us, them) = (Tls::load(files.clone()).unwrap(), ca.tls(&b).unwrap());
    assert!(meet(&us, &them).await.1.is_ok());
    // With a list it is not, as a client and as a server.
    let day = time::Duration::DAY;
    let files = TlsFiles {
        crl: Some(put("crl", &list(now + day))),
        ..files
    };
    let us = Tls::load(files).unwrap();
    let (server, client) = meet(&us, &them).await;
    assert!(server.unwrap_err().to_string().contains("revoked"));
    assert!(client.unwrap_err().to_string().contains("evoked"));
    let (_, client) = meet(&them, &us).await;
    assert!(client.unwrap_err().to_string().contains("evoked"));
    // A list past its next update covers nothing: it is refused, and the previous one stays.
    put("crl", &list(now - day));
    let error = us.reload().unwrap_err().to_string();
    assert!(error.contains("revocation list expired"), "{error}");
    let (_, client) = meet(&them, &us).await;
    assert!(client.unwrap_err().to_string().contains("evoked"));
    // A failed reload changes nothing.
    put("crl", "nothing");
    assert!(us.reload().is_err());
    put("crl", &list(now + day));
    put("key", &b.key);
    let error = us.reload().unwrap_err().to_string();
    assert!(error.contains("key"), "{error}");
    assert!(us.loaded().server.is_ok());
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let ca = Ca::new();
    let node = ca.sign(|_| {});
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("ca"), &ca.pem).unwrap();
    std::fs::write(path("cert"), &node.cert).unwrap();
    std::fs::write(path("key"), &node.key).unwrap();
    std::fs::write(path("empty"), "").unwrap();
    let files = |ca: &str, cert: &str, key: &str| TlsFiles {
        ca: path(ca),
        cert: path(cert),
        key: path(key),
        crl: None,
    };
    Tls::load(files("ca", "cert", "key")).unwrap();
    for (files, named) in [
        (files("none", "cert", "key"), "none"),
        (files("empty", "cert", "key"), "empty"),
        (files("ca", "empty", "key"), "empty"),
        (files("ca", "cert", "empty"), "empty"),
        (files("ca", "cert", "cert"), "cert"),
        (files("ca", "cert", "."), "."),
    ] {
        let error = Tls::load(files).unwrap_err();
        let Error::Tls { what, .. } = &error else {
            panic!("{error}")
        };
        assert!(what.ends_with(named), "{error}");
    }
    assert!(ca.tls(&node).unwrap().reload().is_err());
}
