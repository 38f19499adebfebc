//! The device functions in kernels of a program's own: the headers by NVRTC, and the PTX linked with other PTX by
//! `cuLinkAddData`. Nothing on the simulator, which compiles and links nothing.

use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};
use cudarc::nvrtc::{self, CompileOptions};
use egmem::Driver;
use egmem::driver::ModuleHandle;
use egmem::shapes::{Appender, Ring, device};

use crate::shapes::kernels::{Kernels, PATIENCE};
use crate::shapes::node;
use crate::shapes::ring::soon;

/// The kernel that calls the functions of `device::PTX` by name, as PTX and as source.
const LINKED: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("linked.ptx"), "\0").as_bytes()) {
        Ok(ptx) => ptx,
        Err(_) => panic!("linked.ptx holds a NUL"),
    };
const LINKED_SOURCE: &str = include_str!("linked.cu");

/// The same kernel, with the headers.
const WITH_HEADERS: &str = r#"
#include "egmem_append.cuh"
#include "egmem_ring.cuh"
struct Record { egmem_u64 number, other; };
extern "C" __global__ void linked_pass(void *from, void *appender, void *to, egmem_u64 count, egmem_u64 ns, egmem_u64 *done) {
    egmem_ring_side in, out;
    egmem_append all;
    if (!egmem_ring_open_consumer(&in, from) || !egmem_ring_open_producer(&out, to) || !egmem_append_open(&all, appender)) {
        return;
    }
    egmem_u64 passed = 0;
    Record record;
    while (passed < count && egmem_ring_pop(&in, &record, ns) && egmem_append_one(&all, record, ns)
           && egmem_ring_push(&out, record, ns)) {
        passed++;
    }
    *done = passed;
}
"#;

const COUNT: u64 = 50_000;

/// Links texts of PTX into a module on GPU 0. The module is gone when the last user of the primary context is, so the
/// context comes with it.
fn link(texts: &[&CStr]) -> (Arc<CudaContext>, ModuleHandle) {
    let context = CudaContext::new(0).unwrap(); // the primary one, as egmem's
    context.bind_to_thread().unwrap();
    let (mut state, mut module) = (ptr::null_mut(), ptr::null_mut());
    let (mut binary, mut size) = (ptr::null_mut(), 0);
    // SAFETY: the context is current; each text ends with a NUL, which its size counts; the binary is the state's, which is
    // destroyed after the module was loaded.
    unsafe {
        let created = sys::cuLinkCreate_v2(0, ptr::null_mut(), ptr::null_mut(), &mut state);
        created.result().unwrap();
        for text in texts {
            let (kind, bytes) = (
                sys::CUjitInputType::CU_JIT_INPUT_PTX,
                text.to_bytes_with_nul(),
            );
            let (data, name) = (bytes.as_ptr().cast_mut().cast::<c_void>(), c"text".as_ptr());
            let none = (ptr::null_mut(), ptr::null_mut());
            let added =
                sys::cuLinkAddData_v2(state, kind, data, bytes.len(), name, 0, none.0, none.1);
            added.result().unwrap();
        }
        sys::cuLinkComplete(state, &mut binary, &mut size)
            .result()
            .unwrap();
        assert_ne!(size, 0);
        sys::cuModuleLoadData(&mut module, binary).result().unwrap();
        sys::cuLinkDestroy(state).result().unwrap();
    }
    (context, ModuleHandle(module as u64))
}

