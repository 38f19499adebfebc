"""Heaps, blocks, pools and streams."""

import gc
import sys
import threading

import numpy as np
import pytest

import egmem
import egmem.kv


def test_blocks(driver):
    with egmem.Heap(1, limit=64 << 20, driver=driver) as heap:
        block = heap.allocate(1000, align=4096)
        assert (block.nbytes, block.node, block.address % 4096) == (1000, 1, 0)
        assert isinstance(block, egmem.Block) and isinstance(block, egmem.Memory)
        np.asarray(block)[:] = 3
        assert heap.stats()["live_blocks"] == 1 and heap.node == 1 and heap.limit == 64 << 20
        block.close()
        assert heap.stats()["live_blocks"] == 0
        assert not any(heap.allocate_zeroed(100).read())
        with pytest.raises(egmem.InvalidArgument, match="power of two"):
            heap.allocate(10, align=3)
        assert "64 MiB" in repr(heap)
        assert heap.to_svg().startswith("<svg")
    assert heap.closed and "closed" in repr(heap)
    with pytest.raises(egmem.Closed):
        heap.allocate(1)


def test_a_heap_tells_what_it_is_and_why(driver):
    discrete = egmem.simulated("h200x8")

    def told(of, **options):
        heap = egmem.Heap(0, limit="64MiB", driver=of, **options)
        assert not any(heap.allocate_zeroed("3MiB").read(4096))
        return heap.backing, heap.backing_reason

    asked = "the program asked for it"
    assert told(discrete) == told(discrete, backing="auto") == ("registered", "registered memory is pinned faster")
    assert told(discrete, backing="driver") == ("driver", asked)
    assert told(discrete, backing="registered") == ("registered", asked)
    assert told(driver) == ("driver", "registered memory was never measured on coherent machines")
    on_gpu = egmem.Heap(device=1, driver=discrete)
    assert (on_gpu.backing, on_gpu.backing_reason) == ("driver", "registered memory needs a host node")


def test_blocks_outlive_the_heap_and_views_the_blocks(driver):
    free = driver.topology().free_memory(0)
    heap = egmem.Heap(0, driver=driver)
    array = np.asarray(heap.allocate(10_000))
    heap.close()
    del heap
    gc.collect()
    array[:] = 5
    assert array.sum() == 50_000
    del array
    gc.collect()
    assert driver.topology().free_memory(0) == free


def test_a_view_keeps_its_block(driver):
    heap = egmem.Heap(0, driver=driver)
    array = np.from_dlpack(heap.allocate(1 << 20))
    array[:] = 1
    for _ in range(20):
        np.asarray(heap.allocate(1 << 20))[:] = 2
    assert array.sum() == 1 << 20


def test_progress_is_told_after_each_chunk_and_may_stop(driver):
    heap = egmem.Heap(0, limit=2 << 30, chunk=256 << 20, driver=driver)
    told = []
    heap.reserve(600 << 20, progress=lambda done, total: told.append((done >> 20, total >> 20, heap.backed >> 20)))
    assert told == [(256, 600, 256), (512, 600, 512), (768, 768, 768)]

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heap.reserve(1 << 30, progress=stop)
    assert heap.backed == 768 << 20
    heap.trim()
    assert heap.backed == 0
    heap.reserve(300 << 20)
    assert heap.backed == 512 << 20
    assert heap.trim(keep=64 << 20) == 256 << 20


def test_frees_in_the_order_of_a_stream(driver):
    heap = egmem.Heap(0, limit=4 << 20, driver=driver)
    stream = egmem.Stream(0, driver=driver)
    block = heap.allocate(4 << 20)
    view = memoryview(block)
    with pytest.raises(egmem.InUse):
        block.free_after(stream)
    view.release()
    block.free_after(stream)
    assert block.closed and heap.stats()["deferred_blocks"] == 1
    with pytest.raises(egmem.Closed):
        block.free_after(stream)
    assert heap.collect(wait=True) == 1 and heap.collect() == 0
    other = egmem.Stream(0, driver=egmem.simulated())
    block = heap.allocate(100)
    with pytest.raises(egmem.InvalidArgument, match="another driver"):
        block.free_after(other)
    assert not block.closed and block.read() is not None
    with pytest.raises(egmem.NotSupported):
        block.free_after(12345)
    with pytest.raises(egmem.InvalidArgument, match="no stream"):
        block.free_after("stream")


class CupyStream:
    """As much of CuPy's streams as is asked for. The default ones do not tell their GPU."""

    def __init__(self, ptr, device_id):
        self.ptr, self.device_id = ptr, device_id


def test_default_streams_of_other_libraries_need_a_gpu(driver):
    """On the simulator a stream of another library is refused, once it is clear which one it is."""
    block = egmem.Heap(0, driver=driver).allocate(100)
    pool = egmem.Pool(0, driver=driver)
    of_pool = pool.allocate(100)
    tier = egmem.kv.Tier(1, 4096, driver=driver)
    cache = egmem.Buffer(4096, driver=driver)
    gpu_pages = egmem.kv.GpuPages([cache.address], 4096, 4096, 1, keep=cache)
    calls = (
        block.free_after,
        of_pool.free_after,
        of_pool.on("cpu").ready_on,
        lambda stream, **gpu: pool.allocate(100, stream, **gpu),
        lambda stream, **gpu: tier.load([], [], gpu_pages, stream=stream, **gpu),
    )
    for call in calls:
        for stream in (0, 1, 2, CupyStream(0, -1)):
            with pytest.raises(egmem.InvalidArgument, match="gpu="):
                call(stream)
            with pytest.raises(egmem.NotSupported):
                call(stream, gpu=1)
        for stream in (12345, CupyStream(0, 1)):
            with pytest.raises(egmem.NotSupported):
                call(stream)
    with pytest.raises(egmem.NotSupported):
        of_pool.on("cuda:1").ready_on(0)
    with pytest.raises(egmem.NotSupported):
        egmem.Heap(0, driver=egmem.simulated("gh200")).allocate(1).free_after(0)


