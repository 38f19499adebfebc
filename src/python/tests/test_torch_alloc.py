"""The functions that PyTorch's allocator calls, on the simulator, called as PyTorch calls them."""

import ctypes
import gc
import weakref

import pytest
from test_threads import Copy, runs_beside

import egmem
from egmem import _egmem

SIZE = 1 << 20
GPU = 0


class PoolId(ctypes.Structure):
    _fields_ = [("first", ctypes.c_uint64), ("second", ctypes.c_uint64)]


ONE, TWO = PoolId(0, 1), PoolId(7, 0)


class Allocator:
    """A heap's functions, called without the GIL, or by PYFUNCTYPE with it."""

    def __init__(self, heap, keep=64 << 20, function=ctypes.CFUNCTYPE):
        self.heap = heap
        self.slot = _egmem._torch_register(self.heap, keep)
        stream, pool = ctypes.c_void_p, PoolId
        allocate, free = self.slot.functions(segments=False)
        allocate_segment, free_segment = self.slot.functions(segments=True)
        make = function(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, stream)
        self._allocate, self._allocate_segment = make(allocate), make(allocate_segment)
        release = function(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, stream)
        self._free, self._free_segment = release(free), release(free_segment)
        record, begin, end, release_pool = self.slot.more_functions
        self.record = function(None, ctypes.c_void_p, stream)(record)
        self._begin = function(None, ctypes.c_int, pool, ctypes.c_void_p)(begin)
        self._end = function(None, ctypes.c_int, pool)(end)
        self._release = function(None, ctypes.c_int, pool)(release_pool)

    def allocate(self, stream, size=SIZE):
        return self._allocate(size, GPU, stream.handle)

    def allocate_segment(self, stream):
        return self._allocate_segment(SIZE, GPU, stream.handle)

    def free(self, address, stream):
        self._free(address, SIZE, GPU, stream.handle)

    def free_segment(self, address, stream):
        self._free_segment(address, SIZE, GPU, stream.handle)

    def begin(self, pool):
        self._begin(GPU, pool, None)

    def end(self, pool):
        self._end(GPU, pool)

    def release(self, pool):
        self._release(GPU, pool)

    def several(self, stream, count=8):
        """Allocates some, and frees them: blocks that they reuse are free for others."""
        all = [self.allocate(stream) for _ in range(count)]
        for address in all:
            self.free(address, stream)
        return set(all)


@pytest.fixture
def stream(driver):
    yield egmem.Stream(GPU, driver=driver)
    assert egmem.free_deferred() == 0


# A slot stays until the process ends, and there are 16: all tests use one heap.
DRIVER = egmem.simulated("gh200x4")
ALLOCATOR = None


@pytest.fixture
def driver():
    return DRIVER


@pytest.fixture
def allocator():
    global ALLOCATOR
    ALLOCATOR = ALLOCATOR or Allocator(egmem.Heap(0, driver=DRIVER))
    return ALLOCATOR


@pytest.fixture
def with_gil(allocator):
    """The same functions, called with the GIL."""
    return Allocator(allocator.heap, function=ctypes.PYFUNCTYPE)


def test_a_stream_has_its_freed_block_again(allocator, stream):
    address = allocator.allocate(stream)
    allocator.free(address, stream)
    assert allocator.allocate(egmem.Stream(GPU, driver=DRIVER)) != address
    assert allocator.allocate(stream) == address


def test_a_freed_segment_has_another_user_after_the_gpus_work(allocator, driver, stream):
    address = allocator.allocate(stream)
    copy = Copy(driver)
    allocator.free_segment(address, stream)
    assert copy.is_whole(), "freed as cudaFree does"
    address = allocator.allocate(stream)
    live = allocator.heap.stats()["live_blocks"]
    with egmem.defer_frees():
        egmem._egmem._begin_capture(driver, GPU, stream.handle)
        allocator.free_segment(address, stream)
        assert egmem._egmem._end_capture(driver, GPU, stream.handle)
        assert allocator.heap.stats()["live_blocks"] == live
    assert allocator.heap.stats()["live_blocks"] == live - 1


def capture(allocator, driver, stream, pool, work):
    allocator.begin(pool)
    egmem._egmem._begin_capture(driver, GPU, stream.handle)
    made = work()
    assert egmem._egmem._end_capture(driver, GPU, stream.handle)
    allocator.end(pool)
    return made


