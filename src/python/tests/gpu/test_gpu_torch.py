"""egmem.torch on a GPU."""

import copy
import gc
import io
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest

from support import GpuTest, needs

import egmem

GIB = 1 << 30


@needs("torch")
class Pinned(GpuTest):
    def test_tensors_are_pinned_and_of_their_own_size(self):
        import torch

        import egmem.torch as et

        heap = egmem.Heap(near_gpu=self.gpu, driver=egmem.open())
        tensor = et.empty(3, 5, dtype=torch.float16, heap=heap)
        self.assertEqual((tensor.shape, tensor.dtype, tensor.device.type), ((3, 5), torch.float16, "cpu"))
        self.assertTrue(tensor.is_pinned())
        big = et.empty(5 * (100 << 20), dtype=torch.uint8, heap=heap)
        self.assertTrue(big.is_pinned())
        self.assertLess(heap.stats()["used"], 501 << 20)
        del tensor, big
        gc.collect()
        self.assertEqual(heap.stats()["live_blocks"], 0)
        self.assertEqual(et.empty(0, 4).shape, (0, 4))

    def test_pin_copies_the_values(self):
        import torch

        import egmem.torch as et

        tensor = torch.arange(1000, dtype=torch.int64).reshape(10, 100)
        pinned = et.pin(tensor)
        self.assertTrue(pinned.is_pinned() and torch.equal(pinned, tensor))
        self.assertTrue(torch.equal(pinned.to("cuda", non_blocking=True).cpu(), tensor))

    def test_copies_do_not_wait_and_survive_the_tensor(self):
        import torch

        import egmem.torch as et

        for round in range(10):
            pinned = et.empty(32 << 20, dtype=torch.uint8)
            pinned.fill_(round)
            gpu = pinned.to("cuda", non_blocking=True)
            del pinned  # waits for the copy: the block may be reused at once
            other = et.empty(32 << 20, dtype=torch.uint8)
            other.fill_(99)
            self.assertEqual(int(gpu.max()), round)
            self.assertEqual(int(gpu.min()), round)

    def test_copies_survive_a_numpy_array(self):
        import torch

        import egmem.numpy

        for round in range(10):
            array = egmem.numpy.empty(64 << 20, "u1")
            array[...] = round
            gpu = torch.from_numpy(array).to("cuda", non_blocking=True)
            del array  # waits for the copy: unmapped too early, the GPU would lose its context
            self.assertEqual(int(gpu.max()), round)
            self.assertEqual(int(gpu.min()), round)

    def test_tensors_end_in_other_threads(self):
        import torch

        import egmem.torch as et

        heap = egmem.Heap(near_gpu=self.gpu, driver=egmem.open())
        tensors = [et.empty(1 << 20, heap=heap, dtype=torch.uint8) for _ in range(50)]

        def end(all):
            all.clear()

        thread = threading.Thread(target=end, args=(tensors,))
        thread.start()
        thread.join()
        self.assertEqual(heap.stats()["live_blocks"], 0)


@needs("torch")
class Optimizers(GpuTest):
    def test_an_optimizer_s_state_is_in_cpu_memory(self):
        import torch

        import egmem.torch as et

        def train(offloaded):
            torch.manual_seed(3)
            model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 2048)).cuda()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            pool = None
            if offloaded:
                pool = et.offload_optimizer(optimizer, pool=et.MemPool(heap=egmem.Heap(near_gpu=self.gpu, driver=egmem.open())))
            for _ in range(4):
                model(torch.ones(8, 2048, device="cuda")).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                saved = io.BytesIO()
                torch.save(copy.deepcopy(optimizer.state_dict()), saved)
                self.assertGreater(saved.tell(), 4 * 2048 * 2048 * 4)
            return [parameter.detach().clone() for parameter in model.parameters()], pool

        plain, _ = train(False)
        offloaded, pool = train(True)
        for one, other in zip(plain, offloaded):
            self.assertTrue(torch.equal(one, other))
        self.assertGreaterEqual(pool.heap.stats()["used_high_water"], 4 * 2048 * 2048 * 4)

    def test_the_state_on_all_gpus_is_in_cpu_memory(self):
        import torch

        import egmem.torch as et

        layers = [torch.nn.Linear(2048, 2048).cuda(gpu) for gpu in range(torch.cuda.device_count())]
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        pool = et.offload_optimizer(optimizer, pool=et.MemPool(heap=egmem.Heap(near_gpu=self.gpu, driver=egmem.open())))
        for _ in range(3):
            for gpu, layer in enumerate(layers):
                layer(torch.ones(8, 2048, device=f"cuda:{gpu}")).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for layer in layers:
            state = optimizer.state[layer.weight]["exp_avg"]
            self.assertEqual(state.device, layer.weight.device)
            self.assertTrue(bool(state.isfinite().all()))
        self.assertGreaterEqual(pool.heap.stats()["used"], len(layers) * 2 * 2048 * 2048 * 4)