def test_pools(driver):
    with egmem.Pool(1, max_size=64 << 20, driver=driver) as pool:
        stream = egmem.Stream(1, driver=driver)
        block = pool.allocate(1 << 20, stream)
        assert isinstance(block, egmem.PoolBlock) and block.node == 1 and block.nbytes == 1 << 20
        np.asarray(block)[:] = 7
        assert pool.stats()["used"] == 1 << 20
        block.free_after(stream)
        stream.synchronize()
        assert block.closed and pool.stats()["used"] == 0
        with pytest.raises(egmem.OutOfMemory):
            pool.allocate(1 << 30)
        kept = np.asarray(pool.allocate(4096))
    assert pool.closed
    kept[:] = 1  # the pool lives as long as its allocations
    with pytest.raises(egmem.Closed):
        pool.allocate(1)


def test_a_stream_has_cudas_protocol(driver):
    stream = egmem.Stream(2, driver=driver)
    assert stream.__cuda_stream__() == (0, stream.handle) and stream.gpu == 2
    with pytest.raises(egmem.NoSuchPlace):
        egmem.Stream(9, driver=driver)


def test_threads(driver):
    heap = egmem.Heap(0, limit=512 << 20, driver=driver)
    failed = []

    def work(number):
        try:
            for round in range(100):
                array = np.asarray(heap.allocate(1000 + 777 * round))
                array[:] = number
                assert (array == number).all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed
    gc.collect()
    assert heap.stats()["live_blocks"] == 0


def test_many_blocks_in_one_object(driver):
    heap = egmem.Heap(1, limit=64 << 20, driver=driver)
    sizes = [3 + 7 * number for number in range(1000)]
    with heap.allocate_many(sizes, align=64) as blocks:
        assert len(blocks) == 1000 and blocks.nbytes == sum(sizes) and blocks.driver == driver
        addresses = np.asarray(blocks.addresses)
        assert addresses.dtype == np.uint64 and not (addresses % 64).any()
        ends = addresses + np.array(sizes, np.uint64)
        order = np.argsort(addresses)
        assert (ends[order][:-1] <= addresses[order][1:]).all(), "none overlap"
        assert heap.stats()["live_blocks"] == 1000
        for number, block in enumerate(blocks):
            assert isinstance(block, egmem.Block) and (block.nbytes, block.node) == (sizes[number], 1)
            assert block.address == addresses[number]
            block.write(b"%d" % number)
        assert blocks[-1].address == addresses[-1] and blocks[999].read(0, 3) == b"999"
        for index in (1000, -1001, 1 << 40):
            with pytest.raises(IndexError):
                blocks[index]
        del block
    assert blocks.closed and heap.stats()["live_blocks"] == 0 and "closed" in repr(blocks)
    for use in (lambda: len(blocks), lambda: blocks[0], lambda: blocks.addresses):
        with pytest.raises(egmem.Closed):
            use()
    blocks.close()


def test_many_blocks_are_freed_with_their_last_reference(driver):
    heap = egmem.Heap(0, driver=driver)
    blocks = heap.allocate_many(np.full(100, 64))
    array = np.asarray(blocks[7])
    with pytest.raises(egmem.InUse, match="1 of"):
        blocks.close()
    with pytest.raises(egmem.InvalidArgument, match="together") as caught:
        blocks[3].free_after(egmem.Stream(0, driver=driver))
    assert "egmem.Blocks" in caught.value.remedy
    blocks[3].fill(1)
    heap.close()
    del blocks
    gc.collect()
    array[:] = 9
    assert array.sum() == 9 * 64
    del array


def test_many_blocks_or_none(driver):
    heap = egmem.Heap(0, limit=4 << 20, chunk="2MiB", driver=driver)
    with pytest.raises(egmem.OutOfMemory):
        heap.allocate_many(["1MiB"] * 5)
    assert heap.stats()["live_blocks"] == 0
    assert len(heap.allocate_many(["1MiB"] * 4)) == 4 and len(heap.allocate_many([])) == 0
    for sizes, why in (([1, 0], "size 1 of 2"), ([-1], "-1"), (["x"], "x")):
        with pytest.raises(egmem.InvalidArgument, match=why):
            heap.allocate_many(sizes)
    for sizes in (5, "64MiB", [None]):
        with pytest.raises(TypeError):
            heap.allocate_many(sizes)


def test_many_blocks_in_the_order_of_a_stream(driver):
    heap = egmem.Heap(0, driver=driver)
    stream = egmem.Stream(0, driver=driver)
    blocks = heap.allocate_many([100] * 50)
    element = blocks[0]
    with pytest.raises(egmem.InUse):
        blocks.free_after(stream)
    del element
    with pytest.raises(egmem.InvalidArgument):
        blocks.free_after(egmem.Stream(0, driver=egmem.simulated()))
    assert len(blocks) == 50
    blocks.free_after(stream)
    assert blocks.closed and heap.stats()["deferred_blocks"] == 50
    assert heap.collect(wait=True) == 50


def test_a_million_blocks_take_tens_of_bytes_each(driver):
    heap = egmem.Heap(0, driver=driver)
    count = 100_000
    blocks = heap.allocate_many([16] * count, align=16)
    assert sys.getsizeof(blocks) / count < 40
    assert heap.stats()["live_blocks"] == count
