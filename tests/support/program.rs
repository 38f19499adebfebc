//! Programs that tests start: this one again, `egmem`, and examples; and the files that tests read.
//!
//! Where the tests were carried to another machine, environment variables say where these are: `EGMEM_TEST_PROGRAM`
//! names the command line `egmem`, `EGMEM_TEST_DATA` the folder `tests/data`. `EGMEM_TEST_RUNNER` starts programs of
//! another architecture.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the words that start `program`: those of the emulator first, where there is one.
pub fn words(program: impl AsRef<OsStr>) -> Vec<OsString> {
    let runner = std::env::var("EGMEM_TEST_RUNNER").unwrap_or_default();
    let mut words: Vec<OsString> = runner.split_whitespace().map(OsString::from).collect();
    words.push(program.as_ref().to_owned());
    words
}

/// Returns the command that starts `program`.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let words = words(program);
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

/// Returns the command that runs one test of this program in a process of its own; `module` is its `module_path!()`, or
/// empty.
pub fn child(module: &str, test: &str) -> Command {
    let mut child = command(this_program());
    child.args(child_arguments(module, test));
    child
}

/// Runs `test`, the body of the test `name` of `module`, in a process of its own.
///
/// # Panics
/// If it fails there, with its output, or if the module has no such test.
pub fn alone(module: &str, name: &str, test: impl FnOnce()) {
    alone_as(child(module, name), test);
}

/// As [`alone`], in the process that `child` starts.
pub fn alone_as(mut child: Command, test: impl FnOnce()) {
    const ALONE: &str = "EGMEM_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return test();
    }
    let ended = child.env(ALONE, "1").output().unwrap();
    let (out, error) = (
        String::from_utf8_lossy(&ended.stdout),
        String::from_utf8_lossy(&ended.stderr),
    );
    let passed = ended.status.success() && out.contains("1 passed");
    assert!(passed, "{}\n{out}\n{error}", ended.status);
    println!("{out}");
}

/// Returns the path of this program.
pub fn this_program() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// Returns the arguments by which this program runs one test alone; `module` is its `module_path!()`.
pub fn child_arguments(module: &str, test: &str) -> [String; 4] {
    let path = match module.split_once("::") {
        Some((_, module)) => format!("{module}::{test}"),
        None => test.to_owned(),
    };
    let options = ["--exact", "--nocapture", "--test-threads=1"].map(str::to_owned);
    let [exact, output, threads] = options;
    [exact, path, output, threads]
}

/// Returns the path of the command line `egmem`.
pub fn egmem_program() -> PathBuf {
    match std::env::var_os("EGMEM_TEST_PROGRAM") {
        Some(program) => PathBuf::from(program),
        None => built("egmem", "--bin egmem"),
    }
}

/// Returns the command line `egmem` with these arguments, with nothing of the caller's environment that it reads.
pub fn egmem(arguments: &[&str]) -> Command {
    let mut egmem = command(egmem_program());
    egmem.args(arguments);
    for name in [
        "RUST_LOG",
        "EGMEM_SIM",
        "EGMEM_CA",
        "EGMEM_CERT",
        "EGMEM_KEY",
        "XDG_RUNTIME_DIR",
        "NOTIFY_SOCKET",
    ] {
        egmem.env_remove(name);
    }
    egmem
}

/// Returns the path of an example.
pub fn example(name: &str) -> PathBuf {
    built(&format!("examples/{name}"), &format!("--example {name}"))
}

/// Returns the path of a program that cargo built beside this one.
///
/// # Panics
/// If it is missing or older than its sources: `cargo test` builds no other package's programs.
fn built(name: &str, target: &str) -> PathBuf {
    let test = this_program();
    let folder = test.ancestors().nth(2).expect("target/PROFILE/deps/");
    let path = folder.join(name);
    let remedy =
        format!("build it: cargo build {target} with the tests' features, or run ci/tests");
    assert!(path.exists(), "{} is missing; {remedy}", path.display());
    if let Some(source) = newer_source(&path) {
        panic!("{} is older than {source}; {remedy}", path.display());
    }
    path
}

/// Returns a source file that changed after `program` was built, by cargo's list of them.
fn newer_source(program: &Path) -> Option<String> {
    let changed = |path: &Path| std::fs::metadata(path)?.modified();
    let built = changed(program).ok()?;
    let sources = std::fs::read_to_string(program.with_extension("d")).ok()?;
    let (_, sources) = sources.split_once(": ")?;
    let newer = |source: &&str| changed(Path::new(source)).is_ok_and(|time| time > built);
    sources.split_whitespace().find(newer).map(str::to_owned)
}

/// Returns the repository's root.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Returns the path of a file of `tests/data`.
pub fn data(file: &str) -> PathBuf {
    let folder = std::env::var_os("EGMEM_TEST_DATA");
    folder
        .map_or_else(|| root().join("tests/data"), PathBuf::from)
        .join(file)
}
