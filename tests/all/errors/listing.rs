//! Compares the texts of errors with a listing, and their words with those of each language.

use std::fmt::{Debug, Write};
use std::path::PathBuf;

use egmem::{Explain, Explained, Language};
use syn::Item;

/// Where set, a test writes its listing instead of comparing it.
const UPDATE: &str = "EGMEM_UPDATE_ERRORS";

/// Returns the file `file` of `src/`.
pub fn parse(file: &str) -> syn::File {
    let text = std::fs::read_to_string(egmem_tests::root().join("src").join(file)).unwrap();
    syn::parse_file(&text).unwrap()
}

/// Returns the names of the variants of the enum `name` in the file `file` of `src/`, in their order. They are read
/// from the file, because these tests can name no variant that they do not know.
///
/// # Panics
/// If the file has no such enum.
pub fn variants(file: &str, name: &str) -> Vec<String> {
    let mut variants = Vec::new();
    for item in parse(file).items {
        if let Item::Enum(item) = item
            && item.ident == name
        {
            variants.extend(
                item.variants
                    .iter()
                    .map(|variant| variant.ident.to_string()),
            );
        }
    }
    assert!(!variants.is_empty(), "{name}");
    variants
}

/// Returns the name of a value's variant.
pub fn variant(value: &impl Debug) -> String {
    let text = format!("{value:?}");
    let end = text.find(|c: char| !c.is_alphanumeric());
    text[..end.unwrap_or(text.len())].into()
}

/// Checks that `values` has one value of each variant, in their order.
///
/// # Panics
/// If it has not.
pub fn expect_all<T: Debug>(file: &str, name: &str, values: &[T]) {
    let found: Vec<_> = values.iter().map(variant).collect();
    assert_eq!(found, variants(file, name), "examples of {name}");
}

/// Returns the word of a text that a program in `language` does not know: of Rust, of the other language, or an option of
/// the command line outside a command.
pub fn foreign_word(text: &str, language: Language) -> Option<&str> {
    let of_the_other: &[&str] = match language {
        Language::Python => &["egm_", "EGM_"],
        _ => &["=True", "egmem.simulated"],
    };
    // Commands are the same everywhere: `egmem certs issue --san`.
    let outside_commands = text.split('`').filter(|part| !part.starts_with("egmem "));
    let mut words = outside_commands.flat_map(str::split_whitespace);
    words.find(|word| {
        // Rust's types are in camel case. So are CUDA's calls, and its products.
        let is_camel = word.as_bytes().windows(3).any(|three| {
            let is_upper = three.iter().map(u8::is_ascii_uppercase);
            is_upper.eq([false, true, false]) && three.iter().all(u8::is_ascii_alphabetic)
        });
        let is_cuda = word.starts_with("cu") || word.starts_with("(cu") || word.contains("NVLink");
        (is_camel && !is_cuda)
            || word.starts_with("--")
            || ["::", "(true)"].iter().any(|rust| word.contains(rust))
            || of_the_other.iter().any(|other| word.contains(other))
    })
}

/// Compares the examples of the enum `Error` of the crate or module `of`, which is in the file `file`, with
/// `tests/data/errors/{name}.txt`. `reason` returns which of several reasons an error has.
///
/// # Panics
/// If they differ, or if a variant has no example.
pub fn compare<E: Explain + Debug>(
    name: &str,
    of: &str,
    file: &str,
    examples: &[E],
    reason: impl Fn(&E) -> Option<String>,
) {
    let listing = format!("tests/data/errors/{name}.txt");
    let path: PathBuf = egmem_tests::root().join(&listing);
    let found = listed(of, &variants(file, "Error"), examples, reason);
    if std::env::var_os(UPDATE).is_some() {
        return std::fs::write(&path, found).unwrap();
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

/// Lists the remedy: Rust's, and those of Python and C where they have other names.
fn list_remedies(text: &mut String, example: &(impl Explain + Debug)) {
    let told = Explained(example);
    if !example.remedy().is_empty() {
        writeln!(text, "  -> {}", example.remedy()).unwrap();
    }
    for (name, language) in [("Python", Language::Python), ("C", Language::C)] {
        let remedy = told.remedy_in(language);
        if remedy != example.remedy() {
            writeln!(text, "  {name} -> {remedy}").unwrap();
        }
        for part in [&told.message(), &*remedy] {
            let foreign = foreign_word(part, language);
            assert_eq!(foreign, None, "{example:?} in {name}: {part}");
        }
    }
}

fn listed<E: Explain + Debug>(
    of: &str,
    all: &[String],
    examples: &[E],
    reason: impl Fn(&E) -> Option<String>,
) -> String {
    let mut text = format!(
        "Every variant of {of}::Error, each with an example's message and remedy, and with Python's and C's remedy where it has other\n\
         names. The tests of `errors` compare this file with the code; {UPDATE}=1 rewrites it.\n"
    );
    for name in all {
        let mut examples = examples.iter().filter(|e| variant(e) == *name).peekable();
        assert!(examples.peek().is_some(), "no example of {of}::{name}");
        writeln!(text, "\n{name}").unwrap();
        for example in examples {
            if let Some(reason) = reason(example) {
                writeln!(text, "  [{reason}]").unwrap();
            }
            for line in example.to_string().lines() {
                writeln!(text, "  {line}").unwrap();
            }
            list_remedies(&mut text, example);
        }
    }
    text
}
