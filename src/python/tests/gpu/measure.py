"""Measures egmem beside PyTorch, CuPy and cuda.core: python3 measure.py [SECTION…]. Prints a line for each figure.

The section "start" needs the program egmem: EGMEM_TEST_PROGRAM=target/release/egmem.
"""

import ctypes
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

import egmem
import egmem.kv


def median_us(work, count, rounds=7):
    """Returns the median over rounds of the microseconds of one call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            work()
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


def section(name, work):
    try:
        work()
    except AssertionError:
        raise
    except Exception as error:  # a library is missing or refuses: the other figures still count
        print(f"{name}: not measured: {type(error).__name__}: {error}", flush=True)


SIZE = 64 << 10


def native():
    import torch

    import egmem.torch as et

    pool = et.MemPool(heap=egmem.Heap(near_gpu=0, reserve=256 << 20, driver=egmem.open()))
    egmem._egmem._measure(pool.slot, SIZE, 0, 0, 1000)
    times = [egmem._egmem._measure(pool.slot, SIZE, 0, 0, 100_000) / 100_000 / 1e3 for _ in range(7)]
    print(f"64 KiB alloc+free, PyTorch's allocator functions over egmem: {statistics.median(times):.3f} us", flush=True)
    side = torch.cuda.Stream()
    times = [egmem._egmem._measure(pool.slot, SIZE, 0, side.cuda_stream, 100_000) / 100_000 / 1e3 for _ in range(7)]
    print(f"  the same on another stream: {statistics.median(times):.3f} us", flush=True)
    with torch.cuda.use_mem_pool(pool):
        work = median_us(lambda: torch.empty(SIZE, dtype=torch.uint8, device="cuda"), 10_000)
    print(f"  torch.empty(64 KiB, cuda) in egmem.torch.MemPool: {work:.3f} us", flush=True)
    work = median_us(lambda: torch.empty(SIZE, dtype=torch.uint8, device="cuda"), 10_000)
    print(f"  torch.empty(64 KiB, cuda), PyTorch's own: {work:.3f} us", flush=True)


def torch_pinned():
    import torch

    import egmem.torch as et

    torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    work = median_us(lambda: torch.empty(SIZE, dtype=torch.uint8, pin_memory=True), 10_000)
    print(f"64 KiB alloc+free, torch.empty(pin_memory=True), cached: {work:.3f} us", flush=True)
    heap = egmem.Heap(near_gpu=0, reserve=256 << 20, driver=egmem.open())
    work = median_us(lambda: et.empty(SIZE, dtype=torch.uint8, heap=heap), 2_000)
    print(f"64 KiB alloc+free, egmem.torch.empty (Python, with the wait): {work:.3f} us", flush=True)
    work = median_us(lambda: heap.allocate(SIZE), 10_000)
    print(f"64 KiB alloc+free, egmem.Heap.allocate from Python: {work:.3f} us", flush=True)


def cupy_pinned():
    import cupy

    cupy.cuda.alloc_pinned_memory(SIZE)
    work = median_us(lambda: cupy.cuda.alloc_pinned_memory(SIZE), 10_000)
    print(f"64 KiB alloc+free, CuPy's pinned pool: {work:.3f} us", flush=True)


def cuda_core():
    try:
        from cuda.core import Device, PinnedMemoryResource, PinnedMemoryResourceOptions
    except ImportError:
        from cuda.core.experimental import Device, PinnedMemoryResource, PinnedMemoryResourceOptions

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    for name, options in (("", None), ("numa_id=0", PinnedMemoryResourceOptions(numa_id=0))):
        resource = PinnedMemoryResource(options) if options is not None else PinnedMemoryResource()

        def work():
            resource.allocate(SIZE, stream=stream).close(stream)

        print(f"64 KiB alloc+free, cuda.core PinnedMemoryResource({name}): {median_us(work, 5_000):.3f} us", flush=True)


def available():
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) << 10
    raise RuntimeError("no MemAvailable")


def exact():
    import torch

    import egmem.torch as et

    size = 5 << 30
    torch.cuda.init()
    et.empty(1)
    for turn in range(3):
        for name, make in (
            ("egmem.torch.empty", lambda: et.empty(size, dtype=torch.uint8)),
            ("torch.empty(pin_memory=True)", lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True)),
        ):
            before = available()
            start = time.perf_counter()
            tensor = make()
            took = time.perf_counter() - start
            tensor.view(-1)[:: 1 << 12].fill_(1)
            taken = before - available()
            print(
                f"5 GiB by {name}, turn {turn}: {taken / (1 << 30):.3f} GiB of MemAvailable ({taken / size:.4f} x), {took:.2f} s",
                flush=True,
            )
            del tensor
            if not name.startswith("egmem") and hasattr(torch._C, "_host_emptyCache"):
                torch._C._host_emptyCache()
            time.sleep(2)  # the kernel counts freed memory late


def copies():
    import torch

    import egmem.torch as et

    size = 256 << 20
    gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.empty(16, pin_memory=True).to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    heap = egmem.Heap(near_gpu=0, reserve=2 << 30, driver=egmem.open())
    for name, make in (
        ("torch pinned", lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True)),
        ("egmem.torch.empty", lambda: et.empty(size, dtype=torch.uint8, heap=heap)),
        ("egmem.torch.empty, second tensor", lambda: et.empty(size, dtype=torch.uint8, heap=heap)),
        ("egmem.torch.empty, third tensor", lambda: et.empty(size, dtype=torch.uint8, heap=heap)),
    ):
        host = make()
        returned, ended = [], []
        for _ in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            gpu.copy_(host, non_blocking=True)
            returned.append((time.perf_counter() - start) * 1e3)
            torch.cuda.synchronize()
            ended.append(size / (time.perf_counter() - start) / 1e9)
        first, rest = returned[0], statistics.median(returned[1:])
        print(
            f"non_blocking copy of 256 MiB from {name}: returns after {first:.3f} ms (first), {rest:.3f} ms (then); "
            f"{statistics.median(ended):.1f} GB/s",
            flush=True,
        )
        start = time.perf_counter()
        pinned = host.is_pinned()
        print(f"  is_pinned {pinned}, asked in {(time.perf_counter() - start) * 1e6:.1f} us", flush=True)


def offload():
    """Measures a training step of 24 linear layers with GELU, by where the tensors are that autograd saves."""
    import contextlib

    import torch

    import egmem.torch as et

    rows, width, layers = 16384, 4096, 24
    options = {"device": "cuda", "dtype": torch.bfloat16}
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width, **options), torch.nn.GELU()) for _ in range(layers)]
    model = torch.nn.Sequential(*blocks)
    batch = torch.randn(rows, width, **options)

    def step(context):
        with context:
            loss = model(batch).sum()
        loss.backward()

    def print_step(name, work):
        times = []
        for _ in range(10):
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
        print(f"a step of {layers} linear layers with GELU at {rows} x {width}, {name}: {statistics.median(times[3:]):.0f} ms", flush=True)

    print_step("on the GPU", lambda: step(contextlib.nullcontext()))
    for ahead in (0, 1, 2, 3, 4):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        print_step(f"egmem.torch.offload(ahead={ahead})", lambda: step(et.offload(ahead=ahead)))
        print(f"  peak of the GPU's memory: {torch.cuda.max_memory_allocated() / (1 << 30):.2f} GiB", flush=True)
    print_step("save_on_cpu(pin_memory=True)", lambda: step(torch.autograd.graph.save_on_cpu(pin_memory=True)))
    host = et.empty(rows, width, dtype=torch.bfloat16)

    def link():
        for _ in range(2 * layers):
            host.copy_(batch, non_blocking=True)
            batch.copy_(host, non_blocking=True)

    print_step("the link alone, one direction at a time", link)


TIER_PAGES, TIER_PAGE = 4096, 4 << 20  # 16 GiB

# The program of a process until it has 16 GiB of pinned memory that GPU 0 can use.
STARTS = {
    "only python, import egmem, egmem.open()": "import egmem; egmem.open()",
    "egmem.kv.attach, egmem serve": "import egmem.kv; tier = egmem.kv.attach({address!r}, 'tier', page_bytes={page})",
    "egmem.kv.Tier, cold": "import egmem.kv; tier = egmem.kv.Tier({pages}, {page}, near_gpu=0)",
    "only python, import torch, cuda.init()": "import torch; torch.cuda.init(); torch.empty(1, device='cuda')",
    "torch.empty(pin_memory=True)": "import torch; tensor = torch.empty({pages} * {page}, dtype=torch.uint8, pin_memory=True)",
    "cuMemHostAlloc": """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_void_p()