@needs("torch")
class Pools(GpuTest):
    def test_tensors_of_a_pool_are_in_cpu_memory(self):
        import torch

        import egmem.torch as et

        pool = et.MemPool(heap=egmem.Heap(near_gpu=self.gpu, driver=egmem.open()))
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.ones(64 << 20, device="cuda", dtype=torch.uint8)
            product = torch.randn(512, 512, device="cuda")
        start = pool.heap.stats()
        self.assertGreaterEqual(start["used"], 64 << 20)
        self.assertEqual(int(tensor.sum()), 64 << 20)
        self.assertEqual((product @ product).shape, (512, 512))
        outside = torch.ones(64 << 20, device="cuda", dtype=torch.uint8)
        self.assertEqual(pool.heap.stats()["used"], start["used"])
        del tensor, product, outside

    def test_streams_and_record_stream(self):
        import torch

        import egmem.torch as et

        pool = et.MemPool(heap=egmem.Heap(near_gpu=self.gpu, driver=egmem.open()))
        side = torch.cuda.Stream()
        with torch.cuda.use_mem_pool(pool):
            for round in range(30):
                tensor = torch.full((4 << 20,), float(round), device="cuda")
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    total = tensor.sum()
                tensor.record_stream(side)
                del tensor
                torch.full((4 << 20,), -1.0, device="cuda")
                side.synchronize()
                self.assertEqual(float(total), round * float(4 << 20))

    def test_a_graph_replays_on_its_memory(self):
        import torch

        import egmem.torch as et

        pool = et.MemPool(heap=egmem.Heap(near_gpu=self.gpu, driver=egmem.open()))
        static = torch.zeros(1 << 20, device="cuda")
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            (static * 2 + 1).sum()
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        # Without a stream PyTorch captures on one of the GPU that the process captured on first.
        with torch.cuda.graph(graph, pool=pool.id, stream=torch.cuda.Stream()):
            intermediate = static * 2
            result = (intermediate + 1).sum()
        for value in range(5):
            static.fill_(value)
            graph.replay()
            self.assertEqual(float(result), (2 * value + 1) * float(1 << 20))

    def test_no_room_is_pytorch_own_error(self):
        import torch

        import egmem.torch as et

        pool = et.MemPool(heap=egmem.Heap(near_gpu=self.gpu, limit=64 << 20, driver=egmem.open()))
        with torch.cuda.use_mem_pool(pool):
            with self.assertRaises(torch.OutOfMemoryError):
                torch.empty(256 << 20, device="cuda", dtype=torch.uint8)
            small = torch.ones(1 << 20, device="cuda", dtype=torch.uint8)
        self.assertEqual(int(small.sum()), 1 << 20)
        self.assertIsInstance(pool.last_error(), egmem.OutOfMemory)

    def test_expandable_segments_are_refused(self):
        code = """
import egmem, egmem.torch as et
try:
    et.MemPool(0)
except egmem.NotSupported as error:
    print("refused", error.remedy)
"""
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            out = self.child(code, environment={name: "expandable_segments:True"})
            self.assertIn("refused", out)

    def test_a_pool_keeps_its_gpu(self):
        import torch

        import egmem.torch as et

        others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != self.gpu]
        pool = et.MemPool()
        self.assertEqual(pool.gpu, self.gpu)
        for current in (self.gpu, *others):
            torch.cuda.set_device(current)
            before = torch.cuda.mem_get_info(self.gpu)[0]
            with et.use(pool):
                tensor = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
            self.assertEqual(torch.cuda.current_device(), current)
            self.assertEqual(tensor.device.index, self.gpu)
            torch.cuda.synchronize(self.gpu)
            self.assertGreaterEqual(pool.heap.stats()["used"], 256 << 20)
            self.assertLess(before - torch.cuda.mem_get_info(self.gpu)[0], 128 << 20)
            # PyTorch sums 64-bit numbers, of which it makes a tensor of 2 GiB on the GPU.
            self.assertEqual(int(tensor.sum()), 256 << 20)
            del tensor
        for other in others:
            for use in (et.use, torch.cuda.use_mem_pool):
                with self.assertRaises(egmem.InvalidArgument):
                    with use(pool, device=f"cuda:{other}"):
                        pass
        if others:
            torch.cuda.set_device(others[0])
            with self.assertRaises(egmem.InvalidArgument):
                with torch.cuda.use_mem_pool(pool):
                    pass

    def test_a_device_that_is_not_current_has_a_pool(self):
        import torch

        import egmem.torch as et

        torch.cuda.set_device(0)
        free = torch.cuda.mem_get_info(self.gpu)[0]
        with et.use(device=f"cuda:{self.gpu}") as pool:
            table = torch.ones(1 << 30, dtype=torch.uint8, device=f"cuda:{self.gpu}")
        self.assertGreaterEqual(pool.heap.stats()["used"], 1 << 30)
        self.assertLess(free - torch.cuda.mem_get_info(self.gpu)[0], 512 << 20)
        self.assertEqual(int(table[::4096].sum()), 1 << 18)