def test_a_graph_s_output_outlives_the_graph_and_its_replays(allocator, driver, stream):
    output = capture(allocator, driver, stream, ONE, lambda: allocator.allocate(stream))
    copy = Copy(driver)  # a replay, on another stream
    allocator.release(ONE)
    allocator.free(output, stream)
    assert copy.is_whole() or output not in allocator.several(stream), "the replay may write it"


def test_graphs_share_a_pool_until_the_last_is_gone(allocator, driver, stream):
    def work():
        address = allocator.allocate(stream)
        allocator.free(address, stream)
        return address

    one = capture(allocator, driver, stream, ONE, work)
    assert capture(allocator, driver, stream, ONE, work) == one, "the pool's graphs run one after the other"
    allocator.release(ONE)
    assert one not in allocator.several(stream), "a graph has it"
    copy = Copy(driver)
    allocator.release(ONE)
    assert copy.is_whole(), "the last graph's memory is freed after replays"


def test_a_pool_within_a_capture_does_not_end_it(allocator, driver, stream):
    def work():
        blocks = [allocator.allocate(stream)]
        allocator.begin(TWO)  # torch.cuda.use_mem_pool
        blocks.append(allocator.allocate(stream))
        allocator.end(TWO)
        allocator.release(TWO)
        blocks.append(allocator.allocate(stream))
        for address in blocks:
            allocator.free(address, stream)
        return set(blocks)

    of_graph = capture(allocator, driver, stream, ONE, work)
    assert not of_graph & allocator.several(stream), "each replay uses them"
    allocator.release(ONE)
    live = allocator.heap.stats()["live_blocks"]
    allocator.slot.give_back_idle()
    allocator.heap.collect(wait=True)
    assert allocator.heap.stats()["live_blocks"] < live


def test_two_captures_do_not_mix_their_blocks(allocator, driver, stream):
    other = egmem.Stream(GPU, driver=driver)
    allocator.begin(ONE)
    egmem._egmem._begin_capture(driver, GPU, stream.handle)
    allocator.begin(TWO)
    egmem._egmem._begin_capture(driver, GPU, other.handle)
    first, second = allocator.allocate(stream), allocator.allocate(other)
    allocator.free(second, other)
    assert allocator.allocate(other) != second, "it is unknown which graph has it"
    egmem._egmem._end_capture(driver, GPU, other.handle)
    allocator.end(TWO)
    allocator.release(TWO)
    allocator.free(first, stream)
    again = allocator.allocate(stream)
    assert again not in (first, second), "the other graph is gone, but this one may have it"
    egmem._egmem._end_capture(driver, GPU, stream.handle)
    allocator.end(ONE)
    assert not {first, second} & (allocator.several(stream) | allocator.several(other))
    allocator.free(again, stream)
    allocator.release(ONE)


def test_a_graph_released_within_another_capture_waits_for_no_gpu(allocator, driver, stream):
    def work():
        allocator.free(allocator.allocate(stream), stream)

    capture(allocator, driver, stream, ONE, work)
    allocator.begin(TWO)
    egmem._egmem._begin_capture(driver, GPU, stream.handle)
    allocator.release(ONE)
    assert egmem.deferred() == (1, SIZE)
    assert egmem._egmem._end_capture(driver, GPU, stream.handle)
    allocator.end(TWO)
    allocator.release(TWO)
    assert egmem.free_deferred() == 0


def test_a_default_stream_that_was_recorded_is_that_of_each_gpu(allocator, driver, stream):
    other = egmem.Stream(1, driver=driver)
    address = allocator.allocate(stream)
    allocator.record(address, 0)
    # GPU 1's default stream cannot be waited for during this capture, those of the other GPUs can.
    egmem._egmem._begin_capture(driver, 1, other.handle, blocking=True)
    allocator.free(address, stream)
    assert egmem.deferred() == (1, SIZE)
    assert egmem._egmem._end_capture(driver, 1, other.handle)
    assert egmem.free_deferred() == 0


@pytest.mark.parametrize("recorded", [False, True])
def test_a_block_of_the_per_thread_default_stream_waits_for_all_work(allocator, driver, stream, recorded):
    per_thread = 2
    allocated = stream.handle if recorded else per_thread
    address = allocator._allocate(SIZE, GPU, allocated)
    if recorded:
        allocator.record(address, per_thread)
    copy = Copy(driver)
    allocator._free(address, SIZE, GPU, allocated)
    assert copy.is_whole(), "each thread has a stream of this number"


