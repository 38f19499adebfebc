//! The pools of the Unified Memory Framework, from the library that `EGMEM_UMF_LIB` names: over its
//! provider of fixed memory, so that they manage a range like the others.

use std::alloc::Layout;
use std::ffi::{c_int, c_void};
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use super::Shared;
use super::range::Range;

/// Names libumf.so.
const LIBRARY: &str = "EGMEM_UMF_LIB";

/// Which pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// Slabs of one size each, as it is.
    Disjoint,
    /// The same with the settings of the framework's own benchmarks.
    DisjointSmall,
    /// jemalloc, where the library was built with it.
    Jemalloc,
}

type Result = c_int;
type Handle = *mut c_void;
type Ops = unsafe extern "C" fn() -> *const c_void;
type Make = unsafe extern "C" fn(*mut Handle) -> Result;
type Set = unsafe extern "C" fn(Handle, usize) -> Result;
type End = unsafe extern "C" fn(Handle) -> Result;

/// `UMF_POOL_CREATE_FLAG_OWN_PROVIDER`.
const OWN_PROVIDER: u32 = 1;

/// The framework's functions, by their names.
struct Functions {
    provider_create: unsafe extern "C" fn(*const c_void, Handle, *mut Handle) -> Result,
    provider_destroy: End,
    fixed_ops: Ops,
    fixed_params: unsafe extern "C" fn(*mut c_void, usize, *mut Handle) -> Result,
    fixed_params_end: End,
    pool_create: unsafe extern "C" fn(*const c_void, Handle, Handle, u32, *mut Handle) -> Result,
    pool_destroy: End,
    malloc: unsafe extern "C" fn(Handle, usize) -> *mut c_void,
    aligned: unsafe extern "C" fn(Handle, usize, usize) -> *mut c_void,
    free: unsafe extern "C" fn(Handle, *mut c_void) -> Result,
    disjoint_ops: Ops,
    disjoint_params: Make,
    disjoint_params_end: End,
    set_slab: Set,
    set_capacity: Set,
    set_bucket: Set,
    set_largest: Set,
    jemalloc_ops: Ops,
}

impl Functions {
    /// Looks all of them up; the library stays loaded.
    fn load(path: &std::ffi::OsStr) -> std::result::Result<Self, libloading::Error> {
        // SAFETY: the user's variable names the framework's library, which has no initialisers that
        // depend on this program.
        let library = Box::leak(Box::new(unsafe { libloading::Library::new(path) }?));
        macro_rules! find {
            ($name:literal) => {
                // SAFETY: the field has the function's C type, in UMF 1.0 to 1.2.
                *unsafe { library.get($name) }?
            };
        }
        Ok(Self {
            provider_create: find!(b"umfMemoryProviderCreate\0"),
            provider_destroy: find!(b"umfMemoryProviderDestroy\0"),
            fixed_ops: find!(b"umfFixedMemoryProviderOps\0"),
            fixed_params: find!(b"umfFixedMemoryProviderParamsCreate\0"),
            fixed_params_end: find!(b"umfFixedMemoryProviderParamsDestroy\0"),
            pool_create: find!(b"umfPoolCreate\0"),
            pool_destroy: find!(b"umfPoolDestroy\0"),
            malloc: find!(b"umfPoolMalloc\0"),
            aligned: find!(b"umfPoolAlignedMalloc\0"),
            free: find!(b"umfPoolFree\0"),
            disjoint_ops: find!(b"umfDisjointPoolOps\0"),
            disjoint_params: find!(b"umfDisjointPoolParamsCreate\0"),
            disjoint_params_end: find!(b"umfDisjointPoolParamsDestroy\0"),
            set_slab: find!(b"umfDisjointPoolParamsSetSlabMinSize\0"),
            set_capacity: find!(b"umfDisjointPoolParamsSetCapacity\0"),
            set_bucket: find!(b"umfDisjointPoolParamsSetMinBucketSize\0"),
            set_largest: find!(b"umfDisjointPoolParamsSetMaxPoolableSize\0"),
            jemalloc_ops: find!(b"umfJemallocPoolOps\0"),
        })
    }

