//! Handshakes that must succeed, and those that must not, as both ends see them.

mod files;
mod spiffe;

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use rustls::CertificateError;
use rustls::client::danger::ServerCertVerifier;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use tokio::net::TcpStream;

use super::trust::{ALPN, End, SpiffeVerifier};
use super::*;
use crate::share::Peers;
use crate::transport::{Connection, Listening, Security, connect};
use crate::{Address, Distrust, Limits, ShareError};

/// An authority for tests, which signs anything.
struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Ca {
    fn new() -> Self {
        Self::named("test authority")
    }

    fn named(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
        params.key_usages = vec![
            rcgen::KeyUsagePurpose::KeyCertSign,
            rcgen::KeyUsagePurpose::CrlSign,
        ];
        params.distinguished_name.push(DnType::CommonName, name);
        let pem = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        Self { issuer, pem }
    }

    fn sign(&self, change: impl FnOnce(&mut CertificateParams)) -> Node {
        let key = KeyPair::generate().unwrap();
        let mut params =
            CertificateParams::new(vec!["node.test".into(), "127.0.0.1".into()]).unwrap();
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        change(&mut params);
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        Node {
            cert: cert.pem(),
            key: key.serialize_pem(),
        }
    }

    fn tls(&self, node: &Node) -> Result<Tls> {
        Tls::from_pem(TlsPem {
            ca: self.pem.as_bytes(),
            cert: node.cert.as_bytes(),
            key: node.key.as_bytes(),
            crl: None,
        })
    }
}

struct Node {
    cert: String,
    key: String,
}

fn limits() -> Limits {
    Limits {
        handshake: Duration::from_secs(300),
        ..Limits::default()
    }
}

async fn server(tls: &Tls) -> Listening {
    let peers = Arc::new(Mutex::new(Peers::same_user()));
    let security = Security::Tls(tls.clone());
    Listening::bind(&Address::loopback(0), &security, &peers, &limits())
        .await
        .unwrap()
}

/// Returns the server's result, and the client's after it has tried to read.
async fn meet(server_tls: &Tls, client: &Tls) -> (Result<Connection>, Result<Connection>) {
    let listening = server(server_tls).await;
    let serve = async {
        let incoming = listening.accept().await.unwrap().unwrap();
        let mut connection = incoming.1.await?;
        connection.writer.write(b"welcome", &[]).await?;
        Ok(connection)
    };
    let security = Security::Tls(client.clone());
    let dial = async {
        let peers = Peers::same_user();
        let mut connection = connect(&listening.address, &security, &peers, &limits()).await?;
        connection.writer.write(b"hello", &[]).await?;
        connection.reader.read(100).await?.expect("a frame");
        Ok(connection)
    };
    tokio::join!(serve, dial)
}

/// A client that breaks all rules.
async fn rogue(listening: &Listening, config: rustls::ClientConfig) -> (Error, String) {
    let Address::Tcp { port, .. } = listening.address else {
        panic!("it is TCP")
    };
    let dial = async {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let name = ServerName::try_from("node.test").unwrap();
        let connected = connector.connect(name, stream).await;
        match connected {
            Err(error) => error.to_string(),
            Ok(mut stream) => {
                use tokio::io::AsyncReadExt;
                match stream.read(&mut [0]).await {
                    Ok(count) => format!("{count} bytes"),
                    Err(error) => error.to_string(),
                }
            }
        }
    };
    let serve = async {
        let incoming = listening.accept().await.unwrap().unwrap();
        incoming.1.await.map(|_| ())
    };
    let (client, server) = tokio::join!(dial, serve);
    (server.unwrap_err(), client)
}

fn rogue_config(
    ca: &Ca,
    node: Option<&Node>,
    version: &'static rustls::SupportedProtocolVersion,
) -> rustls::ClientConfig {
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(ca.pem.as_bytes()).unwrap())
        .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match node {
        None => builder.with_no_client_auth(),
        Some(node) => builder
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_slice(node.cert.as_bytes()).unwrap()],
                PrivateKeyDer::from_pem_slice(node.key.as_bytes()).unwrap(),
            )
            .unwrap(),
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    config
}

#[tokio::test]
async fn both_ends_know_their_peer() {
    let ca = Ca::new();
    let a = ca.tls(&ca.sign(|_| {})).unwrap();
    let b = ca
        .tls(&ca.sign(|params| {
            params.subject_alt_names =
                vec![rcgen::SanType::DnsName("Client.Test".try_into().unwrap())];
        }))
        .unwrap();
    let (server, client) = meet(&a, &b).await;
    let (server, client) = (server.unwrap(), client.unwrap());
    assert_eq!(server.peer.to_string(), "client.test");
    assert_eq!(client.peer.to_string(), "node.test");
    assert!(server.user.is_none() && server.label.contains("client.test"));
}

