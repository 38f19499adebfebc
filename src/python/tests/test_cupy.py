"""egmem.cupy on the simulator, with a stand-in for the parts of CuPy that its pool consists of."""

import ctypes
import gc
import importlib
import sys
import threading
import types
import weakref

import pytest

import egmem


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        self.status = status


class OutOfMemoryError(MemoryError):
    pass


class CFunctionAllocatorMemory:
    """Keeps no owner, as CuPy's: it has only the numbers."""

    def __init__(self, parameter, malloc, free, nbytes):
        self._parameter, self._free = parameter, free
        self.ptr = malloc(parameter, nbytes, 0)

    def __del__(self):
        if self.ptr:
            self._free(self._parameter, self.ptr, 0)


class CFunctionAllocator:
    """Calls the functions as CuPy does: with the GIL."""

    def __init__(self, parameter, malloc, free, owner):
        pointer = ctypes.c_void_p
        self._malloc = ctypes.PYFUNCTYPE(pointer, pointer, ctypes.c_size_t, ctypes.c_int)(malloc)
        self._free = ctypes.PYFUNCTYPE(None, pointer, pointer, ctypes.c_int)(free)
        self._parameter, self._owner = parameter, owner

    def malloc(self, nbytes):
        return CFunctionAllocatorMemory(self._parameter, self._malloc, self._free, nbytes)


class MemoryPool:
    """Fails as CuPy's does: after a retry, and without a context."""

    limit = 1 << 40

    def __init__(self, allocator):
        self._allocator = allocator

    def malloc(self, size):
        if size > self.limit:
            raise OutOfMemoryError
        for _ in range(2):
            try:
                return self._allocator(size)
            except CUDARuntimeError as error:
                if error.status != 2:
                    raise
        raise OutOfMemoryError


@pytest.fixture
def module(monkeypatch):
    cuda = types.SimpleNamespace(
        MemoryPool=MemoryPool,
        CFunctionAllocator=CFunctionAllocator,
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        runtime=types.SimpleNamespace(CUDARuntimeError=CUDARuntimeError),
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.delitem(sys.modules, "egmem.cupy", raising=False)
    yield importlib.import_module("egmem.cupy")
    sys.modules.pop("egmem.cupy", None)


def pool_of(module, heap):
    return module._Pool(egmem._egmem._CupySource(heap))


def test_an_error_of_cupys_pool_has_egmems_as_its_cause(driver, module):
    heap = egmem.Heap(0, limit="32MiB", driver=driver)
    pool = pool_of(module, heap)
    kept = pool.malloc(1 << 20)
    assert kept.ptr
    with pytest.raises(OutOfMemoryError) as raised:
        pool.malloc(64 << 20)
    cause = raised.value.__cause__
    assert isinstance(cause, egmem.OutOfMemory) and "64 MiB" in cause.message and cause.remedy
    pool.limit = 1 << 20
    with pytest.raises(OutOfMemoryError) as raised:
        pool.malloc(2 << 20)
    assert raised.value.__cause__ is None, "the pool's own limit is no failure of the heap"


def test_memory_that_the_gpu_cannot_reach_is_no_lack_of_room(driver, module):
    heap = egmem.Heap(0, access_by=[1], driver=driver)
    with pytest.raises(egmem.NotAccessible, match="GPU 0"):
        pool_of(module, heap).malloc(1 << 20)


def test_memory_outlives_its_pool(driver, module):
    heap = egmem.Heap(0, driver=driver)
    pool = pool_of(module, heap)
    kept = [pool.malloc(1 << 20) for _ in range(2)]
    del pool
    gc.collect()
    for live in 2, 1:
        assert heap.stats()["live_blocks"] == live
        kept.pop()
    assert heap.stats()["live_blocks"] == 0


def test_a_pool_ends_without_the_garbage_collector(driver, module):
    pool = pool_of(module, egmem.Heap(0, driver=driver))
    ended = weakref.ref(pool)
    gc.disable()
    try:
        del pool
        assert ended() is None
    finally:
        gc.enable()


def test_the_error_of_an_allocation_is_its_thread_s(driver):
    source = egmem._egmem._CupySource(egmem.Heap(0, limit="32MiB", driver=driver))
    allocator = CFunctionAllocator(*source.functions, source)
    found = []

    def fail():
        assert not allocator.malloc(64 << 20).ptr
        failed.set()
        looked.wait()
        found.extend([source.last_error(), source.last_error()])

    failed, looked = threading.Event(), threading.Event()
    thread = threading.Thread(target=fail)
    thread.start()
    failed.wait()
    here = source.last_error()
    looked.set()
    thread.join()
    assert here is None
    assert isinstance(found[0], egmem.OutOfMemory) and found[1] is None


def test_cupy_gets_no_memory_of_a_simulated_driver(driver, module):
    with pytest.raises(egmem.InvalidArgument, match="simulated"):
        module.memory_pool(heap=egmem.Heap(0, driver=driver))
