"""Measures egmem beside PyTorch, CuPy and cuda.core: python3 measure.py. Prints a line for each figure."""

import statistics
import time

import egmem


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
    except Exception as error:  # a library is missing or refuses: the other figures still count
        print(f"{name}: not measured: {type(error).__name__}: {error}", flush=True)


SIZE = 64 << 10


def native():
    import torch

    import egmem.torch as et

    pool = et.MemPool(heap=egmem.Heap(gpu=0, reserve=256 << 20, driver=egmem.open()))
    pool.slot.measure(SIZE, 0, 0, 1000)
    times = [pool.slot.measure(SIZE, 0, 0, 100_000) / 100_000 / 1e3 for _ in range(7)]
    print(f"64 KiB alloc+free, PyTorch's allocator functions over egmem: {statistics.median(times):.3f} us", flush=True)
    side = torch.cuda.Stream()
    times = [pool.slot.measure(SIZE, 0, side.cuda_stream, 100_000) / 100_000 / 1e3 for _ in range(7)]
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
    heap = egmem.Heap(gpu=0, reserve=256 << 20, driver=egmem.open())
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
    for name, make in (
        ("egmem.torch.empty", lambda: et.empty(size, dtype=torch.uint8)),
        ("torch.empty(pin_memory=True)", lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True)),
    ):
        before = available()
        start = time.perf_counter()
        tensor = make()
        took = time.perf_counter() - start
        tensor.view(-1)[:: 1 << 12].fill_(1)
        print(f"5 GiB by {name}: {(before - available()) / (1 << 30):.2f} GiB of MemAvailable, {took:.2f} s", flush=True)
        del tensor
        if name.startswith("egmem"):
            et.heap_on().trim()
    torch._C._host_emptyCache() if hasattr(torch._C, "_host_emptyCache") else None


def copies():
    import torch

    import egmem.torch as et

    size = 256 << 20
    gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.empty(16, pin_memory=True).to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    heap = egmem.Heap(gpu=0, reserve=2 << 30, driver=egmem.open())
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


if __name__ == "__main__":
    for name, work in (
        ("native", native),
        ("torch pinned", torch_pinned),
        ("CuPy pinned", cupy_pinned),
        ("cuda.core", cuda_core),
        ("exact size", exact),
        ("copies", copies),
    ):
        section(name, work)