#[tokio::test]
async fn a_stranger_is_refused_and_both_ends_say_why() {
    let (ours, theirs) = (Ca::new(), Ca::named("another"));
    let good = ours.sign(|_| {});
    let us = ours.tls(&good).unwrap();
    let listening = server(&us).await;
    let day = time::Duration::DAY;
    let now = time::OffsetDateTime::from(SystemTime::now());
    let expired = ours.sign(|params| {
        params.not_before = now - day * 3;
        params.not_after = now - day;
    });
    let early = ours.sign(|params| params.not_before = now + day);
    let server_only = ours.sign(|params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    });
    let nameless = ours.sign(|params| params.subject_alt_names.clear());
    let wild = ours.sign(|params| {
        params.subject_alt_names = vec![rcgen::SanType::DnsName("*.a.test".try_into().unwrap())];
    });
    let foreign = theirs.sign(|_| {});
    // An authority of the same name, with another key.
    let forged = Ca::new().sign(|_| {});
    for (node, server_says, client_says) in [
        (Some(&foreign), "authority", "UnknownCA"),
        (Some(&forged), "authority", "DecryptError"),
        (Some(&expired), "expired", "CertificateExpired"),
        (Some(&early), "not valid yet", "CertificateExpired"),
        (
            Some(&server_only),
            "does not allow",
            "UnsupportedCertificate",
        ),
        (None, "no certificate", "CertificateRequired"),
        // Refused after the handshake: the certificate is valid, but names no peer.
        (Some(&nameless), "nor a DNS name", ""),
        (Some(&wild), "not a peer name", ""),
    ] {
        let config = rogue_config(&ours, node, &rustls::version::TLS13);
        let (server, client) = rogue(&listening, config).await;
        assert!(
            matches!(server, Error::Share(ShareError::NotTrusted { .. })),
            "{server}"
        );
        assert!(server.to_string().contains(server_says), "{server}");
        assert!(client.contains(client_says), "{server}: {client}");
    }
    // The server still serves others.
    let (server, client) = meet(&us, &us).await;
    assert!(server.is_ok() && client.is_ok());
}

#[tokio::test]
async fn our_client_learns_at_its_first_read_why_it_is_refused() {
    let (ours, theirs) = (Ca::new(), Ca::named("another"));
    let us = ours.tls(&ours.sign(|_| {})).unwrap();
    // It trusts the server's authority, but its own certificate is another authority's.
    let stranger = theirs.sign(|_| {});
    let both = ours.pem.clone() + &theirs.pem;
    let client = Tls::from_pem(TlsPem {
        ca: both.as_bytes(),
        cert: stranger.cert.as_bytes(),
        key: stranger.key.as_bytes(),
        crl: None,
    })
    .unwrap();
    let (server, client) = meet(&us, &client).await;
    assert!(
        matches!(server, Err(Error::Share(ShareError::NotTrusted { .. }))),
        "{server:?}"
    );
    let Err(Error::Share(ShareError::NotTrusted { why, .. })) = client else {
        panic!("{client:?}")
    };
    assert!(why.contains("UnknownCA"), "{why}");
}

#[tokio::test]
async fn a_server_that_is_another_is_refused() {
    let (ours, theirs) = (Ca::new(), Ca::named("another"));
    let us = ours.tls(&ours.sign(|_| {})).unwrap();
    let foreign = theirs.tls(&theirs.sign(|_| {})).unwrap();
    let (server, client) = meet(&foreign, &us).await;
    for (end, why) in [(server, "does not trust"), (client, "authority")] {
        let error = end.unwrap_err();
        assert!(
            matches!(error, Error::Share(ShareError::NotTrusted { .. })),
            "{error}"
        );
        assert!(error.to_string().contains(why), "{error}");
    }
    // Signed by our authority, but for another address.
    let elsewhere = ours
        .tls(&ours.sign(|params| {
            params.subject_alt_names = vec![rcgen::SanType::DnsName(
                "elsewhere.test".try_into().unwrap(),
            )];
        }))
        .unwrap();
    let (_, client) = meet(&elsewhere, &us).await;
    let error = client.unwrap_err();
    let why = error.to_string();
    assert!(
        why.contains("elsewhere.test") && why.contains("127.0.0.1"),
        "{error}"
    );
    assert!(
        matches!(
            &error,
            Error::Share(ShareError::NotTrusted {
                cause: Distrust::Name,
                ..
            })
        ),
        "{error:?}"
    );
    // Accepted if that is the expected name.
    let expects = us.clone().expect_peer("elsewhere.test").unwrap();
    let (_, client) = meet(&elsewhere, &expects).await;
    assert_eq!(client.unwrap().peer.to_string(), "elsewhere.test");
    let expects = us.clone().expect_peer("third.test").unwrap();
    let (_, client) = meet(&elsewhere, &expects).await;
    assert!(matches!(
        client,
        Err(Error::Share(ShareError::NotTrusted { .. }))
    ));
    assert!(us.expect_peer("*.test").is_err());
}