/// Compiles by NVRTC; `None`, with a line that says so, where there is none.
fn compile(source: &str, options: &[&str]) -> Option<CString> {
    // SAFETY: loads the library that every program with NVRTC loads.
    if !unsafe { nvrtc::sys::is_culib_present() } {
        println!("skipped: there is no NVRTC here");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in device::HEADERS {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let options = CompileOptions {
        include_paths: vec![folder.path().to_str().unwrap().into()],
        options: options.iter().map(|&option| option.into()).collect(),
        arch: Some("compute_75"),
        ..CompileOptions::default()
    };
    let ptx = nvrtc::compile_ptx_with_opts(source, options).unwrap();
    Some(CString::new(ptx.to_src()).unwrap())
}

/// The kernel takes records from the CPU, appends them, and pushes them back to the CPU.
fn passes_records(driver: &Driver, module: ModuleHandle) {
    // SAFETY: the module was just loaded, and this is its only owner.
    let kernels = unsafe { Kernels::of_module(driver, module) };
    let ring = || {
        Ring::<[u64; 2]>::on(node(driver))
            .records(1000)
            .create(driver)
            .unwrap()
    };
    let (to_gpu, from_gpu) = (ring(), ring());
    let (mut producer, input) = (to_gpu.producer, to_gpu.consumer.into_gpu());
    let (output, mut consumer) = (from_gpu.producer.into_gpu(), from_gpu.consumer);
    let options = Appender::<[u64; 2]>::on(node(driver)).max_len(COUNT as usize);
    let mut appender = options.create(driver).unwrap();
    let args = [
        input.device_ptr().0,
        appender.device_ptr().0,
        output.device_ptr().0,
        COUNT,
        PATIENCE,
    ];
    // SAFETY: the rings and the appender live until the kernel was waited for.
    let run = unsafe { kernels.launch(c"linked_pass", (1, 1), &args) };
    let (mut sent, mut received) = (0, 0);
    while received < COUNT {
        while sent < COUNT && producer.try_push([sent, !sent]).unwrap() {
            sent += 1;
        }
        appender.pump();
        let record = consumer.pop_until(soon()).unwrap();
        assert_eq!(record, Some([received, !received]));
        received += 1;
    }
    assert_eq!(run.wait(), [COUNT]);
    let came = appender.collect().unwrap();
    assert_eq!((came.records, came.missed), (0..COUNT as usize, 0));
    let last = appender.records().get(COUNT as usize - 1).unwrap();
    assert_eq!(last, [COUNT - 1, !(COUNT - 1)]);
}

pub fn functions_are_linked_with_other_ptx(driver: &Driver) {
    if driver.sim().is_some() {
        return;
    }
    let (_context, module) = link(&[device::PTX, LINKED]);
    passes_records(driver, module);
}

pub fn headers_and_functions_work_with_nvrtc(driver: &Driver) {
    if driver.sim().is_some() {
        return;
    }
    let Some([whole, part]) = compiled() else {
        return;
    };
    // SAFETY: the text is PTX.
    passes_records(driver, unsafe { driver.module_load(0, &whole) }.unwrap());
    let (_context, module) = link(&[device::PTX, &part]);
    passes_records(driver, module);
}

/// Both sources by NVRTC: the one with the headers, and the one that is to be linked.
fn compiled() -> Option<[CString; 2]> {
    let whole = compile(WITH_HEADERS, &[])?;
    Some([
        whole,
        compile(LINKED_SOURCE, &["--relocatable-device-code=true"])?,
    ])
}

/// No GPU is needed to compile.
#[test]
fn headers_compile_by_nvrtc() {
    let Some([whole, part]) = compiled() else {
        return;
    };
    let entries = |ptx: &CString| ptx.to_str().unwrap().matches(".entry linked_pass").count();
    assert_eq!((entries(&whole), entries(&part)), (1, 1));
}

/// `device::PTX` defines all functions that a text declares: no GPU is needed to see that.
#[test]
fn each_function_that_is_to_be_linked_is_there() {
    let ptx = device::PTX.to_str().unwrap();
    let text = LINKED.to_str().unwrap();
    let declared: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix(".extern .func"))
        .filter_map(|line| line.split_whitespace().last())
        .collect();
    assert_eq!(declared.len(), 9, "{declared:?}");
    for name in declared {
        let is_defined = ptx.lines().any(|line| {
            line.starts_with(".visible .func") && line.trim_end_matches('(').ends_with(name)
        });
        assert!(is_defined, "{name}");
    }
}
