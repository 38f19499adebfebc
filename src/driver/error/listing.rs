//! Compares the texts of errors with a listing. Tests of the crates above include this file too.

use std::fmt::Write;
use std::path::Path;

/// Where set, a test writes its listing instead of comparing it.
const UPDATE: &str = "EGMEM_UPDATE_ERRORS";

/// An enum's variants by name. A variant that the invocation does not list fails to compile.
macro_rules! variants {
    ($name:ident: $enum:ident { $($variant:ident),* $(,)? }) => {
        struct $name;

        impl $name {
            const ALL: &'static [&'static str] = &[$(stringify!($variant)),*];

            fn of(value: &$enum) -> &'static str {
                match value { $($enum::$variant { .. } => stringify!($variant),)* }
            }
        }
    };
}

/// What the listing shows of an error.
pub struct Example {
    pub variant: &'static str,
    /// Which of several reasons it is, if the variant has one.
    pub reason: Option<String>,
    pub text: String,
    pub remedy: &'static str,
}

/// Compares the examples, by variant in the order of `all`, with `tests/data/errors/{name}.txt`.
///
/// # Panics
/// If they differ, or if a variant has no example.
pub fn compare(name: &str, of: &str, all: &[&str], examples: &[Example]) {
    let listing = format!("tests/data/errors/{name}.txt");
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(&listing);
    let found = listed(of, all, examples);
    if std::env::var_os(UPDATE).is_some() {
        return std::fs::write(&path, found).unwrap();
    }
    if !path.parent().is_some_and(Path::is_dir) {
        return eprintln!("SKIPPED: {listing} is not part of the package");
    }
    let listed = std::fs::read_to_string(&path).unwrap_or_default();
    let (listed, found): (Vec<_>, Vec<_>) = (listed.lines().collect(), found.lines().collect());
    let same = listed.iter().zip(&found).take_while(|(a, b)| a == b);
    let line = same.count();
    assert!(
        listed == found,
        "{listing}, line {}: it has {:?}, the code says {:?}; after review, set {UPDATE}=1 to rewrite it",
        line + 1,
        listed.get(line),
        found.get(line)
    );
}

fn listed(of: &str, all: &[&str], examples: &[Example]) -> String {
    let mut text = format!(
        "Every variant of {of}, each with an example's message and remedy. The test\n\
         error::catalogue compares this file with the code; {UPDATE}=1 rewrites it.\n"
    );
    for variant in all {
        let mut examples = examples.iter().filter(|e| e.variant == *variant).peekable();
        assert!(examples.peek().is_some(), "no example of {of}::{variant}");
        writeln!(text, "\n{variant}").unwrap();
        for example in examples {
            if let Some(reason) = &example.reason {
                writeln!(text, "  [{reason}]").unwrap();
            }
            for line in example.text.lines() {
                writeln!(text, "  {line}").unwrap();
            }
            writeln!(text, "  -> {}", example.remedy).unwrap();
        }
    }
    text
}
