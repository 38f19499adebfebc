//! Tests of names, lists and owners.

use super::*;

fn cert(name: &str) -> PeerName {
    PeerName::certificate(name).unwrap()
}

#[test]
fn peers_are_read_and_shown() {
    for (text, peer) in [
        ("a.b", cert("A.b")),
        ("uid:0", PeerName::User(0)),
        ("local", PeerName::Local),
    ] {
        assert_eq!(text.parse::<PeerName>().unwrap(), peer);
        assert_eq!(peer.to_string(), text);
    }
    for wrong in [
        "",
        "uid:",
        "uid:-1",
        "uid:+1",
        "uid:4294967296",
        "LOCAL",
        "a..b",
        ".a",
        "a.",
        "*",
        "*.a",
        "a b",
        "a\n",
        "a:b",
    ] {
        assert!(wrong.parse::<PeerName>().is_err(), "{wrong:?}");
    }
    assert!(PeerName::certificate("local").is_err());
    assert!(PeerName::certificate("uid:1").is_err());
}

#[test]
fn ids_of_workloads_are_told_from_others() {
    let long = format!("spiffe://td/{}", "x".repeat(MAX_SPIFFE - 12));
    for good in ["spiffe://td/a", "spiffe://a.b-c_1/ns/X_y/sa/z.1-", &long] {
        PeerName::spiffe(good).unwrap();
    }
    let too_long = format!("{long}x");
    let domain = format!("spiffe://{}/a", "d".repeat(256));
    for bad in [
        "",
        "spiffe:/td/a",
        "SPIFFE://td/a",
        "https://td/a",
        "spiffe:///a",
        "spiffe://TD/a",
        "spiffe://td:80/a",
        "spiffe://user@td/a",
        "spiffe://td",
        "spiffe://td/",
        "spiffe://td//a",
        "spiffe://td/a/",
        "spiffe://td/./a",
        "spiffe://td/../a",
        "spiffe://td/a?b",
        "spiffe://td/a#b",
        "spiffe://td/a%20",
        "spiffe://td/ä",
        &too_long,
        &domain,
    ] {
        assert!(PeerName::spiffe(bad).is_err(), "{bad:?}");
    }
    assert!(!check_spiffe("spiffe://td").unwrap());
}

#[test]
fn an_owner_reads_back_and_other_texts_are_refused() {
    for text in ["@server", "uid:7", "local", "node-a.example.org", "server"] {
        let owner: Owner = text.parse().unwrap();
        assert_eq!(owner.to_string(), text);
        assert_eq!(owner.is_server(), text == SERVER);
        let json = serde_json::to_string(&owner).unwrap();
        assert_eq!(serde_json::from_str::<Owner>(&json).unwrap(), owner);
    }
    for text in ["", "@", "@SERVER", "uid:", "a b", "a\u{1b}[2J"] {
        assert!(text.parse::<Owner>().is_err(), "{text:?}");
        let json = serde_json::to_string(text).unwrap();
        assert!(serde_json::from_str::<Owner>(&json).is_err(), "{text:?}");
    }
}

#[test]
fn a_made_up_name_becomes_no_pattern_and_no_other_peer() {
    for name in [
        "*",
        "a*.test",
        "local",
        "uid:0",
        "spiffe://a.test/b",
        "a, *",
        "A.b",
        "",
    ] {
        let who = PeerList::only(PeerName::Certificate(name.into()));
        assert_eq!(who, PeerList::nobody(), "{name}");
    }
    assert!(PeerList::only(cert("a.test")).admits(&cert("a.test")));
    assert!(PeerList::only(PeerName::User(0)).admits(&PeerName::User(0)));
}

#[test]
fn patterns_admit_the_peers_that_they_name() {
    let who = PeerList::list(["a.b", "*.c.d", "uid:7"]).unwrap();
    for yes in [
        cert("a.b"),
        cert("A.B"),
        cert("x.c.d"),
        cert("x.y.c.d"),
        PeerName::User(7),
    ] {
        assert!(who.admits(&yes), "{yes}");
    }
    for no in [
        cert("c.d"),
        cert("xc.d"),
        cert("b"),
        PeerName::User(8),
        PeerName::Local,
    ] {
        assert!(!who.admits(&no), "{no}");
    }
    assert!(PeerList::anyone().admits(&PeerName::Local));
    assert!(PeerList::list(["*"]).unwrap().admits(&cert("x")));
    assert!(!PeerList::nobody().admits(&PeerName::User(0)));
    let made_up = PeerName::Certificate("*".into());
    assert!(!PeerList::only(made_up).admits(&PeerName::Local));
    assert!(PeerList::list(["local"]).unwrap().admits(&PeerName::Local));
    assert!(
        PeerList::only(cert("a"))
            .and(PeerName::Local)
            .admits(&PeerName::Local)
    );
}

#[test]
fn patterns_that_match_nothing_are_refused() {
    for wrong in ["", "**", "*a", "*.", "a.*", "uid:x", "*.*"] {
        assert!(PeerList::list([wrong]).is_err(), "{wrong:?}");
    }
    assert!(PeerList::list(vec!["a"; MAX_PATTERNS + 1]).is_err());
}