def test_a_block_of_a_captured_stream_is_freed_later(allocator, driver, stream):
    side = egmem.Stream(GPU, driver=driver)
    address = allocator.allocate(stream)
    allocator.record(address, side.handle)
    egmem._egmem._begin_capture(driver, GPU, side.handle)
    allocator.free(address, stream)
    assert egmem.deferred() == (1, SIZE)
    assert egmem._egmem._end_capture(driver, GPU, side.handle)
    assert egmem.free_deferred() == 0


class Native:
    """PyTorch's allocator object."""

    def __init__(self, allocate, free):
        self.functions = allocate, free


def test_pytorch_s_objects_stay_and_are_made_once(allocator):
    other = _egmem._torch_register(allocator.heap, 0)
    for segments in (False, True):
        native = weakref.ref(allocator.slot.allocator(Native, segments=segments))
        gc.collect()
        assert native() is not None, "PyTorch's pools refer to it without owning it"
        assert other.allocator(Native, segments=segments) is native()
        assert native().functions == allocator.slot.functions(segments=segments)


def test_a_released_graph_is_waited_for_without_the_gil(allocator, with_gil, driver, stream):
    def work():
        allocator.free(allocator.allocate(stream), stream)

    def turn():
        capture(allocator, driver, stream, ONE, work)
        copy = Copy(driver)
        beside = runs_beside(lambda: with_gil.release(ONE))
        assert copy.is_whole(), "it waited"
        return beside

    assert any(turn() for _ in range(100))


def test_a_graph_s_output_is_waited_for_without_the_gil(allocator, with_gil, driver, stream):
    def turn():
        output = capture(allocator, driver, stream, ONE, lambda: allocator.allocate(stream))
        allocator.release(ONE)
        copy = Copy(driver)
        beside = runs_beside(lambda: with_gil.free(output, stream))
        assert copy.is_whole(), "it waited"
        return beside

    assert any(turn() for _ in range(100))


def test_a_segment_that_is_freed_with_the_gil_waits_for_no_gpu(allocator, with_gil, driver, stream):
    """PyTorch has its lock then. Another thread may wait for that with the GIL, so this one must not give it up."""
    address = allocator.allocate_segment(stream)
    copy = Copy(driver)
    with_gil.free_segment(address, stream)
    assert egmem.deferred() == (1, SIZE)
    other = with_gil.allocate_segment(stream)
    assert egmem.deferred() == (1, SIZE) and not copy.is_whole(), "nothing waited"
    address = allocator.allocate_segment(stream)
    assert egmem.deferred() == (0, 0) and copy.is_whole(), "an allocation without the GIL waits"
    for each in (address, other):
        allocator.free_segment(each, stream)


def test_an_allocation_without_room_waits_without_the_gil(driver, stream):
    heap = egmem.Heap(0, limit=64 << 20, driver=driver)
    with_gil = Allocator(heap, function=ctypes.PYFUNCTYPE)
    blocks = list(iter(lambda: with_gil.allocate_segment(stream), None))
    assert len(blocks) >= 32

    def turn():
        copy = Copy(driver)
        with_gil.free_segment(blocks.pop(0), stream)
        beside = runs_beside(lambda: blocks.append(with_gil.allocate(stream)))
        assert blocks[-1] and copy.is_whole(), "it waited for the freed segment"
        return beside

    assert any(turn() for _ in range(16))
    without = Allocator(heap)
    for address in blocks:
        without.free_segment(address, stream)
    assert heap.stats()["live_blocks"] == 0


def test_a_gpu_without_access_gets_no_memory(driver):
    heap = egmem.Heap(0, access_by=[0], driver=driver)
    allocator = Allocator(heap)
    streams = [egmem.Stream(gpu, driver=driver) for gpu in range(2)]
    for allocate, free in ((allocator._allocate, allocator._free), (allocator._allocate_segment, allocator._free_segment)):
        for _ in range(2):
            assert allocate(SIZE, 1, streams[1].handle) is None
            error = allocator.slot.last_error()
            assert isinstance(error, egmem.NotAccessible) and "GPU 1" in error.message
            address = allocate(SIZE, 0, streams[0].handle)
            assert address
            free(address, SIZE, 0, streams[0].handle)
    allocator.slot.give_back_idle()
    heap.collect(wait=True)
    assert heap.stats()["live_blocks"] == 0
