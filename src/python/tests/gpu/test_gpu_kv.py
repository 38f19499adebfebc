"""egmem.kv on a GPU, over PyTorch's tensors."""

import unittest

from support import GpuTest, needs

import egmem
import egmem.kv


@needs("torch")
class Kv(GpuTest):
    def setUp(self):
        import torch

        super().setUp()
        self.driver = egmem.open()
        torch.manual_seed(3)
        # Four layers with keys and values: 64 blocks of 16 tokens, 8 heads of 64.
        self.layers = [torch.randn(64, 16, 8, 64, device="cuda", dtype=torch.float16) for _ in range(8)]
        self.page_bytes = 8 * 16 * 8 * 64 * 2
        self.keys = [number.to_bytes(4, "little") * 8 for number in range(32)]

    def round_trip(self, method, stream):
        import torch

        tier = egmem.kv.Tier(48, self.page_bytes, near_gpu=self.gpu, driver=self.driver)
        gpu_pages = egmem.kv.GpuPages.from_tensors(self.layers)
        self.assertEqual((gpu_pages.blocks, gpu_pages.block_bytes), (64, self.page_bytes))
        wanted = [layer[:32].clone() for layer in self.layers]
        with tier.prepare_store(self.keys) as store:
            tier.store(store.pages, range(32), gpu_pages, stream=stream, method=method).wait()
            store.commit()
        for layer in self.layers:
            layer[:32].zero_()
        blocks = list(range(63, 31, -1))
        with tier.prepare_load(self.keys) as load:
            # In the stream's order: after the zeroing, before the comparison.
            job = tier.load(load.pages, blocks, gpu_pages, stream=stream, method=method)
        for layer, value in zip(self.layers, wanted):
            self.assertTrue(torch.equal(layer[32:].flip(0), value))
        job.wait()
        self.assertEqual(tier.stats()["pinned"], 0)

    def test_each_method_on_the_default_stream(self):
        import torch

        for method in ("auto", "kernel", "loop"):
            self.round_trip(method, torch.cuda.current_stream())

    def test_each_method_on_a_stream_of_pytorch(self):
        import torch

        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for method in ("auto", "kernel", "kernel:4", "batch", "loop"):
                self.round_trip(method, stream)

    def test_tensors_of_several_allocations(self):
        """PyTorch's expandable segments put a tensor over several allocations: a copy by the driver goes over their borders."""
        out = self.child(
            """
import torch, egmem, egmem.kv
torch.cuda.set_device(GPU)
page, count = 300 << 10, 205  # 60 MiB, in allocations of 20 MiB
cache = torch.randint(0, 255, (count, page), dtype=torch.uint8, device="cuda")
wanted = cache.clone()
stream = torch.cuda.Stream()
tier = egmem.kv.Tier(count, page, near_gpu=GPU, driver=egmem.open())
gpu_pages = egmem.kv.GpuPages.from_tensors([cache])
keys = [number.to_bytes(4, "little") for number in range(count)]
for method in ("auto", "kernel", "loop", "batch"):
    torch.cuda.synchronize()
    tier.remove(keys)
    try:
        with tier.prepare_store(keys) as store:
            tier.store(store.pages, range(count), gpu_pages, stream=stream, method=method).wait()
            store.commit()
        cache.zero_()
        torch.cuda.synchronize()
        with tier.prepare_load(keys) as load:
            tier.load(load.pages, range(count), gpu_pages, stream=stream, method=method).wait()
    except egmem.Error as error:
        assert method == "batch", (method, error)
        print(method, "is refused:", error)
        continue
    assert torch.equal(cache, wanted), method
    print(method, "moves the bytes")
""",
            environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        )
        print("\n" + out.strip())

    def test_tensors_of_the_cpu_are_refused(self):
        import torch

        for tensor in (torch.zeros(4, 4096), torch.zeros(4, 4096, pin_memory=True)):
            with self.assertRaises(egmem.InvalidArgument):
                egmem.kv.GpuPages.from_tensors([self.layers[0], tensor])

    def test_the_cpu_reads_pages_that_the_gpu_wrote(self):
        import numpy
        import torch

        cache = torch.arange(4 * 1024, dtype=torch.int32, device="cuda").reshape(4, 1024)
        torch.cuda.synchronize()
        tier = egmem.kv.Tier(4, 4096, near_gpu=self.gpu, driver=self.driver)
        gpu_pages = egmem.kv.GpuPages.from_tensors([cache])
        with tier.prepare_store(self.keys[:2]) as store:
            tier.store(store.pages, [1, 3], gpu_pages).wait()
            store.commit()
        with tier.prepare_load(self.keys[:2]) as load:
            page = numpy.asarray(memoryview(load.view(1))).view("i4")
            self.assertEqual(page.tolist(), list(range(3 * 1024, 4 * 1024)))
            del page

    def test_copies_without_a_stream_follow_the_current_one(self):
        """In turn with PyTorch's kernels, on several streams and without a synchronisation: no block is copied too early."""
        import torch

        for stream in (torch.cuda.default_stream(self.gpu), torch.cuda.Stream(self.gpu)):
            with self.subTest(stream=stream), torch.cuda.stream(stream):
                self.fill_and_copy()

    def fill_and_copy(self):
        import torch

        device = f"cuda:{self.gpu}"
        page, count = 64 << 10, 64
        work = torch.randn(4096, 4096, device=device)
        cache = torch.zeros(count, page, dtype=torch.uint8, device=device)
        tier = egmem.kv.Tier(count, page, near_gpu=self.gpu, driver=self.driver)
        gpu_pages = egmem.kv.GpuPages.from_tensors([cache])
        keys = [number.to_bytes(4, "little") for number in range(count)]
        for value in range(1, 9):
            tier.remove(keys)
            with tier.prepare_store(keys) as store:
                for _ in range(8):
                    work = work @ work * 1e-4  # the kernel that fills the cache begins late
                cache.fill_(value)
                job = tier.store(store.pages, range(count), gpu_pages)
                cache.fill_(0)  # after the copies, as they are on this stream
                job.wait()
                store.commit()
            with tier.prepare_load(keys) as load:
                for index in range(count):
                    self.assertEqual(set(load.view(index).read()), {value})
                for _ in range(8):
                    work = work @ work * 1e-4
                cache.fill_(99)
                job = tier.load(load.pages, range(count), gpu_pages)
                self.assertTrue(bool((cache == value).all()))  # on the stream, behind the copies
                job.wait()

    def test_copies_of_cupys_arrays_follow_its_current_stream(self):
        try:
            import cupy
        except ImportError:
            self.skipTest("cupy is missing")
        page, count = 64 << 10, 64
        tier = egmem.kv.Tier(count, page, near_gpu=self.gpu, driver=self.driver)
        keys = [number.to_bytes(4, "little") for number in range(count)]
        with cupy.cuda.Device(self.gpu):
            streams = cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)
        for stream in streams:
            with self.subTest(stream=stream), cupy.cuda.Device(self.gpu), stream:
                cache = cupy.zeros((count, page), dtype=cupy.uint8)
                work = cupy.random.rand(4096, 4096)
                gpu_pages = egmem.kv.GpuPages.from_tensors([cache])
                tier.remove(keys)
                with tier.prepare_store(keys) as store:
                    for _ in range(8):
                        work = work @ work * 1e-4
                    cache.fill(7)
                    tier.store(store.pages, range(count), gpu_pages).wait()
                    store.commit()
                with tier.prepare_load(keys) as load:
                    self.assertEqual({byte for n in range(count) for byte in load.view(n).read()}, {7})

    def test_addresses_need_a_stream(self):
        tier = egmem.kv.Tier(4, 4096, near_gpu=self.gpu, driver=self.driver)
        layer = self.layers[0]
        gpu_pages = egmem.kv.GpuPages([layer.data_ptr()], 4096, 4096, 4, keep=layer)
        with tier.prepare_store(self.keys[:1]) as store:
            with self.assertRaisesRegex(egmem.InvalidArgument, "pass stream="):
                tier.store(store.pages, [0], gpu_pages)

    def check_layout(self, tensors, page_bytes, blocks_of, block_dim=None):
        """Stores block 5, clears it and loads it into block 9, by each method; `blocks_of` returns a tensor's blocks first."""
        import torch

        tier = egmem.kv.Tier(4, page_bytes, near_gpu=self.gpu, driver=self.driver)
        gpu_pages = egmem.kv.GpuPages.from_tensors(tensors, block_dim=block_dim)
        self.assertEqual(gpu_pages.block_bytes, page_bytes)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for method in ("auto", "kernel", "batch", "loop"):
                with self.subTest(method=method):
                    tier.remove(self.keys[:1])
                    before = [tensor.clone() for tensor in tensors]
                    with tier.prepare_store(self.keys[:1]) as store:
                        tier.store(store.pages, [5], gpu_pages, method=method).wait()
                        store.commit()
                    for tensor in tensors:
                        blocks_of(tensor)[9].zero_()
                    with tier.prepare_load(self.keys[:1]) as load:
                        tier.load(load.pages, [9], gpu_pages, method=method).wait()
                    for tensor, old in zip(tensors, before):
                        blocks_of(old)[9].copy_(blocks_of(old)[5])
                        self.assertTrue(torch.equal(tensor, old))

    def test_blocks_may_be_stored_permuted(self):
        import torch

        # Tokens and heads, stored as heads and tokens: vLLM's HND.
        layers = [torch.randn(16, 8, 16, 64, device="cuda", dtype=torch.float16).permute(0, 2, 1, 3) for _ in range(4)]
        self.check_layout(layers, 4 * 8 * 16 * 64 * 2, lambda tensor: tensor)

    def test_keys_and_values_before_the_blocks_are_parts(self):
        import torch

        layers = [torch.randn(2, 16, 16, 8, 64, device="cuda", dtype=torch.float16) for _ in range(4)]
        with self.assertRaisesRegex(egmem.InvalidArgument, "block_dim=1"):
            egmem.kv.GpuPages.from_tensors(layers)
        self.check_layout(layers, 4 * 2 * 8 * 16 * 64 * 2, lambda tensor: tensor.transpose(0, 1), block_dim=1)

    def test_parts_of_a_page_may_have_different_sizes(self):
        import torch

        for sizes in ((36_864, 8_448) * 3, (65_536, 32_768)):
            layers = [torch.randint(0, 255, (1024, size), device="cuda", dtype=torch.uint8) for size in sizes]
            self.check_layout(layers, sum(sizes), lambda tensor: tensor)

    def test_many_pages_of_parts_of_different_sizes(self):
        """More than the first of two launches takes."""
        import torch

        count = 3000
        sizes = (48, 16, 4096, 16)
        layers = [torch.randint(0, 255, (count, size), device="cuda", dtype=torch.uint8) for size in sizes]
        wanted = [layer.clone() for layer in layers]
        tier = egmem.kv.Tier(count, sum(sizes), near_gpu=self.gpu, driver=self.driver)
        gpu_pages = egmem.kv.GpuPages.from_tensors(layers)
        keys = [number.to_bytes(4, "little") for number in range(count)]
        with tier.prepare_store(keys) as store:
            tier.store(store.pages, range(count), gpu_pages, method="kernel").wait()
            store.commit()
        for layer in layers:
            layer.zero_()
        with tier.prepare_load(keys) as load:
            tier.load(load.pages, range(count - 1, -1, -1), gpu_pages, method="kernel").wait()
        for layer, value in zip(layers, wanted):
            self.assertTrue(torch.equal(layer.flip(0), value))

    def test_tensors_live_as_long_as_their_copies(self):
        import torch

        tier = egmem.kv.Tier(32, 1 << 20, near_gpu=self.gpu, driver=self.driver)
        cache = torch.full((32, 1 << 20), 5, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with tier.prepare_store(self.keys) as store:
            # From a generator: nothing but the job has the tensor.
            job = tier.store(store.pages, range(32), egmem.kv.GpuPages.from_tensors(tensor for tensor in [cache]))
            del cache
            other = torch.full((32, 1 << 20), 9, dtype=torch.uint8, device="cuda")
            job.wait()
            store.commit()
        with tier.prepare_load(self.keys) as load:
            for index in range(32):
                self.assertEqual(set(load.view(index).read()), {5})
        del other


if __name__ == "__main__":
    unittest.main(verbosity=2)
