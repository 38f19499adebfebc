"""Views of memory on a GPU: DLPack, the array interfaces, and how long the memory lives."""

import gc
import unittest

from support import GpuTest, needs

import egmem


@needs("torch", "numpy")
class Torch(GpuTest):
    def setUp(self):
        super().setUp()
        self.driver = egmem.open()

    def test_cpu_and_gpu_share_the_bytes(self):
        import numpy
        import torch

        buffer = egmem.Buffer(4 << 20, near_gpu=self.gpu, driver=self.driver)
        host = torch.from_dlpack(buffer.view("float32", device="cpu"))
        gpu = torch.from_dlpack(buffer.view("float32", device=f"cuda:{self.gpu}"))
        self.assertEqual(gpu.device, torch.device(f"cuda:{self.gpu}"))
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

        buffer = egmem.Buffer(1 << 20, near_gpu=self.gpu, driver=self.driver)
        interface = buffer.__cuda_array_interface__
        self.assertEqual((interface["version"], interface["shape"], interface["stream"]), (3, (1 << 20,), None))
        tensor = torch.as_tensor(buffer.on(f"cuda:{self.gpu}"), device=f"cuda:{self.gpu}")
        self.assertEqual(tensor.data_ptr(), buffer.address)
        with self.assertRaises(egmem.InUse):
            buffer.close()

    def test_memory_lives_as_long_as_its_views(self):
        import torch

        buffer = egmem.Buffer(8 << 20, near_gpu=self.gpu, driver=self.driver)
        tensor = torch.from_dlpack(buffer.view("int32", device=f"cuda:{self.gpu}"))
        tensor.fill_(5)
        with self.assertRaises(BufferError):
            buffer.close()
        del buffer
        gc.collect()
        self.assertEqual(int(tensor.sum()), 5 * tensor.numel())

    def test_the_end_waits_for_kernels(self):
        import torch

        for _ in range(20):
            buffer = egmem.Buffer(64 << 20, near_gpu=self.gpu, driver=self.driver)
            tensor = torch.from_dlpack(buffer.view("float32", device=f"cuda:{self.gpu}"))
            for _ in range(10):
                tensor.add_(1.0)
            del tensor, buffer  # at once: unmapped too early, the GPU would lose its context
        torch.cuda.synchronize()

    def test_a_pool_tells_its_stream(self):
        import torch

        pool = egmem.Pool(gpu=self.gpu, driver=self.driver)
        block = pool.allocate(1 << 20, torch.cuda.current_stream())
        self.assertGreaterEqual(block.__cuda_array_interface__["stream"], 1)
        tensor = torch.from_dlpack(pool.allocate(1 << 20).on(f"cuda:{self.gpu}"))
        tensor.fill_(9)
        self.assertEqual(int(tensor.sum()), 9 << 20)

    def test_a_block_is_freed_after_a_stream(self):
        import torch

        heap = egmem.Heap(near_gpu=self.gpu, limit=64 << 20, driver=self.driver)
        block = heap.allocate(16 << 20)
        tensor = torch.from_dlpack(block.view("float32", device=f"cuda:{self.gpu}"))
        tensor.fill_(2.0)
        with self.assertRaises(egmem.InUse):
            block.free_after(torch.cuda.current_stream())
        del tensor
        block.free_after(torch.cuda.current_stream())
        self.assertTrue(block.closed)
        heap.collect(wait=True)
        self.assertEqual(heap.stats()["live_blocks"], 0)