    /// The library's, if there is one.
    fn get() -> Option<&'static Self> {
        static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
        let find = || {
            let path = std::env::var_os(LIBRARY)?;
            Self::load(&path)
                .map_err(|error| eprintln!("without UMF: {}: {error}", path.display()))
                .ok()
        };
        FUNCTIONS.get_or_init(find).as_ref()
    }

    /// A pool's operations; jemalloc's are null in a library without it.
    fn ops(&self, pool: Pool) -> *const c_void {
        let ops = match pool {
            Pool::Disjoint | Pool::DisjointSmall => self.disjoint_ops,
            Pool::Jemalloc => self.jemalloc_ops,
        };
        // SAFETY: it takes nothing and gives a static table.
        unsafe { ops() }
    }

    /// A pool's settings; null for its defaults.
    fn params(&self, pool: Pool) -> io::Result<Handle> {
        let mut params = ptr::null_mut();
        if pool == Pool::Jemalloc {
            return Ok(params);
        }
        // SAFETY: a place for the handle.
        check("disjoint pool's settings", unsafe {
            (self.disjoint_params)(&mut params)
        })?;
        if pool == Pool::DisjointSmall {
            // Source: benchmark_umf.hpp of UMF 1.2.
            let settings = [
                (self.set_slab, 4096),
                (self.set_capacity, 4),
                (self.set_bucket, 8),
                (self.set_largest, 64 << 10),
            ];
            for (set, to) in settings {
                // SAFETY: the handle was just made.
                check("a setting", unsafe { set(params, to) })?;
            }
        }
        Ok(params)
    }
}

fn check(what: &str, result: Result) -> io::Result<()> {
    match result {
        0 => Ok(()),
        code => Err(io::Error::other(format!("UMF: {what}: result {code}"))),
    }
}

/// A pool over a range.
pub struct Umf {
    functions: &'static Functions,
    kind: Pool,
    pool: Handle,
    // Unmapped after the pool is gone.
    range: ManuallyDrop<Range>,
}

// SAFETY: pools are for all threads.
unsafe impl Send for Umf {}
// SAFETY: likewise.
unsafe impl Sync for Umf {}

/// An address.
pub struct Block(NonNull<c_void>);

// SAFETY: an address; a pool's blocks may be freed by any thread.
unsafe impl Send for Block {}

/// A block with at most this alignment is requested without one, as in the framework's own benchmarks. (With their
/// settings the disjoint pool aligns to 8; these blocks are not written.)
const NATURAL: usize = 16;

impl Umf {
    /// Whether the library is there and has this pool.
    pub fn has(pool: Pool) -> bool {
        Functions::get().is_some_and(|functions| !functions.ops(pool).is_null())
    }

    /// Over `capacity` bytes.
    ///
    /// # Errors
    /// Unsupported without the library; the kernel's; the framework's.
    pub fn new(pool: Pool, capacity: u64) -> io::Result<Self> {
        let functions =
            Functions::get().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
        let range = Range::map(capacity)?;
        let (mut fixed, mut provider) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the range is this pool's alone and outlives it.
        check("fixed memory", unsafe {
            (functions.fixed_params)(range.base().as_ptr().cast(), range.len(), &mut fixed)
        })?;
        // SAFETY: the operations that these parameters are for; the provider copies them.
        let made =
            unsafe { (functions.provider_create)((functions.fixed_ops)(), fixed, &mut provider) };
        // SAFETY: made above and used no more.
        unsafe { (functions.fixed_params_end)(fixed) };
        check("provider", made)?;
        let params = functions.params(pool)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the operations that these parameters are for; the pool takes the provider over
        // and copies the parameters.
        let made = unsafe {
            let ops = functions.ops(pool);
            (functions.pool_create)(ops, provider, params, OWN_PROVIDER, &mut handle)
        };
        if !params.is_null() {
            // SAFETY: made above and used no more.
            unsafe { (functions.disjoint_params_end)(params) };
        }
        if made != 0 {
            // SAFETY: no pool took it.
            unsafe { (functions.provider_destroy)(provider) };
        }
        check("pool", made)?;
        Ok(Self {
            functions,
            kind: pool,
            pool: handle,
            range: ManuallyDrop::new(range),
        })
    }
}

impl Shared for Umf {
    type Block = Block;

    #[inline]
    fn allocate(&self, layout: Layout) -> Option<Block> {
        let ptr = if layout.align() <= NATURAL {
            // SAFETY: the pool lives.
            unsafe { (self.functions.malloc)(self.pool, layout.size()) }
        } else {
            // SAFETY: the pool lives, the alignment is a power of two.
            unsafe { (self.functions.aligned)(self.pool, layout.size(), layout.align()) }
        };
        NonNull::new(ptr).map(Block)
    }

    #[inline]
    unsafe fn free(&self, block: Block, _layout: Layout) {
        // SAFETY: from this pool, as the caller promises; not yet freed.
        unsafe { (self.functions.free)(self.pool, block.0.as_ptr()) };
    }

    #[inline]
    fn start(&self, block: &Block) -> u64 {
        block.0.addr().get() as u64
    }
}

impl Drop for Umf {
    fn drop(&mut self) {
        // With blocks freed by other threads than allocated them, jemalloc 5.3 crashes in the end of such
        // a pool. It stays, with its addresses.
        if self.kind == Pool::Jemalloc {
            return;
        }
        // SAFETY: made by `new`; the pool is no longer used, and the range is unmapped after it.
        unsafe {
            (self.functions.pool_destroy)(self.pool);
            ManuallyDrop::drop(&mut self.range);
        }
    }
}
