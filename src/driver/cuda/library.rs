//! A library loaded at run time. Each function is looked up when it is first called.

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::{Call, Code, CudaVersion, Error, Result};

/// A loaded CUDA library.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library {
    // Never closed: CUDA's libraries run their own threads and exit handlers.
    handle: *mut c_void,
    pub name: &'static str,
}

// SAFETY: the loader may be asked for a symbol by any thread, and the handle stays valid: nothing closes it.
unsafe impl Send for Library {}
// SAFETY: as above; the loader takes a lock of its own.
unsafe impl Sync for Library {}

impl Library {
    /// Loads `path`, which errors call `name`; returns the loader's message on failure.
    pub fn open(path: &Path, name: &'static str) -> std::result::Result<Self, String> {
        let file = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: the path ends with a NUL. Loading runs the library's initialisers. These are CUDA's own libraries, by
        // name, which are made to be loaded at run time from any thread. An attacker that can replace such a library
        // can also replace this program.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(loader_message());
        }
        Ok(Self { handle, name })
    }

    fn find(&self, symbol: &str) -> Option<*mut c_void> {
        let symbol = CString::new(symbol).ok()?;
        // SAFETY: the handle is open, the name ends with a NUL. The address is only stored here; it is called
        // through the type that `functions!` has for it.
        let address = unsafe { libc::dlsym(self.handle, symbol.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// Returns why this thread's last call of the loader failed.
fn loader_message() -> String {
    // SAFETY: the text belongs to this thread's loader until the thread's next call of it, and is copied before.
    let message = unsafe { libc::dlerror() };
    if message.is_null() {
        return "the loader gives no reason".into();
    }
    // SAFETY: not null; the loader ends it with a NUL.
    let message = unsafe { CStr::from_ptr(message) };
    message.to_string_lossy().into_owned()
}

/// A function of a library, looked up on first use.
pub(super) struct Function {
    pub call: Call,
    /// None: the call's name.
    names: &'static [&'static str],
    since: CudaVersion,
    address: AtomicPtr<c_void>,
}

impl Function {
    /// Describes the function for `call`: the first of `names` that the library has, or of the call's name. Drivers have
    /// it from version `since` on.
    pub const fn new(call: Call, names: &'static [&'static str], since: CudaVersion) -> Self {
        Self {
            call,
            names,
            since,
            address: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Returns the function's address in `library`, which belongs to a driver of version `have`; never null.
    #[inline]
    pub fn address(&self, library: &Library, have: Option<CudaVersion>) -> Result<*mut c_void> {
        // Relaxed: the code at the address was loaded before any thread could know the address.
        let address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            return self.look_up(library, have);
        }
        Ok(address)
    }

    #[cold]
    fn look_up(&self, library: &Library, have: Option<CudaVersion>) -> Result<*mut c_void> {
        let address = match self.names {
            [] => library.find(self.call.name()),
            names => names.iter().find_map(|name| library.find(name)),
        };
        let address = address.ok_or_else(|| self.missing(library.name, have))?;
        self.address.store(address, Ordering::Relaxed);
        Ok(address)
    }

    fn missing(&self, library: &'static str, have: Option<CudaVersion>) -> Error {
        let error = match have {
            Some(have) if have < self.since => Error::DriverTooOld {
                what: self.call.name(),
                have,
                need: self.since,
            },
            _ => Error::MissingSymbol {
                symbol: self.names.first().unwrap_or(&self.call.name()),
                library,
            },
        };
        tracing::debug!(%error, "a function is missing");
        error
    }
}

/// Converts a call's code to a result.
#[inline]
pub(super) fn check(call: Call, code: i32) -> Result<()> {
    if code == 0 {
        Ok(())
    } else {
        Err(failed(call, Code(code)))
    }
}

#[cold]
fn failed(call: Call, code: Code) -> Error {
    // `NOT_READY` is an answer, not an error.
    if code != Code::NOT_READY {
        tracing::debug!(%call, %code, "a driver call failed");
    }
    Error::driver(call, code)
}

/// Defines a library's functions: a struct with one checked method for each, and a table of them.
///
/// `name = Variant ["symbol", ...] since version (arguments);`, and `Variant | RtVariant` where the runtime API has the call
/// too. Without symbols, the call's name is the symbol.
macro_rules! functions {
    (@call $api:ident $call:ident) => { $crate::Call::$call };
    (@call $api:ident $call:ident $runtime:ident) => {
        match $api {
            $crate::PoolApi::Driver => $crate::Call::$call,
            $crate::PoolApi::Runtime => $crate::Call::$runtime,
        }
    };
    (
        $(#[$doc:meta])*
        $table:ident;
        $($name:ident = $call:ident $(| $runtime:ident)? $([$($symbol:literal),+])? since $since:literal
            ($($arg:ident: $ty:ty),* $(,)?);)*
    ) => {
        $(#[$doc])*
        pub(super) struct $table {
            library: $crate::cuda::library::Library,
            version: Option<$crate::CudaVersion>,
            $($name: $crate::cuda::library::Function,)*
        }

        impl $table {
            pub(super) fn new(
                library: $crate::cuda::library::Library,
                _api: $crate::PoolApi,
                version: Option<$crate::CudaVersion>,
            ) -> Self {
                Self {
                    library,
                    version,
                    $($name: $crate::cuda::library::Function::new(
                        functions!(@call _api $call $($runtime)?),
                        &[$($($symbol),+)?],
                        $crate::CudaVersion($since),
                    ),)*
                }
            }

            $(
                #[allow(clippy::too_many_arguments)] // as many as the C function has
                #[inline]
                pub(super) unsafe fn $name(&self, $($arg: $ty),*) -> $crate::Result<()> {
                    let address = self.$name.address(&self.library, self.version)?;
                    let _traced = self.$name.call.traced();
                    // SAFETY: the address is not null, and that of one of these symbols, whose type in CUDA's headers is
                    // this one, or is passed alike. The caller guarantees the arguments, as for the C function.
                    let code = unsafe {
                        std::mem::transmute::<
                            *mut std::ffi::c_void,
                            unsafe extern "C" fn($($ty),*) -> i32,
                        >(address)($($arg),*)
                    };
                    $crate::cuda::library::check(self.$name.call, code)
                }
            )*

            /// The functions' names in the library, and the CUDA versions that first had them.
            #[cfg(test)]
            pub(super) const TABLE: &'static [($crate::Call, &'static [&'static str], i32)] =
                &[$(($crate::Call::$call, &[$($($symbol),+)?], $since),)*];
        }

        impl std::fmt::Debug for $table {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($table))
                    .field("library", &self.library.name)
                    .field("version", &self.version)
                    .finish()
            }
        }
    };
}

pub(super) use functions;

/// Defines methods that return the results of one call of `this.api`:
/// `[kind] method(arguments) -> result { let …; @place(…) function(values) => result expression }`.
///
/// The place is a method of the API's state, which runs the call in the context that it needs. The values are safe
/// expressions: the macro evaluates them in the `unsafe` block of the call.
macro_rules! methods {
    (|$this:ident| $(
        [$($kind:tt)+] $method:ident($($arg:ident: $ty:ty),*) -> $out:ty {
            $(let $var:pat = $init:expr;)*
            @$place:ident($($at:expr)?) $function:ident($($value:expr),*) => $result:expr
        }
    )*) => {$(
        $($kind)+ $method(&self, $($arg: $ty),*) -> $crate::Result<$out> {
            let $this = self;
            $(let $var = $init;)*
            // SAFETY: pointers are to live values of the types in CUDA's headers. The call fills or reads them
            // before it returns and does not keep them. Lengths and counts are those of the values they go with.
            // A `void` pointer leads to a value at least as wide as the attribute or handle type. Texts end with
            // a NUL. Flags are 0 or CUDA's own. The driver checks numbers and handles, and looks addresses up
            // without following them. The caller guarantees, by the contract of `Backend` and `PoolCalls`, that
            // handles are live, that work is in bounds, and that nothing uses memory that a call removes. The
            // caller of a launch also guarantees the number and widths of its arguments.
            $this.$place($($at,)? &mut || unsafe { $this.api.$function($($value),*) })?;
            Ok($result)
        }
    )*};
}

pub(super) use methods;

#[cfg(test)]
mod tests {
    use super::*;

    const fn absent(since: i32) -> Function {
        Function::new(Call::MemCreate, &["egmem_no_such"], CudaVersion(since))
    }

    fn this_process() -> Library {
        Library {
            // SAFETY: no path: the program itself.
            handle: unsafe { libc::dlopen(ptr::null(), libc::RTLD_LAZY) },
            name: "libtest.so",
        }
    }

    #[test]
    fn a_function_newer_than_the_driver_says_which_driver_has_it() {
        let error = absent(13000)
            .address(&this_process(), Some(CudaVersion(12020)))
            .unwrap_err();
        assert_eq!(
            error,
            Error::DriverTooOld {
                what: "cuMemCreate",
                have: CudaVersion(12020),
                need: CudaVersion(13000),
            }
        );
    }

    #[test]
    fn a_function_that_the_driver_should_have_is_a_missing_symbol() {
        for have in [None, Some(CudaVersion(13000)), Some(CudaVersion(99990))] {
            let error = absent(13000).address(&this_process(), have).unwrap_err();
            assert_eq!(
                error,
                Error::MissingSymbol {
                    symbol: "egmem_no_such",
                    library: "libtest.so",
                }
            );
        }
    }

    #[test]
    fn the_first_symbol_present_is_called() {
        type Abs = unsafe extern "C" fn(i32) -> i32;
        let names = &["egmem_no_such", "abs"];
        let function = Function::new(Call::MemCreate, names, CudaVersion(0));
        for _ in 0..2 {
            let abs = function.address(&this_process(), None).unwrap();
            // SAFETY: `abs` of the C library has this type, and takes any integer but the least; the other name does not exist.
            let seven = unsafe { std::mem::transmute::<*mut c_void, Abs>(abs)(-7) };
            assert_eq!(seven, 7);
        }
    }

    #[test]
    fn the_loader_is_quoted() {
        let words = Library::open(Path::new("libegmem-no-such.so.9"), "x").unwrap_err();
        assert!(words.contains("libegmem-no-such.so.9"), "{words}");
    }
}
