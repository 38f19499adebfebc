//! Captures of streams: the library itself makes none.

use std::ffi::{c_int, c_void};
use std::ptr;

use egmem::driver::StreamHandle;
use egmem::{Error, Result, Stream};
use libloading::os::unix::Library;

type Begin = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;
type End = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int;
type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;

/// The calls of captures.
pub struct Cuda {
    begin: Begin,
    end: End,
    destroy: Destroy,
    // Keeps the code loaded.
    _library: Library,
}

impl Cuda {
    /// From CUDA's library; a context of `gpu` is the calling thread's from then on.
    ///
    /// # Errors
    /// [`Error::MissingLibrary`]; [`Error::System`] with the driver's code.
    pub fn load(gpu: i32) -> Result<Self> {
        let refuse = |error: libloading::Error| Error::MissingLibrary {
            library: "libcuda.so.1",
            detail: error.to_string(),
        };
        // SAFETY: CUDA's own library, which is loaded and initialised already.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(refuse)?;
        // SAFETY: the types are those of the functions in cuda.h.
        unsafe {
            let retain = library
                .get::<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int>(
                    b"cuDevicePrimaryCtxRetain\0",
                )
                .map_err(refuse)?;
            let set_current = library
                .get::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuCtxSetCurrent\0")
                .map_err(refuse)?;
            let mut context = ptr::null_mut();
            // Kept until the process ends: streams are captured in it all the time.
            check("cuDevicePrimaryCtxRetain", retain(&mut context, gpu))?;
            check("cuCtxSetCurrent", set_current(context))?;
            Ok(Self {
                begin: *library
                    .get::<Begin>(b"cuStreamBeginCapture_v2\0")
                    .map_err(refuse)?,
                end: *library
                    .get::<End>(b"cuStreamEndCapture\0")
                    .map_err(refuse)?,
                destroy: *library
                    .get::<Destroy>(b"cuGraphDestroy\0")
                    .map_err(refuse)?,
                _library: library,
            })
        }
    }

    /// Begins a capture in global mode.
    ///
    /// # Errors
    /// [`Error::System`] with the driver's code.
    pub fn begin(&self, stream: &Stream) -> Result<()> {
        // SAFETY: the stream lives; 0 is CU_STREAM_CAPTURE_MODE_GLOBAL.
        check("cuStreamBeginCapture", unsafe {
            (self.begin)(raw(stream.handle()), 0)
        })
    }

    /// Ends it and destroys the graph; returns the driver's result code.
    pub fn end(&self, stream: &Stream) -> i32 {
        let mut graph = ptr::null_mut();
        // SAFETY: the stream lives and is captured; a graph is destroyed once.
        unsafe {
            let answer = (self.end)(raw(stream.handle()), &mut graph);
            if !graph.is_null() {
                (self.destroy)(graph);
            }
            answer
        }
    }
}

fn raw(stream: StreamHandle) -> *mut c_void {
    ptr::with_exposed_provenance_mut(stream.raw as usize)
}

fn check(what: &'static str, answer: c_int) -> Result<()> {
    match answer {
        0 => Ok(()),
        code => Err(Error::system(
            what,
            &std::io::Error::other(format!("CUDA result {code}")),
        )),
    }
}