#[test]
fn spiffe_ids_are_admitted_one_by_one_and_below_a_path() {
    let peer = |id: &str| id.parse::<PeerName>().unwrap();
    let who = PeerList::list(["spiffe://td/a", "spiffe://td/ns/x/*", "spiffe://other/*"]).unwrap();
    for yes in [
        "spiffe://td/a",
        "spiffe://td/ns/x/sa/y",
        "spiffe://other/any",
    ] {
        assert_eq!(peer(yes).to_string(), yes);
        assert!(who.admits(&peer(yes)), "{yes}");
    }
    // Paths are case-sensitive, and a path is not below itself.
    for no in [
        "spiffe://td/A",
        "spiffe://td/a/b",
        "spiffe://td/ns/x",
        "spiffe://td/ns/xy/z",
        "spiffe://others/any",
    ] {
        assert!(!who.admits(&peer(no)), "{no}");
    }
    assert!(!who.admits(&cert("td")));
    assert!(
        !PeerList::list(["*.td"])
            .unwrap()
            .admits(&peer("spiffe://x.td/a"))
    );
    assert!(PeerList::anyone().admits(&peer("spiffe://td/a")));
    for wrong in [
        "spiffe://td",
        "spiffe://*",
        "spiffe://td/a*",
        "spiffe://td/*/b",
        "spiffe:///*",
    ] {
        assert!(PeerList::list([wrong]).is_err(), "{wrong}");
    }
}

#[test]
fn a_list_reads_back() {
    let list = ["*", "*.c.d", "uid:7", "local", "a.b", "spiffe://t/a/*"];
    let who = PeerList::list(list).unwrap();
    let json = serde_json::to_string(&who).unwrap();
    assert_eq!(
        json,
        r#"["*","*.c.d","uid:7","local","a.b","spiffe://t/a/*"]"#
    );
    assert_eq!(serde_json::from_str::<PeerList>(&json).unwrap(), who);
    assert_eq!(who.to_string(), list.join(", "));
    assert_eq!(who.to_string().parse::<PeerList>().unwrap(), who);
    assert_eq!("".parse::<PeerList>().unwrap(), PeerList::nobody());
    assert!("a.b,uid:7".parse::<PeerList>().is_err());
}

fn peer(name: &str) -> PeerName {
    name.parse().unwrap()
}

#[test]
fn a_peer_creates_names_under_its_own_name_alone() {
    let names = Namespaces::own();
    for (who, name, may) in [
        ("uid:1000", "uid:1000/a", true),
        ("uid:1000", "uid:1000/", false),
        ("uid:1000", "uid:1000", false),
        ("uid:100", "uid:1000/a", false),
        ("uid:1000", "uid:100/a", false),
        ("local", "local/a", true),
        ("a.b", "a.b/c/d", true),
        ("a.b", "a.bc/d", false),
        ("a.b", "c", false),
    ] {
        assert_eq!(names.admits(&peer(who), name), may, "{who} {name}");
    }
    let (reason, why) = names.check(&peer("a.b"), "c").unwrap_err();
    assert_eq!(reason, Refusal::WrongPrefix);
    assert!(why.ends_with("under a.b/"), "{why}");
    names.check(&peer("a.b"), "a.b/c").unwrap();
}

#[test]
fn rules_replace_the_own_prefix_and_add_up() {
    let who = |list: &str| PeerList::list([list]).unwrap();
    let names = Namespaces::own()
        .rule(who("*.gpu"), ["kv/", "jobs/{peer}/"])
        .and_then(|names| names.rule(who("a.gpu"), ["kv/", "x/"]))
        .and_then(|names| names.rule(who("uid:0"), [""]))
        .unwrap();
    assert_eq!(names.prefixes(&peer("a.gpu")), ["kv/", "jobs/a.gpu/", "x/"]);
    assert!(!names.admits(&peer("a.gpu"), "a.gpu/1"));
    assert!(!names.admits(&peer("b.gpu"), "jobs/a.gpu/1"));
    assert!(names.admits(&peer("uid:0"), "anything"));
    assert_eq!(names.prefixes(&peer("uid:1")), ["uid:1/"]);
    let many = Namespaces::own()
        .rule(PeerList::anyone(), (0..10).map(|n| format!("{n}/")))
        .unwrap();
    let (_, why) = many.check(&peer("local"), "a").unwrap_err();
    assert!(why.ends_with("7/ and 2 more prefixes"), "{why}");
}

#[test]
fn a_spiffe_id_cannot_create_names_of_one_below_it() {
    let names = Namespaces::own();
    let (above, below) = (peer("spiffe://td/a"), peer("spiffe://td/a/b"));
    assert_eq!(names.prefixes(&above), ["spiffe://td/a:/"]);
    assert!(names.admits(&below, "spiffe://td/a/b:/x"));
    assert!(!names.admits(&above, "spiffe://td/a/b:/x"));
    assert!(!names.admits(&above, "spiffe://td/a/b/x"));
    let long = peer(&format!("spiffe://td/{}", "x".repeat(300)));
    let (reason, why) = names.check(&long, "x").unwrap_err();
    assert_eq!(reason, Refusal::WrongPrefix);
    assert!(why.contains("too long"), "{why}");
    let short = Namespaces::own().rule(PeerList::anyone(), ["x/"]).unwrap();
    short.check(&long, "x/1").unwrap();
}

#[test]
fn prefixes_that_could_reach_into_others_are_refused() {
    for wrong in ["kv", "{peer}", "{peer}-", "a b/", "{user}/", "ä/", "*/"] {
        let rule = Namespaces::own().rule(PeerList::anyone(), [wrong]);
        assert!(rule.is_err(), "{wrong}");
    }
    assert!(Namespaces::own().rule(PeerList::anyone(), [""; 0]).is_err());
}
