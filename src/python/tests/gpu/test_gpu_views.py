"""Views of memory on a GPU: DLPack, the array interfaces, and how long the memory lives."""

import gc
import unittest

from support import child, needs

import egmem


@needs("torch", "numpy")
class Torch(unittest.TestCase):
    def setUp(self):
        self.driver = egmem.open()

    def test_cpu_and_gpu_share_the_bytes(self):
        import numpy
        import torch

        buffer = egmem.Buffer(4 << 20, gpu=0, driver=self.driver)
        host = torch.from_dlpack(buffer.view("float32", device="cpu"))
        gpu = torch.from_dlpack(buffer.view("float32", device="cuda:0"))
        self.assertEqual(gpu.device, torch.device("cuda:0"))
        self.assertEqual(host.data_ptr(), gpu.data_ptr())
        gpu.fill_(3.0)
        torch.cuda.synchronize()
        self.assertTrue(bool((host == 3.0).all()))
        self.assertEqual(numpy.asarray(buffer).view("f4")[7], 3.0)
        host[:1024] = 1.0
        self.assertEqual(float(gpu.sum()), 1024 + 3.0 * (len(gpu) - 1024))
        self.assertTrue(host.is_pinned())

    def test_the_cuda_array_interface(self):
        import torch

        buffer = egmem.Buffer(1 << 20, gpu=0, driver=self.driver)
        interface = buffer.__cuda_array_interface__
        self.assertEqual((interface["version"], interface["shape"], interface["stream"]), (3, (1 << 20,), None))
        tensor = torch.as_tensor(buffer.on("cuda:0"), device="cuda:0")
        self.assertEqual(tensor.data_ptr(), buffer.address)
        with self.assertRaises(egmem.InUse):
            buffer.close()

    def test_memory_lives_as_long_as_its_views(self):
        import torch

        buffer = egmem.Buffer(8 << 20, gpu=0, driver=self.driver)
        tensor = torch.from_dlpack(buffer.view("int32", device="cuda:0"))
        tensor.fill_(5)
        with self.assertRaises(BufferError):
            buffer.close()
        del buffer
        gc.collect()
        self.assertEqual(int(tensor.sum()), 5 * tensor.numel())

    def test_the_end_waits_for_kernels(self):
        import torch

        for _ in range(20):
            buffer = egmem.Buffer(64 << 20, gpu=0, driver=self.driver)
            tensor = torch.from_dlpack(buffer.view("float32", device="cuda:0"))
            for _ in range(10):
                tensor.add_(1.0)
            del tensor, buffer  # at once: unmapped too early, the GPU would lose its context
        torch.cuda.synchronize()

    def test_a_pool_tells_its_stream(self):
        import torch

        pool = egmem.Pool(gpu=0, driver=self.driver)
        block = pool.allocate(1 << 20, torch.cuda.current_stream())
        self.assertGreaterEqual(block.__cuda_array_interface__["stream"], 1)
        tensor = torch.from_dlpack(pool.allocate(1 << 20).on("cuda:0"))
        tensor.fill_(9)
        self.assertEqual(int(tensor.sum()), 9 << 20)

    def test_a_block_is_freed_after_a_stream(self):
        import torch

        heap = egmem.Heap(gpu=0, limit=64 << 20, driver=self.driver)
        block = heap.allocate(16 << 20)
        tensor = torch.from_dlpack(block.view("float32", device="cuda:0"))
        tensor.fill_(2.0)
        with self.assertRaises(egmem.InUse):
            block.free_after(torch.cuda.current_stream())
        del tensor
        block.free_after(torch.cuda.current_stream())
        self.assertTrue(block.closed)
        heap.collect(wait=True)
        self.assertEqual(heap.stats()["live_blocks"], 0)