for code in (
    cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context),
    cuda.cuMemHostAlloc(ctypes.byref(memory), ctypes.c_size_t({pages} * {page}), 0),
):
    assert code == 0, code
""",
}


def start():
    """Measures from a process's start until its memory is ready, in seconds: the median of three."""
    program = os.environ.get("EGMEM_TEST_PROGRAM")
    with tempfile.TemporaryDirectory() as folder:
        server, address = None, f"unix:{folder}/socket"
        if program:
            needed = egmem.kv.Tier.bytes_needed(TIER_PAGES, TIER_PAGE)
            with open(f"{folder}/serve.toml", "w") as file:
                file.write(f'listen = ["{address}"]\n[[buffer]]\nname = "tier"\nnode = 0\nwho = ["*"]\n')
                file.write(f'bytes = "{-(-needed >> 21) << 21}"\n')
            began = time.perf_counter()
            command = [program, "serve", "--config", f"{folder}/serve.toml"]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            print(f"  {server.stdout.readline().strip()} (after {time.perf_counter() - began:.1f} s)", flush=True)
        try:
            for name, code in STARTS.items():
                if "serve" in name and not program:
                    print(f"16 GiB ready after process start, {name}: not measured: no EGMEM_TEST_PROGRAM", flush=True)
                    continue
                code = code.format(address=address, pages=TIER_PAGES, page=TIER_PAGE)
                code += "\nimport time, os, sys; print(time.time() - float(sys.argv[1]), flush=True); os._exit(0)"
                times = []
                for _ in range(3):
                    command = [sys.executable, "-c", code, str(time.time())]
                    ended = subprocess.run(command, capture_output=True, text=True)
                    if ended.returncode:
                        print(f"  {name}: {ended.stderr.strip()[-300:]}", flush=True)
                        break
                    times.append(float(ended.stdout.split()[-1]))
                    time.sleep(1)
                else:
                    told = ", ".join(f"{took:.3f}" for took in times)
                    print(f"16 GiB ready after process start, {name}: {statistics.median(times):.3f} s ({told})", flush=True)
        finally:
            if server is not None:
                server.terminate()
                server.wait()


