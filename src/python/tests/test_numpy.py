"""egmem.numpy: arrays in shared heaps, of files, and over memory that is there."""

import gc
import os
import pickle

import numpy as np
import pytest

import egmem
import egmem.numpy
from egmem import _heaps

MIB = 1 << 20


def shared(driver, node=0):
    return _heaps.heap_on(driver, node, "egmem.numpy")


def test_small_arrays_take_their_size(driver):
    free = driver.topology().free_memory(0)
    arrays = [egmem.numpy.zeros(10, driver=driver) for _ in range(500)]
    assert free - driver.topology().free_memory(0) <= 2 * 16 * MIB
    assert shared(driver).stats()["live_blocks"] == 500
    for number, array in enumerate(arrays):
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(arrays))
    del arrays, array
    gc.collect()
    assert shared(driver).stats()["live_blocks"] == 0


def test_large_arrays_are_mapped_for_themselves(driver):
    array = egmem.numpy.empty((65, MIB), "u1", node=2, driver=driver)
    assert array.shape == (65, MIB) and shared(driver, 2).backed == 0
    named = egmem.numpy.zeros(3, driver=driver, label="mine")
    assert shared(driver).backed == 0 and not named.any()
    told = []
    egmem.numpy.empty(65 * MIB, "u1", driver=driver, progress=lambda done, total: told.append((done, total)))
    egmem.numpy.empty(10, "u1", driver=driver, progress=lambda done, total: told.append((done, total)))
    assert told == [(64 * MIB, 66 * MIB), (66 * MIB, 66 * MIB), (10, 10)]


def test_arrays_of_registered_memory_are_mapped_for_themselves():
    driver = egmem.simulated("h200x8")

    def paths(nbytes, backing):
        array = egmem.numpy.zeros(nbytes, "u1", driver=driver, label="mine", backing=backing)
        assert not array[::4096].any()
        return [entry.kind for entry in egmem.allocations() if entry.label == "mine"]

    assert paths(10, "registered") == paths(64 * MIB, "auto") == paths(65 * MIB, "registered") == ["registered"]
    # Several chunks, over whose borders other libraries could not copy.
    assert paths(65 * MIB, "auto") == paths(10, "driver") == ["vmm"]
    array = egmem.numpy.array([1.0, 2.0], driver=driver, backing="auto")
    assert array.tolist() == [1.0, 2.0] and shared(driver).backed == 0
    with pytest.raises(egmem.InvalidArgument, match="backing is given beside heap"):
        egmem.numpy.empty(10, heap=egmem.Heap(driver=driver), backing="auto")


def test_places_of_arrays(driver):
    topology = driver.topology()
    for place in ({"node": 3}, {"node": topology.node(3)}, {"near_gpu": 3}, {"near_gpu": topology.gpu(3)}):
        before = shared(driver, 3).stats()["live_blocks"]
        kept = egmem.numpy.array([1, 2, 3], driver=driver, **place)
        assert shared(driver, 3).stats()["live_blocks"] == before + 1 and kept.tolist() == [1, 2, 3]
        del kept
    heap = egmem.Heap(1, driver=driver)
    for place in ({}, {"node": 1}, {"near_gpu": 1}, {"driver": driver}):
        egmem.numpy.empty(3, heap=heap, **place)
    assert heap.stats()["allocated_blocks"] == 4
    for place in ({"node": 0}, {"near_gpu": 2}, {"driver": egmem.simulated()}, {"label": "mine"}):
        with pytest.raises(egmem.InvalidArgument, match="heap"):
            egmem.numpy.empty(3, heap=heap, **place)
    with pytest.raises(egmem.InvalidArgument, match="a GPU"):
        egmem.numpy.empty(3, heap=egmem.Heap(device=0, driver=driver), node=0)
    with pytest.raises(egmem.InvalidArgument, match="exclude"):
        egmem.numpy.empty(3, node=0, near_gpu=0, driver=driver)
    with pytest.raises(egmem.NoSuchPlace):
        egmem.numpy.empty(3, node=9, driver=driver)
    with pytest.raises(TypeError, match="device"):
        egmem.numpy.empty(3, device=0)


def test_shared_heaps_give_memory_back(driver):
    heap = egmem.Heap(0, decay=0.01, driver=driver)
    free = driver.topology().free_memory(0)
    heap.allocate(MIB).close()
    assert heap.backed
    while heap.backed:
        pass
    assert driver.topology().free_memory(0) >= free
    with pytest.raises(egmem.InvalidArgument, match="decay is -1"):
        egmem.Heap(0, decay=-1, driver=driver)