CAPTURE = """
import gc, threading, torch, egmem, egmem.torch as et
torch.cuda.set_device(GPU)
static = torch.ones(1 << 20, device="cuda")
warm = torch.cuda.Stream()
warm.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(warm):
    (static * 2).sum()
torch.cuda.current_stream().wait_stream(warm)
graph = torch.cuda.CUDAGraph()
def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
"""


@needs("torch")
class Captures(GpuTest):
    """Each in a process of its own: an invalid capture disturbs the next test's too."""

    def test_memory_that_ends_meanwhile_disturbs_no_capture(self):
        self.child(
            CAPTURE
            + """
pinned = et.empty(1 << 20)
on_gpu = pinned.to("cuda", non_blocking=True)
kept = [pinned, egmem.Buffer(1 << 20, near_gpu=GPU).on(f"cuda:{GPU}").__dlpack__(), memoryview(egmem.Buffer(1 << 20, near_gpu=GPU))]
del pinned
with torch.cuda.graph(graph):
    doubled = static * 2
    in_a_thread(kept.clear)
    assert egmem.deferred()[0] == 3, egmem.deferred()
    total = doubled.sum()
assert egmem.deferred() == (0, 0), egmem.deferred()
graph.replay()
assert float(total) == 2.0 * (1 << 20)
"""
        )

    def test_tensors_outlive_their_pool(self):
        self.child(
            CAPTURE
            + """
heap = egmem.Heap(near_gpu=GPU, driver=egmem.open())
for round in range(3):
    with et.use(et.MemPool(heap=heap)):
        table = torch.ones(32 << 20, dtype=torch.uint8, device="cuda")
    gc.collect()
    assert int(table.sum()) == 32 << 20
    del table
    gc.collect()
    torch.cuda.empty_cache()
assert heap.stats()["live_blocks"] == 0, heap.stats()
"""
        )

    def test_nothing_is_offloaded(self):
        self.child(
            CAPTURE
            + """
weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
try:
    with et.offload(), torch.cuda.graph(graph):
        ((weight * 2) * (static * 3)).sum()
except egmem.NotSupported as error:
    assert "graph" in error.remedy
else:
    raise AssertionError("not refused")
"""
        )

    def test_an_output_outlives_its_graph(self):
        self.child(
            ALL_TENSORS
            + CAPTURE
            + """
with torch.cuda.graph(graph):
    for _ in range(20):
        torch.cuda._sleep(10_000_000)
    output = static * 2
replays = torch.cuda.Stream()
with torch.cuda.stream(replays):
    graph.replay()
del graph
gc.collect()
address = output.data_ptr()
del output
other = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(4)]
torch.cuda.synchronize()
assert all(float(tensor.sum()) == 7.0 * (1 << 20) for tensor in other), "the replay wrote into another tensor"
"""
        )


ALL_TENSORS = """
import gc, torch, egmem, egmem.torch as et
heap = egmem.Heap(near_gpu=GPU, limit=2 << 30, driver=egmem.open())
et.set_current_allocator(heap=heap)
torch.cuda.set_device(GPU)
"""