# "auto" last: it is one of those before it.
METHODS = ("kernel", "batch", "loop", "auto")
# "first": on a stream of high priority, whose blocks start before those of the products that wait.
BESIDE = ("kernel:2", "kernel:4", "kernel:4 first", "batch")


def kv():
    """Measures random pages between the tier and a GPU: wall time from the call to the end of the copies."""
    import numpy
    import torch

    total = 512 << 20
    for page in (16 << 10, 64 << 10, 256 << 10, 2 << 20):
        count = total // page
        tier = egmem.kv.Tier(2 * count, page, near_gpu=0, driver=egmem.open())
        cache = torch.zeros(2 * count, page, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        gpu_pages = egmem.kv.GpuPages.from_tensors([cache])
        stream = egmem.Stream(0, driver=tier.driver)  # not PyTorch's current one, which takes no batches
        store_on, load_on = partial(tier.store, stream=stream), partial(tier.load, stream=stream)
        keys = [number.to_bytes(8, "little") for number in range(2 * count)]
        chance = random.Random(7)
        with tier.prepare_store(keys) as store:
            pages = numpy.array(chance.sample(store.pages, count))
            blocks = numpy.array(chance.sample(range(2 * count), count))
            methods("GPU to tier", page, total, lambda method: store_on(pages, blocks, gpu_pages, method=method))
            if page <= 64 << 10:
                beside("stores", page, total, partial(store_on, pages, blocks, gpu_pages))
            store.commit()
        with tier.prepare_load(keys):
            methods("tier to GPU", page, total, lambda method: load_on(pages, blocks, gpu_pages, method=method))
            beside("loads", page, total, partial(load_on, pages, blocks, gpu_pages))
        check(tier, cache, keys, gpu_pages)
        del tier, store_on, load_on
        others(page, total, cache, torch.tensor(blocks))
        del cache, gpu_pages
        torch.cuda.empty_cache()


def methods(way, page, total, start_copy):
    for method in METHODS:
        print_rate(f"{page >> 10} KiB pages, {way}, {method}", total, lambda: start_copy(method).wait())


def others(page, total, cache, index):
    """Measures a program without a tier: PyTorch over its own pinned tensor, and its kernels over a tensor of ours."""
    import torch

    host = torch.empty(cache.shape, dtype=torch.uint8, pin_memory=True)
    print_rate(f"{page >> 10} KiB pages, torch index and copy to GPU", total, lambda: host[index].to("cuda"), 3)
    del host
    memory = egmem.Buffer(cache.numel(), near_gpu=0, driver=egmem.open())
    # The same bytes as a tensor of the GPU: its kernels read and write the CPU's memory.
    ours = torch.from_dlpack(memory.on("cuda:0")).view(torch.int64).view(len(cache), page // 8)
    index = index.to("cuda")
    out = torch.empty(len(index), page // 8, dtype=torch.int64, device="cuda")
    name = f"{page >> 10} KiB pages, torch.index_select over an egmem tensor"
    print_rate(name, total, lambda: torch.index_select(ours, 0, index, out=out))
    print_rate(f"{page >> 10} KiB pages, torch.index_copy_ to an egmem tensor", total, lambda: ours.index_copy_(0, index, out))
    assert torch.equal(ours[index], out), "the bytes differ"


def print_rate(name, nbytes, work, rounds=7):
    import torch

    times = []
    try:
        for _ in range(rounds + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    except egmem.Error as error:
        print(f"{name}: {error}", flush=True)
        return
    print(f"{name}: {nbytes / statistics.median(times[1:]) / 1e9:.1f} GB/s", flush=True)


def leave_processors(count):
    """Has cuBLAS leave that many multiprocessors to other kernels; returns whether it takes that."""
    import torch

    torch.mm(torch.ones(16, 16, device="cuda"), torch.ones(16, 16, device="cuda"))  # loads cuBLAS
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if "libcublas.so" in line}
    if not paths:
        return count == 0
    total = torch.cuda.get_device_properties(0).multi_processor_count
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    return ctypes.CDLL(paths.pop()).cublasSetSmCountTarget(handle, total - count if count else 0) == 0


def beside(what, page, total, start_copy):
    """Tells how much longer matrix products take beside copies, and how fast the copies are meanwhile: first where the products use
    every multiprocessor, then where cuBLAS leaves some."""
    import torch

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    c = torch.empty_like(a)
    first = torch.cuda.Stream(priority=-1)

    def begin_products():
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(50):
            torch.mm(a, a, out=c)
        end.record()
        return begin, end

    def took(events):
        events[1].synchronize()
        return events[0].elapsed_time(events[1])

    def round_of(method):
        """Returns the milliseconds of the products that ran beside copies from their start to their end, and the copies' GB/s."""
        ahead = [begin_products()]
        began = time.perf_counter()
        copy, _, is_first = method.partition(" ")
        jobs = [start_copy(method=copy, stream=first if is_first else None) for _ in range(6)]
        times = []
        while not jobs[-1].is_done():
            ahead.append(begin_products())
            times.append(took(ahead.pop(0)))
        seconds = time.perf_counter() - began
        took(ahead.pop())
        for job in jobs:
            job.wait()
        return times[1:], len(jobs) * total / seconds / 1e9

    took(begin_products())
    alone = statistics.median(took(begin_products()) for _ in range(9))
    for left in (0, 4, 8):
        if not leave_processors(left):
            print(f"cuBLAS does not leave {left} multiprocessors", flush=True)
            continue
        fewer = statistics.median(took(begin_products()) for _ in range(9))
        for method in BESIDE:
            try:
                rounds = [round_of(method) for _ in range(2)]
            except egmem.Error as error:
                print(f"{method}: {error}", flush=True)
                continue
            times = [value for times, _ in rounds for value in times]
            longer = statistics.median(times) if times else float("nan")
            rate = statistics.median(rate for _, rate in rounds)  # until the last job was seen to end
            print(
                f"{page >> 10} KiB pages, {what} by {method} at {rate:.1f} GB/s beside products of 4096 that leave {left} processors: "
                f"50 take {alone:.2f} ms alone on all, {fewer:.2f} alone on these, {longer:.2f} beside ({(longer / alone - 1) * 100:+.1f} %)",
                flush=True,
            )
    leave_processors(0)


def check(tier, cache, keys, gpu_pages):
    """Checks that pages come back in other blocks with their bytes."""
    import torch

    count = min(64, len(keys))
    cache[:count] = torch.randint(0, 255, cache[:count].shape, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    wanted = cache[:count].clone()
    tier.remove(keys[:count])
    with tier.prepare_store(keys[:count]) as store:
        tier.store(store.pages, range(count), gpu_pages).wait()
        store.commit()
    cache.zero_()
    torch.cuda.synchronize()
    with tier.prepare_load(keys[:count]) as load:
        tier.load(load.pages, range(count - 1, -1, -1), gpu_pages).wait()
    assert torch.equal(cache[:count].flip(0), wanted), "the bytes differ"


if __name__ == "__main__":
    sections = {
        "native": native,
        "torch-pinned": torch_pinned,
        "cupy-pinned": cupy_pinned,
        "cuda.core": cuda_core,
        "exact": exact,
        "copies": copies,
        "offload": offload,
        "kv": kv,
        "start": start,
    }
    for name in sys.argv[1:] or sections:
        section(name, sections[name])