def test_a_forked_child_has_heaps_of_its_own(driver):
    kept = egmem.numpy.zeros(4, driver=driver)
    child = os.fork()
    if child == 0:
        try:
            own = egmem.numpy.zeros(4, driver=egmem.simulated("gh200x4"))
            own[:] = 1
            os._exit(0 if own.sum() == 4 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not kept.any()


def test_shapes(driver):
    heap = egmem.Heap(0, driver=driver)
    for shape in ((np.int64(2), 3), [2, np.uint8(3)], np.array([2, 3])):
        assert egmem.numpy.empty(shape, heap=heap).shape == (2, 3)
    assert egmem.numpy.empty(np.int32(4), heap=heap).shape == (4,)
    assert egmem.numpy.empty((), heap=heap).shape == () and egmem.numpy.empty((0, 3), heap=heap).shape == (0, 3)
    with pytest.raises(egmem.InvalidArgument, match="-1") as caught:
        egmem.numpy.empty((2, -1), heap=heap)
    assert "egmem.numpy.asarray" in caught.value.remedy
    with pytest.raises(TypeError):
        egmem.numpy.empty(2.0, heap=heap)
    with pytest.raises(TypeError, match="Python objects"):
        egmem.numpy.empty(2, object, heap=heap)


def test_arrays_over_memory_copy_nothing(driver):
    buffer = egmem.Buffer(96, driver=driver)
    array = egmem.numpy.asarray(buffer, "f4", (np.int64(6), -1))
    assert array.shape == (6, 4) and array.ctypes.data == buffer.address
    assert egmem.numpy.asarray(buffer).shape == (96,) and egmem.numpy.asarray(buffer, "f8").shape == (12,)
    assert egmem.numpy.asarray(buffer, "f4", 5).shape == (5,) and egmem.numpy.asarray(buffer, "f4", ()).shape == ()
    part = egmem.numpy.asarray(buffer, "u1", (2, -1), offset="32")
    part[:] = 7
    assert part.shape == (2, 32) and buffer.read(31, 2) == b"\0\7"
    assert egmem.numpy.asarray(buffer, [("a", "u4"), ("b", "f8")]).shape == (8,)
    assert egmem.numpy.asarray(buffer, "f4", (0, 3)).shape == (0, 3)
    for dtype, shape, offset in (
        ("f4", 25, 0), ("f4", (5, -1), 0), ("f4", (0, -1), 0), ("u1", 1, 96), ("u1", None, 97), ("f4", None, 1), ("f4", -2, 0),
        ("f4", (-1, -1), 0),
    ):
        with pytest.raises(egmem.InvalidArgument):
            egmem.numpy.asarray(buffer, dtype, shape, offset=offset)
    del part
    with pytest.raises(egmem.InUse):
        buffer.close()


@pytest.mark.parametrize(
    "source",
    [
        np.arange(12, dtype="f4").reshape(3, 4),
        np.asfortranarray(np.arange(12, dtype=">i8").reshape(3, 4)),
        np.arange(12)[::2],
        np.array(5.5),
        np.zeros((0, 3), "c8"),
        np.array([(1, 2.5)], [("a", "u1"), ("b", "f8")]),
        np.arange(5 * MIB, dtype="f8"),
    ],
    ids=["plain", "fortran", "strided", "scalar", "empty", "structured", "large"],
)
def test_files_come_back(driver, tmp_path, source):
    path = tmp_path / "array.npy"
    np.save(path, source)
    told = []
    loaded = egmem.numpy.load(path, driver=driver, node=1, progress=lambda done, total: told.append((done, total)))
    assert loaded.dtype == source.dtype and loaded.shape == source.shape and (loaded == source).all()
    assert shared(driver, 1).stats()["live_blocks"] == (source.nbytes > 0)
    if source.nbytes:
        assert told[-1] == (source.nbytes, source.nbytes) and len(told) == -(-source.nbytes // (16 * MIB))
    other = str(tmp_path / "saved")
    egmem.numpy.save(other, loaded)
    assert os.path.exists(other)
    with open(other, "rb") as file:
        again = np.load(file)
    assert again.dtype == source.dtype and (again == source).all() and again.shape == source.shape


def test_files_of_version_2(driver, tmp_path):
    path = tmp_path / "array.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array(file, np.arange(10), version=(2, 0))
    assert egmem.numpy.load(path, driver=driver).tolist() == list(range(10))


def test_files_that_are_no_arrays(driver, tmp_path):
    path = tmp_path / "file.npy"
    np.save(path, np.arange(1000))
    whole = path.read_bytes()
    np.save(path, np.array([{}], object), allow_pickle=True)
    objects = path.read_bytes()
    heap = egmem.Heap(0, driver=driver)
    for content, why in (
        (b"", "no .npy file"),
        (b"something else", "no .npy file"),
        (whole[:60], "no .npy file"),
        (whole[:6] + b"\x03\x00" + whole[8:], "version"),
        (whole[:-1], "7999 bytes"),
        (objects, "not unpickled"),
        (pickle.dumps({}), "no .npy file"),
    ):
        path.write_bytes(content)
        with pytest.raises(egmem.InvalidArgument, match=why):
            egmem.numpy.load(path, heap=heap)
    with pytest.raises(FileNotFoundError):
        egmem.numpy.load(tmp_path / "none.npy", heap=heap)
    gc.collect()
    assert heap.stats()["live_blocks"] == 0
    target = tmp_path / "objects"
    with pytest.raises(egmem.InvalidArgument):
        egmem.numpy.save(target, np.array([{}], object))
    assert not target.exists()


def test_a_load_may_be_interrupted(driver, tmp_path):
    path = tmp_path / "array.npy"
    np.save(path, np.zeros(40 * MIB, "u1"))
    heap = egmem.Heap(0, driver=driver)

    class Stop(Exception):
        pass

    def stop(done, total):
        raise Stop

    with pytest.raises(Stop):
        egmem.numpy.load(path, heap=heap, progress=stop)
    gc.collect()
    assert heap.stats()["live_blocks"] == 0


def test_a_heap_of_another_type_is_named():
    with pytest.raises(TypeError, match="heap is int; valid: an egmem.Heap"):
        egmem.numpy.zeros(3, heap=3)
