//! The header `include/egmem.h` is cbindgen's output for the sources. `EGMEM_UPDATE_HEADER=1` rewrites it.

use std::path::Path;

const HEADER: &str = "include/egmem.h";

const INTRODUCTION: &str = "\
/*
 * egmem for C: Extended GPU Memory, the CPU's memory that is pinned on a chosen NUMA node and that the CPU and every GPU
 * read and write. docs/c.md is the guide; egmem.hpp is for C++.
 *
 * Every call returns a status. EGM_OK is 0. A result is written only if the call succeeds. The place of a result overlaps no
 * other argument's memory; of two results of one call at one place, one overwrites the other, whose object or text is lost. A
 * handle is destroyed by the function with its name and _destroy; each function says which threads may call it and how long
 * its results are valid.
 * The library never unwinds into the program, and never ends the process.
 *
 * Made by cbindgen from src/capi: do not change it by hand.
 */";

/// In C++ a name may be qualified, which a macro would break: there egmem.hpp tells the lines.
const CALL_SITES: &str = "\
/*
 * In C, the calls below tell the ledger their line (egm_call_site()), which `egmem ps` and EGMEM_LEAKS=1 show. Define
 * EGM_NO_CALL_SITES before this header is included to turn that off.
 */
#if !defined(__cplusplus) && !defined(EGM_NO_CALL_SITES) && !defined(EGM_FROM_HERE)
#define EGM_FROM_HERE(call) (egm_call_site(__FILE__, __LINE__, __func__), call)
#define egm_buffer_create(...) EGM_FROM_HERE(egm_buffer_create(__VA_ARGS__))
#define egm_buffer_near(...) EGM_FROM_HERE(egm_buffer_near(__VA_ARGS__))
#define egm_heap_create(...) EGM_FROM_HERE(egm_heap_create(__VA_ARGS__))
#define egm_pool_alloc(...) EGM_FROM_HERE(egm_pool_alloc(__VA_ARGS__))
#define egm_channel_receive(...) EGM_FROM_HERE(egm_channel_receive(__VA_ARGS__))
#define egm_client_fetch(...) EGM_FROM_HERE(egm_client_fetch(__VA_ARGS__))
#define egm_group_gather(...) EGM_FROM_HERE(egm_group_gather(__VA_ARGS__))
#define egm_ring_create(...) EGM_FROM_HERE(egm_ring_create(__VA_ARGS__))
#define egm_ring_receive(...) EGM_FROM_HERE(egm_ring_receive(__VA_ARGS__))
#endif
";

fn generate() -> String {
    let folder = env!("CARGO_MANIFEST_DIR");
    let config = cbindgen::Config {
        language: cbindgen::Language::C,
        cpp_compat: true,
        usize_is_size_t: true,
        include_guard: Some("EGMEM_H".into()),
        header: Some(INTRODUCTION.into()),
        style: cbindgen::Style::Both,
        documentation_style: cbindgen::DocumentationStyle::Cxx,
        line_length: 120,
        tab_width: 4,
        trailer: Some(CALL_SITES.into()),
        ..cbindgen::Config::default()
    };
    let built = cbindgen::Builder::new()
        .with_crate(folder)
        .with_config(config)
        .generate()
        .expect("cbindgen reads the sources");
    let mut text = Vec::new();
    built.write(&mut text);
    let text = String::from_utf8(text).expect("a header is UTF-8");
    text.replace("/// # Safety", "/// Contract:")
}

#[test]
fn the_header_is_what_the_sources_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(HEADER);
    let made = generate();
    if std::env::var_os("EGMEM_UPDATE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == made,
        "{HEADER} is not current: EGMEM_UPDATE_HEADER=1 cargo test -p egmem-capi --test capi rewrites it"
    );
}
