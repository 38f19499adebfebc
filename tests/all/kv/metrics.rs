//! A tier's numbers for Prometheus.

use std::collections::BTreeMap;

use egmem::kv::Stats;

use crate::kv::drivers::grace;
use crate::kv::setup::{keys, store_nothing, tier};

/// A metric: its type, its labels and its value.
type Metric = (String, Vec<(String, String)>, u64);

/// Reads a text of the format 0.0.4 in which each metric has a help, a type and one sample.
fn parse(text: &str) -> BTreeMap<String, Metric> {
    let mut all = BTreeMap::new();
    let body = text.strip_suffix('\n').expect("the last line ends, too");
    let lines: Vec<&str> = body.split('\n').collect();
    for three in lines.chunks(3) {
        let [help, kind, sample] = three else {
            panic!("a metric has three lines: {three:?}");
        };
        let (name, help) = help
            .strip_prefix("# HELP ")
            .unwrap()
            .split_once(' ')
            .unwrap();
        assert!(!help.is_empty() && !help.contains('\\'), "{help}");
        let (typed, kind) = kind
            .strip_prefix("# TYPE ")
            .unwrap()
            .split_once(' ')
            .unwrap();
        assert_eq!(typed, name);
        assert!(is_name(name), "{name}");
        assert!(matches!(kind, "counter" | "gauge"), "{kind}");
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
        let rest = sample.strip_prefix(name).unwrap();
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(rest) => labels(rest),
            None => (Vec::new(), rest),
        };
        let value = rest.strip_prefix(' ').unwrap().parse().unwrap();
        let metric = (kind.to_owned(), labels, value);
        let earlier = all.insert(name.to_owned(), metric);
        assert!(earlier.is_none(), "{name} is there twice");
    }
    all
}

fn is_name(name: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.chars().all(is_word) && name.starts_with(|c: char| !c.is_ascii_digit())
}

/// Reads labels to the closing brace. Returns what follows it.
fn labels(mut text: &str) -> (Vec<(String, String)>, &str) {
    let mut all = Vec::new();
    loop {
        let (name, rest) = text.split_once("=\"").unwrap();
        assert!(is_name(name), "{name:?}");
        let mut value = String::new();
        let mut characters = rest.chars();
        loop {
            match characters.next().expect("an open value") {
                '"' => break,
                '\\' => value.push(match characters.next() {
                    Some('n') => '\n',
                    Some(other @ ('\\' | '"')) => other,
                    other => panic!("no escape: {other:?}"),
                }),
                other => value.push(other),
            }
        }
        all.push((name.to_owned(), value));
        text = characters.as_str();
        if let Some(rest) = text.strip_prefix('}') {
            return (all, rest);
        }
        text = text.strip_prefix(',').unwrap();
    }
}

#[test]
fn metrics_are_the_stats_as_text() {
    let driver = grace();
    let tier = tier(&driver, 3, 64);
    store_nothing(&tier, &keys(0..3));
    store_nothing(&tier, &keys(3..4));
    tier.lookup(&keys(1..5));
    let _load = tier.prepare_load(&keys(3..4)).unwrap();
    tier.remove(&keys(0..1)).unwrap();
    let _store = tier.prepare_store(&keys(5..6)).unwrap();
    let found = parse(&tier.metrics(&[]));
    let Stats { hits, misses, .. } = tier.stats();
    assert!(hits > 0 && misses > 0);
    for (name, value) in [
        ("pages", 3),
        ("page_bytes", 64),
        ("usable_pages", 3),
        ("free_pages", 0),
        ("writing_pages", 1),
        ("ready_pages", 2),
        ("pinned_pages", 1),
        ("hits_total", hits),
        ("misses_total", misses),
        ("stores_total", 4),
        ("evictions_total", 1),
        ("damaged_total", 0),
        ("loaded_bytes_total", 0),
        ("stored_bytes_total", 0),
    ] {
        let (_, labels, found) = &found[&format!("egmem_kv_{name}")];
        assert_eq!((labels.len(), *found), (0, value), "{name}");
    }
    assert_eq!(found.len(), 14);
}

#[test]
fn labels_are_escaped() {
    let driver = grace();
    let tier = tier(&driver, 3, 64);
    let value = "a \\ \"b\"\nc\\n {}=,é";
    let given = [
        ("engine", value),
        ("", "empty"),
        ("9 x-é", ""),
        ("engine", "a second one"),
    ];
    let expected = [("engine", value), ("_", "empty"), ("_9_x__", "")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
    for (_, labels, _) in parse(&tier.metrics(&given)).values() {
        assert_eq!(labels[..], expected);
    }
}