@needs("torch")
class WholeProcess(GpuTest):
    def test_every_tensor_is_in_cpu_memory(self):
        self.child(
            ALL_TENSORS
            + """
x = torch.randn(1024, 1024, device="cuda")
y = (x @ x).relu().sum(); y.item()
assert heap.stats()["used"] >= 4 << 20
side = torch.cuda.Stream()
for round in range(30):
    t = torch.full((1 << 20,), float(round), device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1000000)
        total = t.sum()
    t.record_stream(side)
    del t
    torch.full((1 << 20,), -1.0, device="cuda")
    side.synchronize()
    assert float(total) == round * float(1 << 20), (round, float(total))
print("done")
"""
        )

    def test_no_room_raises(self):
        out = self.child(
            ALL_TENSORS
            + """
try:
    torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
except RuntimeError as error:
    print("raised", type(error).__name__, "out of memory" in str(error), str(error)[:300])
assert int(torch.ones(1 << 20, dtype=torch.uint8, device="cuda").sum()) == 1 << 20
"""
        )
        self.assertIn("raised", out)
        self.assertIn("True", out)
        print("\n" + out.strip())

    def test_a_graph(self):
        self.child(
            ALL_TENSORS
            + """
static = torch.zeros(1 << 20, device="cuda")
warm = torch.cuda.Stream()
warm.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(warm):
    (static * 2 + 1).sum()
torch.cuda.current_stream().wait_stream(warm)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    intermediate = static * 2
    result = (intermediate + 1).sum()
    del intermediate
eager = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]
for value in range(5):
    static.fill_(value)
    graph.replay()
    assert float(result) == (2 * value + 1) * float(1 << 20)
assert all(float(t.sum()) == 7.0 * (1 << 20) for t in eager)
del graph, result, static, eager
gc.collect(); torch.cuda.synchronize()
print("done")
"""
        )

    def test_a_graph_keeps_blocks_of_recorded_streams(self):
        self.child(
            ALL_TENSORS
            + """
static = torch.zeros(1 << 20, device="cuda")
side = torch.cuda.Stream()
warm = torch.cuda.Stream()
warm.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(warm):
    (static * 2).sum()
torch.cuda.current_stream().wait_stream(warm)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    current = torch.cuda.current_stream()
    x = static * 2
    address = x.data_ptr()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        torch.cuda._sleep(10000000)
        total = x.sum()
    x.record_stream(side)
    del x
    y = static * 0 - 1
    assert y.data_ptr() != address, "the side stream may still read it"
    current.wait_stream(side)
for value in range(5):
    static.fill_(value)
    graph.replay()
    assert float(total) == 2 * value * float(1 << 20), (value, float(total))
del graph, total, y, static
gc.collect(); torch.cuda.synchronize()
print("done")
"""
        )


@needs("torch")
class Processes(GpuTest):
    def test_an_exit_with_live_objects_is_clean(self):
        self.child(
            """
import torch, egmem, egmem.torch as et
torch.cuda.set_device(GPU)
kept = [et.empty(1 << 20), et.pin(torch.ones(1000))]
pool = et.MemPool(0)
with torch.cuda.use_mem_pool(pool):
    tensor = torch.ones(1 << 20, device="cuda")
buffer = egmem.Buffer(1 << 20, near_gpu=GPU)
view = torch.from_dlpack(buffer.on(f"cuda:{GPU}"))
heap = egmem.Heap(near_gpu=GPU, grow_ahead=64 << 20)
block = heap.allocate(1 << 20)
"""
        )

    def test_a_forked_child_is_refused_and_ends(self):
        self.child(
            """
import os, torch, egmem, egmem.torch as et
buffer = egmem.Buffer(1 << 20, near_gpu=GPU)
tensor = et.empty(1 << 20)
child = os.fork()
if child == 0:
    try:
        egmem.Buffer(1 << 20, near_gpu=GPU)
    except egmem.InvalidArgument:
        try:
            et.empty(10)
        except egmem.InvalidArgument:
            os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
tensor.fill_(1)
"""
        )

    def test_spawned_processes_have_their_own(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "spawn.py")
            path.write_text(SPAWN)
            ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
            self.assertEqual((ended.returncode, ended.stdout), (0, "[3000.0, 4000.0]\n"), ended.stderr)


SPAWN = """
import multiprocessing
import egmem.torch as et

def work(number):
    return float(et.empty(1000).fill_(number).sum())

if __name__ == "__main__":
    kept = et.empty(10)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(work, [3, 4]))
"""


if __name__ == "__main__":
    unittest.main(verbosity=2)
