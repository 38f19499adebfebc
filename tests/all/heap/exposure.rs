//! No safe code writes to the bytes of a collection from elsewhere.
#![forbid(unsafe_code)]

use allocator_api2::vec::Vec as HeapVec;
use egmem::driver::{Call, Code};
use egmem::{Error, Stream};

use super::*;

#[cfg(feature = "portable")]
mod shared {
    use std::sync::Arc;

    use allocator_api2::boxed::Box as HeapBox;
    use egmem::driver::{Access, HandleType, HandleTypes};
    use egmem::share::{ImportOptions, ImportedBuffer};

    use super::*;

    /// A block of the heap as an importer has it; the owner's block is freed.
    fn left_with_an_importer(driver: &Driver, heap: &Heap) -> ImportedBuffer {
        let block = Arc::new(heap.allocate(layout(64 << 10)).unwrap());
        let shared = Arc::clone(&block).share_arc().unwrap();
        let description = shared.describe(Access::ReadWrite).unwrap();
        let handles = shared.export(HandleType::PosixFd).unwrap();
        drop((block, shared));
        let options = ImportOptions::new();
        options.import(driver, &description, handles).unwrap()
    }

    #[test]
    fn an_importer_cannot_write_to_a_collection() {
        let driver = simulated();
        for options in [
            on(&driver).shareable(),
            on(&driver).handle_types(HandleTypes::POSIX_FD),
        ] {
            let heap = options.build(&driver).unwrap();
            let imported = left_with_an_importer(&driver, &heap);
            let mut boxes: HeapVec<HeapBox<u64, &Heap>, &Heap> = HeapVec::new_in(&heap);
            let refused = boxes.try_reserve_exact(8 << 10).is_err();
            if !refused {
                // This would do harm: the importer would choose the vector's pointers.
                boxes.extend((0..100).map(|n| HeapBox::new_in(n, &heap)));
                imported.fill(0x41).unwrap();
            }
            assert!(refused, "a collection lies where an importer can write");
            assert!(HeapBox::try_new_in(1_u8, &heap).is_err());
            assert!(HeapBox::try_new_in((), &heap).is_ok(), "it has no bytes");
            let error = heap.check_collections().unwrap_err();
            let told = matches!(&error, Error::InvalidArgument { what: "heap", why, .. } if why.contains("shareable"));
            assert!(told, "{error}");
            assert_eq!(heap.stats().live_blocks, 0);
            imported.fill(0x41).unwrap();
        }
    }

    #[test]
    fn a_heap_of_collections_exports_nothing() {
        let driver = simulated();
        let heap = on(&driver).build(&driver).unwrap();
        heap.check_collections().unwrap();
        let mut boxes = HeapVec::new_in(&heap);
        boxes.extend((0..100_u64).map(|n| HeapBox::new_in(n, &heap)));
        let refused = heap.allocate(layout(64 << 10)).unwrap().share();
        assert!(matches!(
            refused,
            Err(Error::InvalidArgument { what: "block", .. })
        ));
        assert!(boxes.iter().zip(0..).all(|(boxed, n)| **boxed == n));
    }
}

/// A GPU's write that is still pending when the call fails would reach the next user of the bytes.
#[test]
fn no_gpu_writes_to_a_collection_after_a_refused_wait() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let block = heap.allocate(layout(64 << 10)).unwrap();
    let sim = driver.sim().unwrap();
    for nth in 1..4 {
        sim.fail(Call::StreamSynchronize, nth, Code::OUT_OF_MEMORY);
    }
    let refused = stream.fill(&block, 0, 64 << 10, 0x41).unwrap_err();
    assert_eq!(refused.code(), Some(Code::OUT_OF_MEMORY));
    let at = block.device_ptr().0;
    drop(block);
    let mut bytes = HeapVec::new_in(&heap);
    bytes.resize(64 << 10, 0_u8);
    assert_eq!(bytes.as_ptr().addr() as u64, at, "this tests nothing");
    while stream.synchronize().is_err() {} // refusals that are left
    assert!(
        bytes.iter().all(|&byte| byte == 0),
        "a GPU wrote to a vector"
    );
}
