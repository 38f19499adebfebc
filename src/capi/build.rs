//! Names the shared library: programs that link it find the version that they were built for.

fn main() {
    let part = |name| std::env::var(name).unwrap_or_default();
    let (major, minor) = (
        part("CARGO_PKG_VERSION_MAJOR"),
        part("CARGO_PKG_VERSION_MINOR"),
    );
    // Below 1.0 a minor version may break the interface. cargo-c chooses the same name.
    let version = if major == "0" {
        format!("0.{minor}")
    } else {
        major
    };
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libegmem.so.{version}");
    // Its threads and threads' destructors must not lose their code: dlclose(3) leaves it loaded.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
