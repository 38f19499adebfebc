//! The caller's current CUDA context stays as it was.

use egmem::driver::StreamHandle;
use egmem_trace::{Runner, Shape, generate};

use crate::conformance::harness::Ctx;
use crate::conformance::pools::current_pools;
use crate::conformance::raw::Pools;

type GetCurrent = unsafe extern "C" fn(*mut usize) -> i32;
type SetCurrent = unsafe extern "C" fn(usize) -> i32;
type Retain = unsafe extern "C" fn(*mut usize, i32) -> i32;

/// Random calls of all kinds, with no context current and with a device's primary context: after
/// each the same context is current as before. On CUDA only.
pub fn no_call_changes_the_current_context(ctx: &Ctx) {
    if ctx.simulated() {
        return println!("skipped: about CUDA");
    }
    // The calls change them.
    let _alone = current_pools();
    // SAFETY: the library is loaded already, so no initialiser runs that has not run; it stays
    // loaded, as the driver holds it.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }.unwrap();
    // SAFETY: the signatures are those of CUDA's headers, with contexts as numbers.
    let (get, set, retain) = unsafe {
        let get = library.get::<GetCurrent>(b"cuCtxGetCurrent\0").unwrap();
        let set = library.get::<SetCurrent>(b"cuCtxSetCurrent\0").unwrap();
        let retain = library
            .get::<Retain>(b"cuDevicePrimaryCtxRetain\0")
            .unwrap();
        (*get, *set, *retain)
    };
    let current = || {
        let mut context = 0;
        // SAFETY: `context` is a live pointer-sized number.
        assert_eq!(unsafe { get(&mut context) }, 0);
        context
    };
    let mut primary = 0;
    // SAFETY: as above. It is kept for the rest of the process.
    assert_eq!(unsafe { retain(&mut primary, 0) }, 0);
    std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            for context in [0, primary] {
                // SAFETY: null or a context that is retained.
                assert_eq!(unsafe { set(context) }, 0);
                let mut runner = Runner::new(ctx);
                for seed in 5000..5006 {
                    let shape = Shape {
                        len: 64,
                        devices: ctx.expect.gpus,
                    };
                    let sequence = generate(seed, &shape);
                    runner.run(&sequence, |op| {
                        let last = op.checked_sub(1).map(|op| &sequence.ops[op]);
                        assert_eq!(current(), context, "after {last:?}");
                    });
                    assert_eq!(current(), context, "after {:?}", sequence.ops.last());
                }
                // The runtime API keeps its own idea of the current device.
                if let Ok(calls) = ctx.driver.runtime_pools().map(Pools) {
                    let stream = StreamHandle {
                        device: ctx.expect.gpus - 1,
                        raw: 0,
                    };
                    let ptr = calls.alloc_async(4096, stream).unwrap();
                    assert_eq!(current(), context);
                    ctx.pool_free(calls, ptr, stream).unwrap();
                    assert_eq!(current(), context);
                }
                drop(runner);
                assert_eq!(current(), context);
            }
        });
        work.join().unwrap();
    });
}
