"""Arguments: sizes as numbers and text, nodes and GPUs as numbers and objects, and what is wrong with others."""

import numpy as np
import pytest

import egmem
import egmem.kv

MIB = 1 << 20


@pytest.mark.parametrize("size", [MIB, "1MiB", "1 MiB", "0.5 MiB", "1048576", np.int64(MIB), np.uint8(64)])
def test_sizes_are_numbers_or_text(driver, size):
    wanted = {"0.5 MiB": MIB // 2}.get(size, MIB) if isinstance(size, str) else int(size)
    assert egmem.Buffer(size, driver=driver).nbytes == wanted
    heap = egmem.Heap(limit="64MiB", chunk="2MiB", reserve=size, thread_cache="1KiB", driver=driver)
    assert heap.limit == 64 * MIB and heap.backed == 2 * MIB
    block = heap.allocate(size, align="4KiB")
    assert block.nbytes == wanted and block.address % 4096 == 0
    assert block.read("16B", "8B") == block.read(16, 8)
    assert heap.trim(keep=size) >= 0
    assert egmem.Pool(0, max_size="64MiB", driver=driver).allocate(size).nbytes == wanted
    assert egmem.kv.Tier(2, size, driver=driver).page_bytes == wanted
    assert egmem.kv.Tier.bytes_needed(2, size) == egmem.kv.Tier.bytes_needed(2, wanted)


@pytest.mark.parametrize("size", [-1, 1 << 64, 1e9, 0.5, np.int8(-3), np.float32(2), "a lot", "-1", "", "1 MB/s"])
def test_sizes_out_of_range_are_named(driver, size):
    heap = egmem.Heap(0, driver=driver)
    buffer = egmem.Buffer(1, driver=driver)
    calls = [
        lambda: egmem.Buffer(size, driver=driver),
        lambda: egmem.Heap(0, limit=size, driver=driver),
        lambda: heap.allocate(size),
        lambda: heap.allocate(1, align=size),
        lambda: heap.reserve(size),
        lambda: egmem.Pool(0, max_size=size, driver=driver),
        lambda: egmem.kv.Tier(1, size, driver=driver),
        lambda: buffer.read(size),
        lambda: buffer.write(b"x", size),
        lambda: buffer.fill(0, 0, size),
        lambda: buffer.view(offset=size),
    ]
    for call in calls:
        with pytest.raises(egmem.InvalidArgument) as caught:
            call()
        assert str(size) in caught.value.message and "64MiB" in caught.value.remedy, caught.value


def test_no_bytes_are_refused_where_memory_is_allocated(driver):
    heap = egmem.Heap(0, driver=driver)
    pool = egmem.Pool(0, driver=driver)
    for zero in (0, "0", "0 GiB"):
        for call in (
            lambda: egmem.Buffer(zero, driver=driver),
            lambda: heap.allocate(zero),
            lambda: heap.allocate(1, align=zero),
            lambda: pool.allocate(zero),
            lambda: egmem.kv.Tier(1, zero, driver=driver),
        ):
            with pytest.raises(egmem.InvalidArgument):
                call()
    with pytest.raises(egmem.InvalidArgument, match="2..63"):
        heap.allocate(1 << 63)


@pytest.mark.parametrize("size", [None, [1], b"1", object()])
def test_other_types_are_no_sizes(driver, size):
    with pytest.raises(TypeError, match="64MiB"):
        egmem.Buffer(size, driver=driver)


def test_places_are_numbers_or_objects(driver):
    topology = driver.topology()
    node, gpu = topology.node(1), topology.gpu(2)
    assert egmem.Buffer(1, node, driver=driver).node == egmem.Buffer(1, np.int16(1), driver=driver).node == 1
    assert egmem.Buffer(1, near_gpu=gpu, driver=driver).node == 2
    assert egmem.Buffer(1, device=gpu, driver=driver).location == "GPU 2"
    only = egmem.Buffer(1, access_by=[gpu, 0], driver=driver)
    assert [only.access(each) for each in topology.gpus] == ["rw", "", "rw", ""] and only.access(2) == "rw"
    assert egmem.Heap(node, driver=driver).node == egmem.Pool(node, driver=driver).node == 1
    assert egmem.Heap(near_gpu=gpu, driver=driver).node == egmem.Pool(near_gpu=gpu, driver=driver).node == 2
    assert egmem.Heap(device=gpu, driver=driver).node is None
    assert "node 2" in repr(egmem.kv.Tier(1, 4096, near_gpu=gpu, driver=driver))
    assert egmem.Stream(gpu, driver=driver).gpu == egmem.Pool(gpu=gpu, driver=driver).node == 2
    assert topology.free_memory(node) == topology.free_memory(1)


def test_places_that_are_none(driver):
    for place in (1 << 40, -(1 << 40)):
        with pytest.raises(egmem.NoSuchPlace, match=str(place)):
            egmem.Buffer(1, node=place, driver=driver)
        with pytest.raises(egmem.NoSuchPlace, match=str(place)):
            egmem.Buffer(1, near_gpu=place, driver=driver)
    with pytest.raises(TypeError, match="integer or an egmem.Node, not str"):
        egmem.Buffer(1, node="0", driver=driver)
    with pytest.raises(TypeError, match="integer or an egmem.Gpu, not Node"):
        egmem.Buffer(1, near_gpu=driver.topology().node(0), driver=driver)
    with pytest.raises(TypeError, match="gpu"):
        egmem.Buffer(1, gpu=0, driver=driver)
    with pytest.raises(egmem.InvalidArgument, match="near_gpu"):
        egmem.Buffer(1, 0, near_gpu=0, driver=driver)


@pytest.mark.parametrize("count", [-1, 1 << 64])
def test_counts_out_of_range_are_named(driver, count):
    tier = egmem.kv.Tier(2, 4096, driver=driver)
    pages = egmem.kv.GpuPages([0], 4096, 4096, 1)
    stream = egmem.Stream(0, driver=driver)
    with tier.prepare_store([b"key"]) as store:
        for call in (
            lambda: egmem.kv.Tier(count, 4096, driver=driver),
            lambda: egmem.kv.Tier.bytes_needed(count, 4096),
            lambda: egmem.kv.GpuPages([0], 4096, 4096, count),
            lambda: tier.page_address(count),
            lambda: tier.load([count], [0], pages, stream=stream),
            lambda: tier.load([0], [count], pages, stream=stream),
            lambda: store.view(count),
        ):
            with pytest.raises(egmem.InvalidArgument, match=str(count)):
                call()
        store.close()


def test_fill_takes_a_byte(driver):
    buffer = egmem.Buffer(16, driver=driver)
    for byte in (256, -1, 1 << 70):
        with pytest.raises(egmem.InvalidArgument, match=f"byte is {byte}; valid: 0 to 255"):
            buffer.fill(byte)
    with pytest.raises(TypeError):
        buffer.fill(b"x")
    buffer.fill(np.uint8(255))
    assert buffer.read() == b"\xff" * 16


def test_shapes_may_leave_one_dimension_open(driver):
    buffer = egmem.Buffer(96, driver=driver)
    assert buffer.view("f4", -1).shape == (24,)
    assert buffer.view("f4", (-1, np.int64(6))).shape == (4, 6)
    assert buffer.view(shape=(2, -1), offset=32).shape == (2, 32)
    for shape in ((-1, 5), (-1, -1), (-1, 0), (-2, 3), (-1, 1 << 62, 4)):
        with pytest.raises(egmem.InvalidArgument):
            buffer.view("f4", shape)
    for shape in ((-1, 24), [-1, 24], -1):
        with pytest.raises(egmem.InvalidArgument, match="which is a shape") as caught:
            buffer.view(shape)
        assert "pass shape=" in caught.value.remedy


@pytest.mark.parametrize("gpus", [1, [1], (1,), range(1, 2), np.int64(1), np.array(1), np.array([1])])
def test_one_gpu_or_several_have_access(driver, gpus):
    buffer = egmem.Buffer(1, access_by=gpus, driver=driver)
    assert [buffer.access(gpu) for gpu in range(4)] == ["", "rw", "", ""]
    gpu = driver.topology().gpu(1)
    for memory in (egmem.Heap(0, access_by=gpu, driver=driver).allocate(1), egmem.Pool(0, access_by=gpu, driver=driver).allocate(1)):
        assert memory.access(gpu) == "rw" and memory.access(2) == ""
    egmem.kv.Tier(1, 4096, access_by=gpu, driver=driver)


def test_an_array_of_several_numbers_is_a_list(driver):
    buffer = egmem.Buffer(1, access_by=np.array([0, 2]), driver=driver)
    assert [buffer.access(gpu) for gpu in range(4)] == ["rw", "", "rw", ""]


def test_what_is_no_list_is_named(driver):
    heap = egmem.Heap(0, driver=driver)
    calls = {
        "int where a list is needed: pass [64]": lambda: heap.allocate_many(64),
        "str where a list is needed: pass ['64']": lambda: heap.allocate_many("64"),
        "int where a list is needed: pass [4096]": lambda: egmem.kv.GpuPages(4096, 4096, 4096, 1),
        "int where a list is needed: pass [3]": lambda: egmem.connect("unix:/no-such", driver=driver, server_users=3),
        "a GPU is an integer or an egmem.Gpu, not str": lambda: egmem.Buffer(1, access_by="01", driver=driver),
    }
    for text, call in calls.items():
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == text
    assert len(heap.allocate_many(size for size in (1, 2, 3))) == 3


def test_pages_of_several_sizes_share_bytes(driver):
    for sizes, text in (([], "page_bytes is empty"), ([4096, 8192], "several sizes of pages; valid: bytes")):
        with pytest.raises(egmem.InvalidArgument, match=text):
            egmem.kv.Tier(pages=4, page_bytes=sizes, driver=driver)


def test_times_have_no_end_and_are_not_negative(driver):
    assert egmem.kv.Tier(1, 4096, driver=driver).events().get(0) is None
    producer, consumer = egmem.ring(8, driver=driver)
    producer.send(b"01234567")
    assert consumer.receive(timeout=float("inf")) == b"01234567"
    egmem.Heap(0, decay=float("inf"), driver=driver)
    for wrong in (-1, 1e300, float("nan"), float("-inf")):
        for call in (
            lambda: consumer.receive(timeout=wrong),
            lambda: egmem.doctor(sim="gh200", timeout=wrong),
            lambda: egmem.Heap(0, decay=wrong, driver=driver),
        ):
            with pytest.raises(egmem.InvalidArgument, match="valid: 0 or more"):
                call()


def test_a_list_of_any_length_is_refused_without_a_panic(driver):
    class Endless:
        def __len__(self):
            return 2**62

        def __getitem__(self, index):
            raise IndexError

    tier, heap = egmem.kv.Tier(1, 4096, driver=driver), egmem.Heap(0, driver=driver)
    for given in (range(2**62), Endless()):
        for call in (
            lambda: tier.lookup(given),
            lambda: tier.lookup([b"key"], group=given),
            lambda: heap.allocate_many(given),
            lambda: egmem.kv.GpuPages(given, 1, 1, 1),
        ):
            with pytest.raises(MemoryError):
                call()
