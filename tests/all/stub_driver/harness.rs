//! Builds stubs, runs a test in a child process on them, and talks to the stub from there.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::Library;

const CHILD: &str = "EGMEM_STUB_CHILD";

/// The libraries and the environment of a test.
pub struct Installed {
    files: Vec<(String, Content)>,
    env: Vec<(&'static str, String)>,
}

enum Content {
    Bytes(&'static [u8]),
    Source(&'static str, Vec<String>),
    #[cfg(feature = "portable")]
    Link(&'static str),
}

/// No library at all.
pub fn nothing() -> Installed {
    Installed {
        files: Vec::new(),
        env: Vec::new(),
    }
}

/// The stub libcuda.
pub fn cuda() -> Installed {
    nothing().stub("libcuda.so.1", "cuda.c")
}

/// The stub libcuda, also under the name that cudarc looks for first.
#[cfg(feature = "portable")]
pub fn cuda_for_cudarc() -> Installed {
    let mut installed = cuda();
    let link = Content::Link("libcuda.so.1");
    installed.files.push(("libcuda.so".into(), link));
    installed
}

impl Installed {
    /// The stub made from `source`, as `name`.
    pub fn stub(mut self, name: &str, source: &'static str) -> Self {
        let content = Content::Source(source, Vec::new());
        self.files.push((name.into(), content));
        self
    }

    /// A file that is no library.
    pub fn garbage(mut self, name: &str) -> Self {
        self.files
            .push((name.into(), Content::Bytes(&[b'x'; 4096])));
        self
    }

    /// The last stub without the function `symbol`.
    pub fn without(mut self, symbol: &str) -> Self {
        if let Some((_, Content::Source(_, flags))) = self.files.last_mut() {
            flags.push(format!("-D{symbol}=absent_{symbol}"));
        }
        self
    }

    /// One of the stub's settings (`STUB_…`), or another environment variable, in whose value
    /// `@FOLDER@` stands for where the libraries lie.
    pub fn set(mut self, name: &'static str, value: impl ToString) -> Self {
        self.env.push((name, value.to_string()));
        self
    }

    /// Writes the libraries to `folder`; `false` if there is no C compiler.
    pub fn install(&self, folder: &Path) -> bool {
        self.files.iter().all(|(name, content)| {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let library = match content {
                Content::Bytes(bytes) => Some(bytes.to_vec()),
                Content::Source(source, flags) => build(source, flags),
                #[cfg(feature = "portable")]
                Content::Link(target) => {
                    std::os::unix::fs::symlink(target, path).unwrap();
                    return true;
                }
            };
            library.is_some_and(|library| fs::write(path, library).map(|()| true).unwrap())
        })
    }
}

impl Installed {
    /// Lets a program find the libraries installed in `folder`.
    pub fn show(&self, folder: &Path, command: &mut Command) {
        let mut paths = vec![folder.to_path_buf()];
        if let Some(path) = env::var_os("LD_LIBRARY_PATH") {
            paths.extend(env::split_paths(&path));
        }
        command
            .env("LD_LIBRARY_PATH", env::join_paths(paths).unwrap())
            .env_remove("CUDA_HOME")
            .env_remove("CUDA_PATH")
            .envs(
                (self.env.iter()).map(|(name, value)| {
                    (name, value.replace("@FOLDER@", &folder.to_string_lossy()))
                }),
            );
    }
}

/// Where the stubs' sources lie: beside the test data, where that was carried elsewhere.
fn sources() -> PathBuf {
    match env::var_os("EGMEM_TEST_DATA") {
        Some(data) => Path::new(&data).with_file_name("stubs"),
        None => egmem_tests::root().join("tests/stubs"),
    }
}

/// The library made from `source` with compiler `flags`, built once; `None` without a compiler.
fn build(source: &'static str, flags: &[String]) -> Option<Vec<u8>> {
    type Built = BTreeMap<(&'static str, Vec<String>), Vec<u8>>;
    static BUILT: Mutex<Built> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (source, flags.to_vec());
    if let Some(library) = built.get(&key) {
        return Some(library.clone());
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stub.so");
    let compiler = env::var("EGMEM_TEST_CC").unwrap_or_else(|_| "cc".into());
    let output = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"])
        .args(flags)
        .arg("-o")
        .arg(&path)
        .arg(sources().join(source))
        .args(["-ldl", "-lpthread"])
        .output();
    let output = match output {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        output => output.unwrap(),
    };
    assert!(
        output.status.success(),
        "{compiler}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let library = fs::read(path).unwrap();
    built.insert(key, library.clone());
    Some(library)
}

/// Runs `body` in a child process of the test called `test`, with `installed` in its library path.
pub fn in_child(test: &str, installed: Installed, body: impl FnOnce()) {
    if env::var_os(CHILD).is_some() {
        return body();
    }
    let folder = tempfile::tempdir().unwrap();
    if !installed.install(folder.path()) {
        eprintln!("SKIPPED {test}: there is no C compiler");
        return;
    }
    let test = test.split_once("::").map_or(test, |(_crate, path)| path);
    let mut command = egmem_tests::command(egmem_tests::this_program());
    command
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1");
    installed.show(folder.path(), &mut command);
    let output = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "the child of {test}: {}\n{stdout}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Whether the loader finds a library of this name.
pub fn loadable(name: &str) -> bool {
    // SAFETY: CUDA's libraries or stubs of ours, made to be loaded at run time; never closed.
    unsafe { Library::new(name) }.map(std::mem::forget).is_ok()
}

/// `stubbed! { fn name(installed) { body } }`: a test whose body runs in a child process.
macro_rules! stubbed {
    ($(fn $name:ident($installed:expr) $body:block)*) => {$(
        #[test]
        fn $name() {
            let path = concat!(module_path!(), "::", stringify!($name));
            $crate::stub_driver::harness::in_child(path, $installed, || $body);
        }
    )*};
}
pub(crate) use stubbed;

/// A stub library, in the child.
pub struct Stub(Library);

impl Stub {
    pub fn open(name: &str) -> Self {
        // SAFETY: a stub of ours, which has no initialisers.
        Self(unsafe { Library::new(name) }.unwrap())
    }

    fn function<T: Copy>(&self, name: &str) -> T {
        // SAFETY: each caller below names a stub's function with its type.
        *unsafe { self.0.get::<T>(name) }.unwrap()
    }

    /// The calls since the last time, one a line; asking the driver about contexts is left out.
    pub fn calls(&self) -> Vec<String> {
        /// Asked before calls that need a context.
        const ASKED: [&str; 3] = [
            "cuCtxGetCurrent",
            "cuCtxGetId",
            "cuDevicePrimaryCtxGetState",
        ];
        let log = self.function::<unsafe extern "C" fn() -> *const c_char>("stub_log");
        // SAFETY: the stub's log is NUL-terminated and no other thread calls now.
        let text = unsafe { CStr::from_ptr(log()) }.to_str().unwrap();
        let calls = text
            .lines()
            .filter(|line| !ASKED.iter().any(|call| line.starts_with(call)))
            .map(|line| line.trim_end().to_owned())
            .collect();
        // SAFETY: the stub's function takes nothing.
        unsafe { self.function::<unsafe extern "C" fn()>("stub_clear")() };
        calls
    }

    /// From now on the call fails.
    pub fn fail(&self, call: &str, code: i32) {
        let fail = self.function::<unsafe extern "C" fn(*const c_char, c_int)>("stub_fail");
        let call = CString::new(call).unwrap();
        // SAFETY: the stub copies the name.
        unsafe { fail(call.as_ptr(), code) };
    }

    /// Sets the fd that the stub gives out as a DMA-BUF.
    pub fn give_fd(&self, fd: OwnedFd) {
        // SAFETY: the stub's function takes an integer.
        unsafe { self.function::<unsafe extern "C" fn(c_int)>("stub_give_fd")(fd.into_raw_fd()) };
    }

    /// How often the primary context of a device was retained, and how often released.
    pub fn retained_released(&self, device: i32) -> (i32, i32) {
        type Count = unsafe extern "C" fn(c_int) -> c_int;
        // SAFETY: the stub has two devices, and the tests ask for no other.
        unsafe {
            (
                self.function::<Count>("stub_retained")(device),
                self.function::<Count>("stub_released")(device),
            )
        }
    }

    /// Destroys the primary context of a device, as a program's own code would.
    pub fn reset(&self, device: i32) {
        // SAFETY: the stub has two devices, and the tests name no other.
        unsafe { self.function::<unsafe extern "C" fn(c_int)>("stub_reset")(device) };
    }

    /// Makes the primary context of a device anew, at the same address.
    pub fn make_anew(&self, device: i32) {
        // SAFETY: as above.
        unsafe { self.function::<unsafe extern "C" fn(c_int)>("stub_make_anew")(device) };
    }

    /// This thread's current context and how many lie below it.
    pub fn context(&self) -> (usize, i32) {
        let mut context: *mut c_void = std::ptr::null_mut();
        type Get = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
        // SAFETY: the stub writes one pointer.
        unsafe { self.function::<Get>("cuCtxGetCurrent")(&mut context) };
        // SAFETY: the stub's function takes nothing.
        let depth = unsafe { self.function::<unsafe extern "C" fn() -> c_int>("stub_depth")() };
        (context as usize, depth)
    }

    /// The primary context of a device, as a program's own code would retain it.
    pub fn primary(&self, device: i32) -> usize {
        let mut context: *mut c_void = std::ptr::null_mut();
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
        // SAFETY: the stub writes one pointer.
        let code =
            unsafe { self.function::<Retain>("cuDevicePrimaryCtxRetain")(&mut context, device) };
        assert_eq!(code, 0);
        context as usize
    }

    /// Makes a context that is not this crate's current.
    pub fn push(&self, context: usize) {
        type Push = unsafe extern "C" fn(*mut c_void) -> c_int;
        // SAFETY: the stub follows a context only in calls that the tests make in its own ones.
        unsafe { self.function::<Push>("cuCtxPushCurrent_v2")(context as *mut c_void) };
    }
}
