//! Peers with SPIFFE ids.

use rcgen::SanType;

use super::*;

const OWNER: &str = "spiffe://cluster.test/ns/a/sa/owner";
const PEER: &str = "spiffe://cluster.test/ns/a/sa/peer";

fn uri(id: &str) -> SanType {
    SanType::URI(id.try_into().unwrap())
}

/// Creates a certificate with only these names.
fn with(ca: &Ca, names: Vec<SanType>) -> Node {
    ca.sign(|params| params.subject_alt_names = names)
}

#[tokio::test]
async fn a_spiffe_id_is_the_peer_s_name_and_a_client_can_expect_one() {
    let ca = Ca::new();
    let owner = ca.tls(&with(&ca, vec![uri(OWNER)])).unwrap();
    // A SPIFFE id takes precedence over a DNS name.
    let dns = SanType::DnsName("peer.test".try_into().unwrap());
    let peer = ca.tls(&with(&ca, vec![dns, uri(PEER)])).unwrap();
    assert_eq!(peer.name().to_string(), PEER);
    let expecting = peer.clone().expect_peer(OWNER).unwrap();
    let (server, client) = meet(&owner, &expecting).await;
    let (server, client) = (server.unwrap(), client.unwrap());
    assert_eq!(server.peer, PeerName::spiffe(PEER).unwrap());
    assert_eq!(client.peer, PeerName::spiffe(OWNER).unwrap());
    // Another id, and no expected id while the certificate is not for the address.
    for (wrong, expected) in [
        (peer.clone().expect_peer(PEER).unwrap(), PEER),
        (peer, "127.0.0.1"),
    ] {
        let error = meet(&owner, &wrong).await.1.unwrap_err().to_string();
        assert!(error.contains(OWNER) && error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn a_server_with_the_expected_spiffe_id_is_verified_like_any_other() {
    let (ca, theirs) = (Ca::new(), Ca::named("another"));
    let expecting = |ca: &Ca| {
        let node = with(ca, vec![uri(PEER)]);
        ca.tls(&node).unwrap().expect_peer(OWNER).unwrap()
    };
    let day = time::Duration::DAY;
    let now = time::OffsetDateTime::from(SystemTime::now());
    let foreign = theirs.tls(&with(&theirs, vec![uri(OWNER)])).unwrap();
    let error = meet(&foreign, &expecting(&ca)).await.1.unwrap_err();
    assert!(error.to_string().contains("authority"), "{error}");
    // A certificate that expires between loading and the handshake cannot be made quickly, so this calls the
    // verifier.
    let old = ca.sign(|params| {
        params.subject_alt_names = vec![uri(OWNER)];
        params.not_before = now - day * 3;
        params.not_after = now - day;
    });
    assert!(ca.tls(&old).is_err());
    let client_only = ca.sign(|params| {
        params.subject_alt_names = vec![uri(OWNER)];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    });
    assert!(ca.tls(&client_only).unwrap().loaded().server.is_err());
}

#[test]
fn certificates_with_unclear_spiffe_ids_are_refused() {
    let ca = Ca::new();
    let dns = || SanType::DnsName("peer.test".try_into().unwrap());
    for (names, why) in [
        (vec![dns(), uri(PEER), uri(OWNER)], "further URIs"),
        (vec![uri(PEER), uri("https://peer.test/")], "further URIs"),
        (vec![dns(), uri("spiffe://Cluster.test/a")], "lower-case"),
        (vec![dns(), uri("SPIFFE://cluster.test/a")], "spiffe://"),
        (vec![dns(), uri("spiffe://cluster.test")], "no path"),
    ] {
        let error = ca.tls(&with(&ca, names)).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    // Other URIs are not names.
    let node = with(&ca, vec![uri("https://peer.test/"), dns()]);
    assert_eq!(ca.tls(&node).unwrap().name().to_string(), "peer.test");
    let tls = ca.tls(&ca.sign(|_| {})).unwrap();
    assert!(tls.expect_peer("spiffe://td/a?b").is_err());
}
