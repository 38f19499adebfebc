//! Certificates as the exchange's TLS sees them: src/exchange/tls/tests/ has connections.

use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::{MemoryError, ShareError, Tls, TlsPem};

fn tls(authority: &Authority, node: &Issued) -> Result<Tls> {
    Tls::from_pem(TlsPem {
        ca: authority.cert_pem().as_bytes(),
        cert: node.cert_pem.as_bytes(),
        key: node.key_pem.as_bytes(),
        crl: None,
    })
}

#[test]
fn a_certificate_is_for_its_name_at_both_ends() {
    let authority = Authority::create("ours", 10).unwrap();
    let node = authority.issue(&CertRequest::new("Node7.Cluster")).unwrap();
    let tls = tls(&authority, &node).unwrap();
    assert_eq!(tls.name().to_string(), "node7.cluster");
    let tls = tls.loaded();
    assert!(tls.server.is_ok() && tls.client.is_ok());
}

#[test]
fn an_authority_reads_back() {
    let first = Authority::create("ours", 10).unwrap();
    let again = Authority::load(first.cert_pem(), &first.key_pem()).unwrap();
    let node = again.issue(&CertRequest::new("a.b").and("::1")).unwrap();
    tls(&first, &node).unwrap();
}

#[test]
fn what_is_no_authority_is_not_loaded() {
    let first = Authority::create("first", 10).unwrap();
    let other = Authority::create("other", 10).unwrap();
    let node = first.issue(&CertRequest::new("a.b")).unwrap();
    for (cert, key, why) in [
        (
            first.cert_pem(),
            &other.key_pem(),
            "not that of the certificate",
        ),
        (&node.cert_pem, &node.key_pem, "authority"),
        ("", &first.key_pem(), "certificate"),
        (first.cert_pem(), &Zeroizing::new(String::new()), "key"),
    ] {
        let error = Authority::load(cert, key).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn an_authority_that_peers_would_not_trust_is_not_loaded() {
    let now = OffsetDateTime::now_utc();
    let key = new_key().unwrap();
    let load = |from: time::Duration, until: time::Duration, extension, longer| {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        (params.not_before, params.not_after) = (now + from, now + until);
        params.custom_extensions = Vec::from_iter(extension);
        let mut cert = params.self_signed(&key).unwrap().pem();
        if longer {
            // Padding becomes bytes, and three more follow.
            cert = cert.replace('=', "A").replace("-----END", "AAAA\n-----END");
        }
        Authority::load(&cert, &key.serialize_pem())
    };
    let mut critical = rcgen::CustomExtension::from_oid_content(&[1, 3, 6, 1, 4, 1, 7], vec![5, 0]);
    critical.set_criticality(true);
    let day = time::Duration::DAY;
    load(-day, day, None, false).unwrap();
    for (from, until, extension, longer, why) in [
        (-day * 2, -day, None, false, "it has expired"),
        (day, day * 2, None, false, "it is not valid yet"),
        (-day, day, Some(critical), false, "CriticalExtension"),
        (-day, day, None, true, "TrailingData"),
    ] {
        let error = load(from, until, extension, longer)
            .unwrap_err()
            .to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn requests_are_checked() {
    let authority = Authority::create("ours", 10).unwrap();
    for bad in [
        CertRequest::new(""),
        CertRequest::new("local"),
        CertRequest::new("*.a"),
        CertRequest::new("a b"),
        CertRequest::new("a").and("*.b"),
        CertRequest::new("a").and(""),
        CertRequest::new("a").days(0),
        CertRequest::new("a").days(MAX_DAYS + 1),
    ] {
        let error = authority.issue(&bad).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Share(ShareError::Memory(MemoryError::InvalidArgument { .. }))
            ),
            "{error}"
        );
    }
    assert!(Authority::create("", 1).is_err());
    assert!(Authority::create("x", 0).is_err());
    authority
        .issue(&CertRequest::new("x".repeat(63) + "." + &"y".repeat(63)))
        .unwrap();
}

#[test]
fn what_is_wrong_with_a_certificate_is_said() {
    let authority = Authority::create("ours", 10).unwrap();
    let other = Authority::create("other", 10).unwrap();
    let valid = |from, until| {
        let now = OffsetDateTime::now_utc();
        let mut params = CertRequest::new("a.b").params().unwrap();
        params.not_before = now + time::Duration::days(from);
        params.not_after = now + time::Duration::days(until);
        authority.sign(params).unwrap()
    };
    let node = authority.issue(&CertRequest::new("a.b")).unwrap();
    for (authority, node, why) in [
        (&authority, &valid(-10, -7), "certificate expired"),
        (&authority, &valid(1, 9), "not valid yet"),
        (&other, &node, "not trusted here"),
    ] {
        let error = tls(authority, node).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let mixed = Issued {
        cert_pem: node.cert_pem.clone(),
        key_pem: authority.issue(&CertRequest::new("a.b")).unwrap().key_pem,
    };
    let error = tls(&authority, &mixed).unwrap_err().to_string();
    assert!(error.contains("not that of the certificate"), "{error}");
}

#[test]
fn a_certificate_for_one_end_is_none_for_the_other() {
    let authority = Authority::create("ours", 10).unwrap();
    let loaded = |usage| {
        let mut params = CertRequest::new("a.b").params().unwrap();
        params.extended_key_usages = vec![usage];
        tls(&authority, &authority.sign(params).unwrap())
            .unwrap()
            .loaded()
    };
    let server = loaded(ExtendedKeyUsagePurpose::ServerAuth);
    assert!(server.server.is_ok() && server.client.is_err());
    let client = loaded(ExtendedKeyUsagePurpose::ClientAuth);
    assert!(client.server.is_err() && client.client.is_ok());
}

#[test]
fn files_are_new_and_keys_are_their_owners() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    write_new(&path, b"one", true).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(write_new(&path, b"two", true).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"one");
}

#[test]
fn nothing_secret_is_shown() {
    let authority = Authority::create("ours", 10).unwrap();
    let node = authority.issue(&CertRequest::new("a.b")).unwrap();
    let shown = format!(
        "{authority:?} {node:?} {:?}",
        tls(&authority, &node).unwrap()
    );
    assert!(
        !shown.contains("PRIVATE") && !shown.contains("secret"),
        "{shown}"
    );
}
