"""egmem.rmm with the real package on the simulator: RMM calls the resource, and no GPU is needed for that."""

import gc

import pytest

import egmem

mr = pytest.importorskip("rmm.mr")
import egmem.rmm  # noqa: E402


def test_allocations_are_blocks_of_the_heap(driver):
    heap = egmem.Heap(2, driver=driver)
    resource = egmem.rmm.memory_resource(heap=heap)
    assert isinstance(resource, mr.CallbackMemoryResource)
    address = resource.allocate(1000)
    assert address % 256 == 0 and heap.stats()["live_blocks"] == 1
    other = resource.allocate(0)
    resource.deallocate(address, 1000)
    resource.deallocate(other, 0)
    assert heap.stats()["live_blocks"] == 0


def test_other_resources_stand_on_it(driver):
    heap = egmem.Heap(0, driver=driver)
    resource = egmem.rmm.memory_resource(heap=heap)
    limiting = mr.LimitingResourceAdaptor(resource, 64 << 20)
    address = limiting.allocate(32 << 20)
    assert heap.stats()["used"] >= 32 << 20
    limiting.deallocate(address, 32 << 20)
    del limiting, resource
    gc.collect()
    assert heap.stats()["live_blocks"] == 0


def test_no_room_is_a_memory_error(driver):
    resource = egmem.rmm.memory_resource(heap=egmem.Heap(0, limit=32 << 20, driver=driver))
    with pytest.raises(MemoryError):
        resource.allocate(64 << 20)