/// Verifications without the address take another name for the last fault that rustls finds: with a version that compares
/// the name first they would accept every authority.
#[test]
fn another_name_hides_no_untrusted_authority() {
    let (ours, theirs) = (Ca::new(), Ca::named("another"));
    let us = ours.tls(&ours.sign(|_| {})).unwrap();
    let loaded = us.loaded();
    let id = PeerName::spiffe("spiffe://a.test/b").unwrap();
    let servers = Arc::clone(&loaded.verifiers.servers);
    let spiffe = SpiffeVerifier { id, servers };
    let at = UnixTime::now();
    let verify = |ca: &Ca| {
        let node = ca.sign(|params| {
            params.subject_alt_names =
                vec![rcgen::SanType::URI("spiffe://a.test/b".try_into().unwrap())];
        });
        let own = CertificateDer::from_pem_slice(node.cert.as_bytes()).unwrap();
        let name = ServerName::try_from("node.test").unwrap();
        let handshake = spiffe.verify_server_cert(&own, &[], &name, &[], at);
        let again = loaded.verifiers.verify(&[own], End::Server, at);
        (handshake.map(|_| ()), again)
    };
    assert_eq!(verify(&ours), (Ok(()), Ok(())));
    let unknown = CertificateError::UnknownIssuer;
    assert_eq!(verify(&theirs), (Err(unknown.clone().into()), Err(unknown)));
}

#[tokio::test]
async fn older_tls_and_other_protocols_are_refused() {
    let ca = Ca::new();
    let node = ca.sign(|_| {});
    let listening = server(&ca.tls(&node).unwrap()).await;
    let config = rogue_config(&ca, Some(&node), &rustls::version::TLS12);
    let (server, client) = rogue(&listening, config).await;
    assert!(
        matches!(server, Error::Share(ShareError::NotTrusted { .. })),
        "{server}"
    );
    assert!(client.contains("ProtocolVersion"), "{client}");
    for alpn in [vec![], vec![b"h2".to_vec()]] {
        let mut config = rogue_config(&ca, Some(&node), &rustls::version::TLS13);
        config.alpn_protocols = alpn;
        let (server, _) = rogue(&listening, config).await;
        assert!(server.to_string().contains("protocol"), "{server}");
    }
}

#[tokio::test]
async fn plain_text_and_silence_at_a_tls_port() {
    use tokio::io::AsyncWriteExt;
    let ca = Ca::new();
    let listening = server(&ca.tls(&ca.sign(|_| {})).unwrap()).await;
    let Address::Tcp { port, .. } = listening.address else {
        panic!("it is TCP")
    };
    let mut client = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    client.write_all(b"\0\0\0\x05hello").await.unwrap();
    let incoming = listening.accept().await.unwrap().unwrap();
    let error = incoming.1.await.unwrap_err();
    assert!(
        matches!(error, Error::TlsAtOneEnd { here: true, .. }),
        "{error}"
    );
    // The client reads the server's alert where a frame would begin.
    let peers = Peers::same_user();
    let plain = async {
        let address = &listening.address;
        let client = connect(address, &Security::Plain, &peers, &limits()).await;
        let mut client = client.unwrap();
        client.writer.write(b"hello", &[]).await.unwrap();
        client.reader.read(4 << 20).await
    };
    let serve = async {
        let incoming = listening.accept().await.unwrap().unwrap();
        incoming.1.await
    };
    let (read, served) = tokio::join!(plain, serve);
    assert!(served.is_err());
    let error = read.unwrap_err();
    assert!(
        matches!(error, Error::TlsAtOneEnd { here: false, .. }),
        "{error}"
    );
    assert!(error.remedy().contains("ca, cert and key"));
}
