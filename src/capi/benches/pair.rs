//! The cost of a call through C: pairs of allocate and free by the crate `egmem`, by this crate's functions linked
//! into the program, and by those of the shared library, which is loaded as a C program's would be. They take turns
//! in one process, on the simulator, since no pair calls the driver. Prints medians over the rounds, and the median
//! of the rounds' differences.

use std::alloc::Layout;
use std::ffi::{CString, c_char, c_void};
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::time::Instant;

use egmem::driver::NodeId;
use egmem::{Driver, Heap, Machine};
use egmem_capi::*;

const ROUNDS: usize = 1001;
// So short that few rounds are interrupted.
const PAIRS: u32 = 5_000;

type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;
type Simulated = unsafe extern "C" fn(*const c_char, Out<*mut egm_driver>) -> egm_status;
type Create = unsafe extern "C" fn(
    Option<&egm_driver>,
    *const egm_heap_options,
    Out<*mut egm_heap>,
) -> egm_status;
type Alloc = unsafe extern "C" fn(Option<&egm_heap>, usize, usize, Out<*mut c_void>) -> egm_status;
type Free = unsafe extern "C" fn(Option<&egm_heap>, *mut c_void) -> egm_status;

/// One way through C.
struct Through {
    heap: &'static egm_heap,
    alloc: Alloc,
    free: Free,
}

impl Through {
    fn new(simulated: Simulated, create: Create, alloc: Alloc, free: Free) -> Self {
        let (mut driver, mut heap) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: numbers and null pointers; the size is set below.
        let mut options: egm_heap_options = unsafe { std::mem::zeroed() };
        options.struct_size = size_of::<egm_heap_options>();
        options.location.kind = EGM_LOCATION_HOST_NUMA;
        options.limit = 1 << 30;
        let machine = CString::new("gh200").unwrap();
        // SAFETY: valid arguments; what was written is read, and neither is destroyed.
        let heap = unsafe {
            assert_eq!(
                simulated(machine.as_ptr(), Some(&mut driver)),
                egm_status::EGM_OK
            );
            let driver = driver.assume_init().as_ref();
            assert_eq!(
                create(driver, &options, Some(&mut heap)),
                egm_status::EGM_OK
            );
            &*heap.assume_init()
        };
        Self { heap, alloc, free }
    }

    fn pairs(&self, bytes: usize) {
        for _ in 0..PAIRS {
            let (heap, mut block) = (Some(self.heap), MaybeUninit::uninit());
            // SAFETY: the block is freed once, and was written where the first call succeeds.
            unsafe {
                if (self.alloc)(heap, black_box(bytes), 256, Some(&mut block)) != egm_status::EGM_OK
                    || (self.free)(heap, black_box(block.assume_init())) != egm_status::EGM_OK
                {
                    panic!("a pair failed");
                }
            }
        }
    }
}

fn median_ns(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Loads the shared library that was built beside this program.
fn load() -> Through {
    let mut path = std::env::current_exe().expect("a program has a path");
    path.set_file_name("libegmem_capi.so");
    // SAFETY: the library has no initialisers that depend on the program.
    let library = unsafe { libloading::Library::new(&path) }.expect("the library lies beside");
    let library = Box::leak(Box::new(library));
    // SAFETY: the header's types.
    unsafe {
        Through::new(
            *library.get::<Simulated>(b"egm_driver_simulated").unwrap(),
            *library.get::<Create>(b"egm_heap_create").unwrap(),
            *library.get::<Alloc>(b"egm_heap_alloc").unwrap(),
            *library.get::<Free>(b"egm_heap_free").unwrap(),
        )
    }
}

fn main() {
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let driver = Driver::simulated(Machine::gh200()).expect("a simulated machine");
    let heap = Heap::on(NodeId(0))
        .limit(1 << 30)
        .build(&driver)
        .expect("a heap");
    let linked = Through::new(
        egm_driver_simulated,
        egm_heap_create,
        egm_heap_alloc,
        egm_heap_free,
    );
    let loaded = load();
    println!("pairs of allocate and free, ns; median of {ROUNDS} rounds of {PAIRS}");
    println!(
        "{:>10} {:>8} {:>8} {:>8} {:>12}",
        "bytes", "Rust", "linked", "library", "library-Rust"
    );
    for bytes in [64, 1024, 64 << 10, 1 << 20] {
        let layout = Layout::from_size_align(bytes, 256).expect("a layout");
        let mut times = [const { Vec::new() }; 3];
        for round in 0..ROUNDS {
            for turn in 0..3 {
                let way = (round + turn) % 3;
                let begun = Instant::now();
                match way {
                    0 => (0..PAIRS).for_each(|_| {
                        drop(black_box(
                            heap.allocate(black_box(layout)).expect("a block"),
                        ));
                    }),
                    1 => linked.pairs(bytes),
                    _ => loaded.pairs(bytes),
                }
                times[way].push(begun.elapsed().as_nanos() as f64 / f64::from(PAIRS));
            }
        }
        let differences = times[2]
            .iter()
            .zip(&times[0])
            .map(|(library, rust)| library - rust);
        let difference = median_ns(differences.collect());
        let [rust, linked, library] = times.map(median_ns);
        println!("{bytes:>10} {rust:>8.1} {linked:>8.1} {library:>8.1} {difference:>12.1}");
    }
}
