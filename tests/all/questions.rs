//! The pages of questions show each program of examples/questions as it is.

use std::collections::BTreeMap;
use std::fs;

/// Where set, the test writes the pages instead of comparing them.
const UPDATE: &str = "EGMEM_UPDATE_QUESTIONS";
const FOLDER: &str = "examples/questions";
const PAGES: [&str; 2] = ["docs/questions.md", "docs/visibility.md"];
const MOST_LINES: usize = 60;

/// Returns the programs by the names of their files.
fn programs() -> BTreeMap<String, String> {
    let files = fs::read_dir(egmem_tests::root().join(FOLDER)).unwrap();
    let files = files.map(|file| file.unwrap().path());
    let named = files.filter(|path| path.is_file()).map(|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        (name.into(), fs::read_to_string(&path).unwrap())
    });
    named.collect()
}

/// Returns the name of the program that a page's line announces, as `[NAME](../examples/questions/NAME)`.
fn announced(line: &str) -> Option<&str> {
    let (name, rest) = line.strip_prefix('[')?.split_once("](../")?;
    let file = rest.strip_prefix(FOLDER)?.strip_prefix('/')?;
    file.starts_with(name).then_some(name)
}

/// Returns the language of a program, as a fence names it.
fn language(name: &str) -> &'static str {
    match name.rsplit_once('.') {
        Some((_, "rs")) => "rust",
        Some((_, "py")) => "python",
        _ => "cpp",
    }
}

/// Returns the page with the current text of each program that it announces, and notes their names. Other fences have no
/// programs, because no test runs them.
fn with_programs(
    page: &str,
    programs: &BTreeMap<String, String>,
    shown: &mut Vec<String>,
) -> String {
    let (mut made, mut next) = (String::new(), None);
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        next = announced(line).or(next.filter(|_| line.is_empty() || line.starts_with("```")));
        let Some(fence) = line.strip_prefix("```") else {
            made += &format!("{line}\n");
            continue;
        };
        let body: Vec<_> = lines.by_ref().take_while(|line| *line != "```").collect();
        let (fence, text) = match next.take() {
            Some(name) => {
                shown.push(name.into());
                let text = programs.get(name).expect(name);
                (language(name), text.trim_end().to_owned())
            }
            None => {
                assert!(
                    matches!(fence, "text" | "sh"),
                    "a program without a file: {body:?}"
                );
                (fence, body.join("\n"))
            }
        };
        made += &format!("```{fence}\n{text}\n```\n");
    }
    made
}

#[test]
fn the_pages_show_the_programs_as_they_are() {
    let (programs, mut shown) = (programs(), Vec::new());
    for page in PAGES {
        let path = egmem_tests::root().join(page);
        let old = fs::read_to_string(&path).unwrap();
        let new = with_programs(&old, &programs, &mut shown);
        if std::env::var_os(UPDATE).is_some() {
            fs::write(path, new).unwrap();
        } else {
            let hint = "cargo test -p egmem-tests --test all questions:: rewrites it";
            assert!(old == new, "{page} is not current: {UPDATE}=1 {hint}");
        }
    }
    shown.sort();
    assert!(
        shown.iter().eq(programs.keys()),
        "each program once: {shown:?}"
    );
}

#[test]
fn the_programs_are_short() {
    for (name, text) in programs() {
        let lines = text.lines().count();
        assert!(
            lines <= MOST_LINES,
            "{name} has {lines} lines, more than {MOST_LINES}"
        );
    }
}

/// Each Rust program is an example, so that CI builds and runs it.
#[test]
fn the_rust_programs_are_examples() {
    let manifest = fs::read_to_string(egmem_tests::root().join("Cargo.toml")).unwrap();
    for (name, _) in programs() {
        let path = format!("path = \"{FOLDER}/{name}\"");
        assert!(
            !name.ends_with(".rs") || manifest.contains(&path),
            "Cargo.toml lacks {name}"
        );
    }
}
