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


def test_the_backing_is_that_of_a_heap_of_its_own(driver, monkeypatch):
    monkeypatch.setattr(egmem.rmm._egmem, "default_driver", lambda: driver)
    made, heap = [], egmem.Heap

    def kept(*args, **options):
        made.append(heap(*args, driver=driver, **options))
        return made[-1]

    monkeypatch.setattr(egmem.rmm._egmem, "Heap", kept)
    egmem.rmm.memory_resource(0, backing="registered")
    assert [heap.backing for heap in made] == ["registered"]
    with pytest.raises(egmem.InvalidArgument, match="backing is given beside heap"):
        egmem.rmm.memory_resource(heap=made[0], backing="driver")


def test_no_room_is_a_memory_error(driver):
    resource = egmem.rmm.memory_resource(heap=egmem.Heap(0, limit=32 << 20, driver=driver))
    with pytest.raises(MemoryError):
        resource.allocate(64 << 20)


def test_a_block_that_is_not_freed_stays_known(driver, monkeypatch):
    """On a stream that is captured into a graph `free_after` is refused: each replay uses the block."""
    heap = egmem.Heap(0, driver=driver)

    class Block:
        """A block of a real driver."""

        refused = True

        def __init__(self, block):
            self._block = block
            self.address = block.address

        def free_after(self, stream):
            if Block.refused:
                raise egmem.InvalidArgument("it is being captured", "free it later", None)
            self._block.close()

    class Heap:
        driver = type("Driver", (), {"is_simulated": False})

        def allocate(self, nbytes):
            return Block(heap.allocate(nbytes))

    calls = {}
    monkeypatch.setattr(egmem.rmm, "_current_gpu", lambda: 0)
    monkeypatch.setattr(mr, "CallbackMemoryResource", lambda allocate, deallocate: calls.update(a=allocate, d=deallocate))
    egmem.rmm.memory_resource(heap=Heap())
    stream = egmem.Stream(0, driver=driver)
    address = calls["a"](1000, stream)
    with pytest.raises(egmem.InvalidArgument):
        calls["d"](address, 1000, stream)
    gc.collect()
    assert heap.stats()["live_blocks"] == 1
    Block.refused = False
    calls["d"](address, 1000, stream)
    assert heap.stats()["live_blocks"] == 0


def test_blocks_are_freed_on_the_gpu_that_was_current(driver, monkeypatch):
    """A default stream has the same handle on each GPU."""
    heap = egmem.Heap(0, driver=driver)
    freed = []

    class Block:
        def __init__(self, block):
            self.block, self.address = block, block.address

        def free_after(self, stream):
            freed.append((stream.cuda_stream, stream.device_index))

    class Heap:
        driver = type("Driver", (), {"is_simulated": False})

        def allocate(self, nbytes):
            return Block(heap.allocate(nbytes))

    class Legacy:
        def __cuda_stream__(self):
            return 0, 0

    calls, current = {}, [1]
    monkeypatch.setattr(egmem.rmm, "_current_gpu", lambda: current[0])
    monkeypatch.setattr(mr, "CallbackMemoryResource", lambda allocate, deallocate: calls.update(a=allocate, d=deallocate))
    egmem.rmm.memory_resource(heap=Heap())
    calls["d"](calls["a"](1000, Legacy()), 1000, Legacy())
    assert freed == [(0, 1)]
    current[0] = 0
    with pytest.raises(egmem.InvalidArgument, match="GPU 1.*GPU 0"):
        calls["a"](1000, Legacy())
