//! The crates' files name each other in one direction: no circle has more than two files.

mod modules;
mod names;

use std::collections::hash_map::RandomState;

use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;

use modules::Modules;

/// The crates of `src/`.
const ROOTS: [&str; 14] = [
    "src/lib.rs",
    "src/driver/lib.rs",
    "src/core/lib.rs",
    "src/heap/lib.rs",
    "src/kv/lib.rs",
    "src/ledger/lib.rs",
    "src/shapes/lib.rs",
    "src/share/lib.rs",
    "src/exchange/lib.rs",
    "src/service/lib.rs",
    "src/doctor/lib.rs",
    "src/capi/lib.rs",
    "src/cli/lib.rs",
    "src/python/lib.rs",
];

/// The most files that may depend on each other.
const LARGEST: usize = 2;

/// Returns one text for each circle with more than [`LARGEST`] files: which file names which items of another.
fn circles(modules: &Modules) -> Vec<String> {
    let uses = modules.uses();
    let graph = DiGraphMap::<usize, (), RandomState>::from_edges(uses.keys().copied());
    let mut circles = Vec::new();
    for circle in tarjan_scc(&graph) {
        if circle.len() <= LARGEST {
            continue;
        }
        let mut text = format!("a circle of {} files:", circle.len());
        for ((from, to), names) in &uses {
            if circle.contains(from) && circle.contains(to) {
                let names: Vec<_> = names.iter().map(String::as_str).collect();
                let (from, to) = (modules.file(*from), modules.file(*to));
                text += &format!("\n  {from} names {} of {to}", names.join(", "));
            }
        }
        circles.push(text);
    }
    circles
}

#[test]
fn files_name_each_other_in_one_direction() {
    let root = egmem_tests::root();
    let mut found = Vec::new();
    for crate_root in ROOTS {
        let modules = Modules::read(root, crate_root).unwrap();
        found.extend(circles(&modules));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn circles_are_found_through_imports_and_re_exports() {
    let folder = tempfile::tempdir().unwrap();
    let files = [
        ("lib.rs", "mod a; mod b; mod c; mod d; pub use c::Third;"),
        ("a.rs", "use crate::b; pub struct First(b::Second);"),
        (
            "b.rs",
            "use super::Third; pub struct Second(Option<Third>);",
        ),
        (
            "c.rs",
            "pub struct Third; fn first() -> Option<crate::a::First> { None }",
        ),
        ("d.rs", "struct Fourth(super::Third);"),
    ];
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let modules = Modules::read(folder.path(), "lib.rs").unwrap();
    let [circle] = &circles(&modules)[..] else {
        panic!("{:?}", circles(&modules));
    };
    assert!(circle.contains("circle of 3"), "{circle}");
    for uses in [
        "a.rs names b::Second of b.rs",
        "b.rs names Third of c.rs",
        "c.rs names crate::a::First of a.rs",
    ] {
        assert!(circle.contains(uses), "{circle}");
    }
}

#[test]
fn files_elsewhere_are_followed() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("inner")).unwrap();
    let files = [
        (
            "inner/lib.rs",
            "mod a; #[path = \"../far.rs\"] mod far; pub use far::Second;",
        ),
        ("inner/a.rs", "pub struct First(crate::Second);"),
        ("far.rs", "pub struct Second(Option<crate::a::First>);"),
    ];
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let modules = Modules::read(folder.path(), "inner/lib.rs").unwrap();
    assert_eq!(modules.uses().len(), 2);
}

#[test]
fn what_only_tests_name_does_not_count() {
    let folder = tempfile::tempdir().unwrap();
    let files = [
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a.rs", "pub struct First(crate::b::Second);"),
        ("b.rs", "pub struct Second(crate::c::Third);"),
        (
            "c.rs",
            "pub struct Third; #[cfg(test)] mod tests { fn f(_: crate::a::First) {} }",
        ),
    ];
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let modules = Modules::read(folder.path(), "lib.rs").unwrap();
    assert_eq!(circles(&modules), Vec::<String>::new());
}