@needs("cupy")
class Cupy(GpuTest):
    def test_cupy_takes_the_same_bytes(self):
        import cupy
        import numpy

        buffer = egmem.Buffer(1 << 20, near_gpu=self.gpu, driver=egmem.open())
        by_dlpack = cupy.from_dlpack(buffer.view("int64", device=f"cuda:{self.gpu}"))
        self.assertEqual(by_dlpack.data.ptr, buffer.address)
        if self.gpu == 0:  # the driver says of host memory that it is GPU 0's: on another one CuPy copies, without DLPack
            by_interface = cupy.asarray(buffer.view("int64", device="cuda:0"))
            self.assertEqual(by_interface.data.ptr, buffer.address)
        by_dlpack[...] = cupy.arange(len(by_dlpack))
        cupy.cuda.Device().synchronize()
        self.assertEqual(int(numpy.asarray(buffer).view("i8").sum()), len(by_dlpack) * (len(by_dlpack) - 1) // 2)


    def test_default_streams_of_cupy(self):
        import cupy

        driver = egmem.open()
        block = egmem.Heap(near_gpu=self.gpu, driver=driver).allocate(1 << 20)
        stream = cupy.cuda.Stream.null
        if driver.gpu_count > 1:
            with self.assertRaises(egmem.InvalidArgument):
                block.free_after(stream)
            self.assertFalse(block.closed)
        block.free_after(stream, gpu=cupy.cuda.runtime.getDevice())
        self.assertTrue(block.closed)
        block = egmem.Heap(near_gpu=self.gpu, driver=driver).allocate(1 << 20)
        block.free_after(cupy.cuda.Stream(non_blocking=True))
        self.assertTrue(block.closed)

    def end_beside_a_host_function(self, make):
        """Ends an object of `make` beside a Python function in a stream, which needs the GIL: the end waits for it."""
        code = f"""
import cupy, egmem, egmem.cupy
cupy.cuda.Device(GPU).use()
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
        self.assertIn("done", self.child(code, timeout=60))

    def test_arrays_end_beside_a_host_function(self):
        self.end_beside_a_host_function(
            "make = lambda: cupy.from_dlpack(egmem.Buffer(1 << 20, near_gpu=GPU, driver=driver).on(f'cuda:{GPU}'))"
        )

    def test_views_end_beside_a_host_function(self):
        self.end_beside_a_host_function(
            "def make():\n"
            "    view = egmem.Buffer(1 << 20, near_gpu=GPU, driver=driver).on(f'cuda:{GPU}')\n"
            "    view.__cuda_array_interface__\n"
            "    return view"
        )

    def test_capsules_end_beside_a_host_function(self):
        self.end_beside_a_host_function("make = lambda: egmem.Buffer(1 << 20, near_gpu=GPU, driver=driver).on(f'cuda:{GPU}').__dlpack__()")

    def test_a_pool_s_memory_ends_beside_a_host_function(self):
        self.end_beside_a_host_function(
            "pool = egmem.cupy.memory_pool(heap=egmem.Heap(near_gpu=GPU, driver=driver))\n"
            "def make():\n"
            "    pool.free_all_blocks()\n"
            "    pool.malloc(1 << 20)"
        )


@needs("numba.cuda")
class Numba(GpuTest):
    def test_numba_takes_the_same_bytes(self):
        from numba import cuda

        buffer = egmem.Buffer(1 << 20, near_gpu=self.gpu, driver=egmem.open())
        array = cuda.as_cuda_array(buffer.view("float32", device=f"cuda:{self.gpu}"))
        self.assertEqual(array.device_ctypes_pointer.value, buffer.address)


@needs("jax")
class Jax(GpuTest):
    def test_jax_takes_the_same_bytes(self):
        code = """
import egmem, jax, jax.numpy as jnp
buffer = egmem.Buffer(1 << 20, near_gpu=GPU, driver=egmem.open())
buffer.fill(1)
array = jax.dlpack.from_dlpack(buffer.view("uint8", device=f"cuda:{GPU}"))
assert int(array.sum()) == 1 << 20, array.sum()
print("taken", array.device)
try:
    pinned = jax.dlpack.from_dlpack(buffer.on("cuda_host"))
except Exception as error:  # before jax-ml/jax#37896
    print("cuda_host is refused by JAX", jax.__version__, type(error).__name__, error)
else:
    assert pinned.sharding.memory_kind == "pinned_host", pinned.sharding
    assert pinned.unsafe_buffer_pointer() == buffer.address
    print("cuda_host is taken by JAX", jax.__version__)
"""
        out = self.child(code, environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
        self.assertIn("taken", out)
        print("\n" + out.strip())


@needs("cuda.core")
class CudaCore(GpuTest):
    def test_cuda_core_takes_the_same_bytes(self):
        try:
            from cuda.core import Device
            from cuda.core.utils import StridedMemoryView
        except ImportError:
            from cuda.core.experimental import Device
            from cuda.core.experimental.utils import StridedMemoryView

        Device(self.gpu).set_current()
        buffer = egmem.Buffer(1 << 20, near_gpu=self.gpu, driver=egmem.open())
        for device in (f"cuda:{self.gpu}", "cuda_host"):
            make = getattr(StridedMemoryView, "from_dlpack", StridedMemoryView)
            view = make(buffer.on(device), stream_ptr=-1)
            self.assertEqual((view.ptr, view.shape), (buffer.address, (1 << 20,)))


if __name__ == "__main__":
    unittest.main(verbosity=2)
