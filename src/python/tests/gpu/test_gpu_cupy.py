"""egmem.cupy on a GPU."""

import gc
import unittest

from support import GpuTest, needs

import egmem


@needs("cupy")
class Pools(GpuTest):
    def test_arrays_are_in_the_heap(self):
        import cupy

        import egmem.cupy

        heap = egmem.Heap(near_gpu=self.gpu, driver=egmem.open())
        pool = egmem.cupy.memory_pool(heap=heap)
        with cupy.cuda.using_allocator(pool.malloc):
            array = cupy.arange(1 << 20, dtype="f4")
            self.assertGreaterEqual(heap.stats()["used"], 4 << 20)
            self.assertAlmostEqual(float(array.mean()), ((1 << 20) - 1) / 2, delta=1)
        self.assertEqual(array.data.ptr % 512, 0)
        del array
        gc.collect()
        cupy.cuda.Device().synchronize()
        pool.free_all_blocks()
        self.assertEqual(heap.stats()["live_blocks"], 0)

    def test_an_array_outlives_its_pool(self):
        import cupy

        import egmem.cupy

        heap = egmem.Heap(near_gpu=self.gpu, driver=egmem.open())
        pool = egmem.cupy.memory_pool(heap=heap)
        with cupy.cuda.using_allocator(pool.malloc):
            array, freed = cupy.ones(1 << 20, dtype="f4"), cupy.ones(1 << 20, dtype="f4")
        del freed
        pool.free_all_blocks()  # CuPy 14.2 keeps what a pool caches also when the pool is gone
        self.assertEqual(heap.stats()["live_blocks"], 1)
        del pool
        gc.collect()
        self.assertEqual(float(array.sum()), 1 << 20)
        del array
        gc.collect()
        cupy.cuda.Device().synchronize()
        self.assertEqual(heap.stats()["live_blocks"], 0)

    def test_no_room_is_cupy_own_error(self):
        import cupy

        import egmem.cupy

        pool = egmem.cupy.memory_pool(heap=egmem.Heap(near_gpu=self.gpu, limit=32 << 20, driver=egmem.open()))
        with cupy.cuda.using_allocator(pool.malloc):
            with self.assertRaises(cupy.cuda.memory.OutOfMemoryError):
                cupy.empty(64 << 20, dtype="u1")

    def test_pinned_memory(self):
        import cupy
        import numpy

        import egmem.cupy

        heap = egmem.Heap(near_gpu=self.gpu, driver=egmem.open())
        cupy.cuda.set_pinned_memory_allocator(egmem.cupy.pinned_allocator(heap=heap))
        try:
            source = cupy.cuda.alloc_pinned_memory(1000 * 4)
            array = numpy.frombuffer(source, "f4", 1000)
            array[...] = numpy.arange(1000)
            gpu = cupy.empty(1000, "f4")
            gpu.set(array)
            self.assertTrue(bool((gpu.get() == array).all()))
            self.assertGreaterEqual(heap.stats()["live_blocks"], 1)
        finally:
            cupy.cuda.set_pinned_memory_allocator(cupy.cuda.PinnedMemoryPool().malloc)

    def test_asarray_copies_nothing(self):
        import egmem.cupy

        buffer = egmem.Buffer(1 << 20, near_gpu=self.gpu, driver=egmem.open())
        array = egmem.cupy.asarray(buffer, "float32", (1 << 18,))
        self.assertEqual(array.data.ptr, buffer.address)

    def test_memory_that_ends_meanwhile_disturbs_no_capture(self):
        """The driver reports captures of blocking streams; the program reports others."""
        for non_blocking in (False, True):
            self.child(
                f"""
import contextlib, cupy, egmem, egmem.cupy
cupy.cuda.Device(GPU).use()
pool = egmem.cupy.memory_pool(0)
with cupy.cuda.using_allocator(pool.malloc):
    array = cupy.ones(1 << 20)
source = cupy.ones(1 << 20)
kept = [memoryview(egmem.Buffer(1 << 20, near_gpu=GPU))]
stream = cupy.cuda.Stream(non_blocking={non_blocking})
with stream:
    result = cupy.empty_like(source)
    cupy.multiply(source, 2, out=result)
stream.synchronize()
with egmem.defer_frees() if {non_blocking} else contextlib.nullcontext(), stream:
    stream.begin_capture()
    cupy.multiply(source, 3, out=result)
    kept.clear()
    assert egmem.deferred()[0] == 1, egmem.deferred()
    graph = stream.end_capture()
del array
pool.free_all_blocks()
assert egmem.free_deferred() == 0
graph.launch(stream)
stream.synchronize()
assert float(result[0]) == 3.0
"""
            )

    def test_an_exit_with_live_arrays_is_clean(self):
        self.child(
            """
import cupy, egmem, egmem.cupy
cupy.cuda.Device(GPU).use()
pool = egmem.cupy.memory_pool(0)
cupy.cuda.set_allocator(pool.malloc)
kept = cupy.arange(1 << 20)
"""
        )


if __name__ == "__main__":
    unittest.main(verbosity=2)