@needs("cupy")
class Cupy(unittest.TestCase):
    def test_cupy_takes_the_same_bytes(self):
        import cupy
        import numpy

        buffer = egmem.Buffer(1 << 20, gpu=0, driver=egmem.open())
        by_dlpack = cupy.from_dlpack(buffer.view("int64", device="cuda:0"))
        by_interface = cupy.asarray(buffer.view("int64", device="cuda:0"))
        self.assertEqual(by_dlpack.data.ptr, buffer.address)
        self.assertEqual(by_interface.data.ptr, buffer.address)
        by_dlpack[...] = cupy.arange(len(by_dlpack))
        cupy.cuda.Device().synchronize()
        self.assertEqual(int(numpy.asarray(buffer).view("i8").sum()), len(by_dlpack) * (len(by_dlpack) - 1) // 2)


    def test_default_streams_of_cupy(self):
        import cupy

        driver = egmem.open()
        block = egmem.Heap(gpu=0, driver=driver).allocate(1 << 20)
        stream = cupy.cuda.Stream.null
        if driver.gpu_count > 1:
            with self.assertRaises(egmem.InvalidArgument):
                block.free_after(stream)
            self.assertFalse(block.closed)
        block.free_after(stream, gpu=cupy.cuda.runtime.getDevice())
        self.assertTrue(block.closed)
        block = egmem.Heap(gpu=0, driver=driver).allocate(1 << 20)
        block.free_after(cupy.cuda.Stream(non_blocking=True))
        self.assertTrue(block.closed)

    def end_beside_a_host_function(self, make):
        """Ends an object of `make` beside a Python function in a stream, which needs the GIL: the end waits for it."""
        code = f"""
import cupy, egmem, egmem.cupy
driver = egmem.open()
{make}
called = []
stream = cupy.cuda.Stream(non_blocking=True)
for _ in range(20):
    kept = [make()]
    stream.launch_host_func(called.append, 1)
    kept.clear()
stream.synchronize()
assert len(called) == 20
print("done")
"""
        self.assertIn("done", child(code, timeout=60))

    def test_arrays_end_beside_a_host_function(self):
        self.end_beside_a_host_function(
            "make = lambda: cupy.from_dlpack(egmem.Buffer(1 << 20, gpu=0, driver=driver).on('cuda:0'))"
        )

    def test_views_end_beside_a_host_function(self):
        self.end_beside_a_host_function(
            "def make():\n"
            "    view = egmem.Buffer(1 << 20, gpu=0, driver=driver).on('cuda:0')\n"
            "    view.__cuda_array_interface__\n"
            "    return view"
        )

    def test_capsules_end_beside_a_host_function(self):
        self.end_beside_a_host_function("make = lambda: egmem.Buffer(1 << 20, gpu=0, driver=driver).on('cuda:0').__dlpack__()")

    def test_a_pool_s_memory_ends_beside_a_host_function(self):
        self.end_beside_a_host_function(
            "pool = egmem.cupy.memory_pool(heap=egmem.Heap(gpu=0, driver=driver))\n"
            "def make():\n"
            "    pool.free_all_blocks()\n"
            "    pool.malloc(1 << 20)"
        )


@needs("numba.cuda")
class Numba(unittest.TestCase):
    def test_numba_takes_the_same_bytes(self):
        from numba import cuda

        buffer = egmem.Buffer(1 << 20, gpu=0, driver=egmem.open())
        array = cuda.as_cuda_array(buffer.view("float32", device="cuda:0"))
        self.assertEqual(array.device_ctypes_pointer.value, buffer.address)


@needs("jax")
class Jax(unittest.TestCase):
    def test_jax_takes_the_same_bytes(self):
        code = """
import egmem, jax, jax.numpy as jnp
buffer = egmem.Buffer(1 << 20, gpu=0, driver=egmem.open())
buffer.fill(1)
array = jax.dlpack.from_dlpack(buffer.view("uint8", device="cuda:0"))
assert int(array.sum()) == 1 << 20, array.sum()
print("taken", array.device)
"""
        out = child(code, environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
        self.assertIn("taken", out)


@needs("cuda.core")
class CudaCore(unittest.TestCase):
    def test_cuda_core_takes_the_same_bytes(self):
        try:
            from cuda.core import Device
            from cuda.core.utils import StridedMemoryView
        except ImportError:
            from cuda.core.experimental import Device
            from cuda.core.experimental.utils import StridedMemoryView

        Device(0).set_current()
        buffer = egmem.Buffer(1 << 20, gpu=0, driver=egmem.open())
        for device in ("cuda:0", "cuda_host"):
            make = getattr(StridedMemoryView, "from_dlpack", StridedMemoryView)
            view = make(buffer.on(device), stream_ptr=-1)
            self.assertEqual((view.ptr, view.shape), (buffer.address, (1 << 20,)))


if __name__ == "__main__":
    unittest.main(verbosity=2)
