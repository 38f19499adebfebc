"""NumPy, DLPack and the array interfaces."""

import ctypes
import gc

import numpy as np
import pytest

import egmem
import egmem.kv


@pytest.fixture
def buffer(driver):
    return egmem.Buffer(4096, driver=driver)


def test_numpy_shares_the_bytes(buffer):
    array = np.asarray(buffer)
    assert array.dtype == np.uint8 and array.shape == (4096,) and array.flags.writeable
    array[:4] = [1, 2, 3, 4]
    assert buffer.read(0, 4) == b"\1\2\3\4"
    floats = np.frombuffer(buffer, "f4", 10, 8)
    floats[0] = 1.5
    assert array[8:12].view("f4")[0] == 1.5
    with pytest.raises(BufferError):
        buffer.close()
    del array, floats
    buffer.close()


@pytest.mark.parametrize("device", ["cpu", "cuda_host"])
def test_dlpack_shares_the_bytes(buffer, device):
    array = np.from_dlpack(buffer.view("int32", (8, 16), offset=64, device=device))
    assert array.shape == (8, 16) and array.strides == (64, 4) and array.dtype == np.int32
    array[7, 15] = -1
    assert buffer.read(64 + 127 * 4, 4) == b"\xff" * 4
    with pytest.raises(egmem.InUse):
        buffer.close()
    del array
    gc.collect()
    buffer.close()


def test_a_read_only_buffer_is_exported_as_such(driver):
    buffer = egmem.Buffer(100, host="r", driver=driver)
    assert not np.from_dlpack(buffer).flags.writeable
    with pytest.raises(BufferError, match="max_version"):
        buffer.__dlpack__()
    assert buffer.__array_interface__["data"][1] is True


def test_dlpack_devices_and_refusals(buffer):
    assert buffer.__dlpack_device__() == (1, 0)
    assert buffer.on("cuda_host").__dlpack_device__() == (3, 0)
    assert buffer.on("cuda:2").__dlpack_device__() == (2, 2)
    for device in ((1, 0), (3, 0)):
        buffer.__dlpack__(dl_device=device)
    with pytest.raises(egmem.ExportError):
        buffer.__dlpack__(dl_device=(1, 1))
    with pytest.raises(egmem.ExportError):
        buffer.__dlpack__(dl_device=(10, 0))
    with pytest.raises(BufferError):
        buffer.__dlpack__(copy=True)
    for name in ("gpu", "cuda:-1", "cuda:x", ""):
        with pytest.raises(egmem.InvalidArgument, match="device"):
            buffer.on(name)


@pytest.mark.parametrize("gpu", [4, 9])
def test_a_gpu_that_the_machine_lacks_is_named(buffer, driver, gpu):
    pool = egmem.Pool(0, driver=driver)
    heap = egmem.Heap(0, limit=2 << 20, driver=driver)
    on = {"driver": driver}
    requests = [
        lambda: buffer.on(f"cuda:{gpu}"),
        lambda: buffer.view("f4", device=f"cuda:{gpu}"),
        lambda: buffer.access(gpu),
        lambda: buffer.__dlpack__(dl_device=(2, gpu)),
        lambda: buffer.on("cpu").__dlpack__(dl_device=(2, gpu)),
        lambda: buffer.on("cpu").ready_on(5, gpu=gpu),
        lambda: heap.allocate(64).free_after(5, gpu=gpu),
        lambda: pool.allocate(64, 5, gpu=gpu),
        lambda: pool.allocate(64).free_after(5, gpu=gpu),
        lambda: egmem.Stream(gpu, **on),
        lambda: egmem.Buffer(64, near_gpu=gpu, **on),
        lambda: egmem.Buffer(64, device=gpu, **on),
        lambda: egmem.Buffer(64, access_by=[0, gpu], **on),
        lambda: egmem.Heap(near_gpu=gpu, limit=2 << 20, **on),
        lambda: egmem.Heap(device=gpu, limit=2 << 20, **on),
        lambda: egmem.Heap(0, limit=2 << 20, access_by=[gpu], **on),
        lambda: egmem.Pool(near_gpu=gpu, **on),
        lambda: egmem.Pool(device=gpu, **on),
        lambda: egmem.Pool(0, gpu=gpu, **on),
        lambda: egmem.Pool(0, access_by=[gpu], **on),
        lambda: egmem.kv.Tier(4, 4096, near_gpu=gpu, **on),
        lambda: egmem.kv.Tier(4, 4096, node=0, access_by=[gpu], **on),
    ]
    for nth, request in enumerate(requests):
        with pytest.raises(egmem.NoSuchPlace) as caught:
            request()
        assert f"no GPU {gpu}; this machine has 4" in caught.value.message, (nth, caught.value)
        assert caught.value.remedy == "choose one that `egmem topo` lists"


def test_unconsumed_capsules_free_their_share(buffer):
    for version in (None, (0, 8), (1, 0), (2, 3)):
        capsule = buffer.__dlpack__(max_version=version)
        name = "dltensor_versioned" if version in ((1, 0), (2, 3)) else "dltensor"
        assert name in repr(capsule) and ("versioned" in repr(capsule)) == ("versioned" in name)
        with pytest.raises(egmem.InUse):
            buffer.close()
        del capsule
    buffer.close()


def test_a_simulated_gpu_is_a_typed_refusal(buffer):
    with pytest.raises(egmem.NoDeviceInterface):
        buffer.on("cuda:0").__dlpack__()
    with pytest.raises(egmem.NotSupported) as caught:
        buffer.on("cuda:0").__cuda_array_interface__
    assert isinstance(caught.value, AttributeError) and caught.value.remedy
    assert not hasattr(buffer, "__cuda_array_interface__")
    assert not hasattr(buffer.on("cpu"), "__cuda_array_interface__")
    del caught  # its traceback has the view
    gc.collect()
    buffer.close()  # nothing was handed out


def test_the_array_interface_forbids_closing(buffer):
    interface = buffer.__array_interface__
    assert (interface["typestr"], interface["shape"], interface["version"]) == ("|u1", (4096,), 3)
    byte = ctypes.c_ubyte.from_address(interface["data"][0])
    byte.value = 77
    assert buffer.read(0, 1) == b"M"
    with pytest.raises(egmem.InUse, match="array interface.*drop every reference"):
        buffer.close()


def test_an_array_interface_that_there_is_not_forbids_no_closing(driver):
    for memory in (egmem.Buffer(4096, device=0, driver=driver), egmem.Buffer(4096, host="", driver=driver)):
        with pytest.raises(egmem.NotAccessible):
            memory.__array_interface__
        memory.close()


def test_a_view_s_array_interface_keeps_the_memory(buffer):
    class Holder:
        def __init__(self, view):
            self.view = view
            self.__array_interface__ = view.__array_interface__

    array = np.asarray(Holder(buffer.view("float64", 3)))
    assert array.dtype == np.float64 and array.shape == (3,)
    with pytest.raises(egmem.InUse):
        buffer.close()
    del array
    gc.collect()
    buffer.close()


def test_types_and_shapes(buffer):
    names = "uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64 complex128 bool".split()
    for name in names:
        by_name, by_type = buffer.view(name), buffer.view(np.dtype(name))
        assert by_name.dtype == by_type.dtype == name
        array = np.from_dlpack(by_name)
        assert array.dtype == np.dtype(name) and array.size == 4096 // array.itemsize
        assert by_name.__array_interface__["typestr"] == np.dtype(name).str
        assert by_name.nbytes == 4096
    assert buffer.view(np.float32).dtype == "float32" and buffer.view("<f4").dtype == "float32"
    assert buffer.view("bfloat16", (2, 3)).shape == (2, 3)
    assert np.from_dlpack(buffer.view("int8", ())).shape == ()
    assert np.from_dlpack(buffer.view("int8", (0, 5))).shape == (0, 5)
    for wrong in (
        lambda: buffer.view("float32", 1025),
        lambda: buffer.view("float32", (-2,)),
        lambda: buffer.view("float32", (2**40, 2**40)),
        lambda: buffer.view("float32", offset=2),
        lambda: buffer.view("uint8", offset=4097),
        lambda: buffer.view("float33"),
    ):
        with pytest.raises(egmem.InvalidArgument):
            wrong()
    assert "float32 [4, 2] on cpu" in repr(buffer.view("float32", (4, 2)))


FLOAT8 = {
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}


class Tensor(ctypes.Structure):
    """The head of DLPack's managed tensor with a version."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    ]


def dlpack_type(view):
    """Returns the code, the size and the version in a view's capsule."""
    capsule = view.__dlpack__(max_version=(1, 1))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = Tensor.from_address(pointer(capsule, b"dltensor_versioned"))
    return tensor.code, tensor.bits, tensor.lanes, tuple(tensor.version)


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_types_have_dlpack_s_codes(buffer, name):
    view = buffer.view(name, (2, 3))
    assert (view.dtype, view.nbytes, view.__array_interface__["typestr"]) == (name, 6, "|V1")
    assert dlpack_type(view) == (FLOAT8[name], 8, 1, (1, 1))
    assert dlpack_type(buffer.view("bfloat16"))[3] == (1, 0)
    assert buffer.view(type(name, (), {})).dtype == name, "a class, as of ml_dtypes"


def test_a_type_of_the_other_byte_order_is_refused(buffer):
    """Its name is that of the type in the machine's order."""
    for given in (np.dtype(">f4"), np.dtype("f8").newbyteorder(), ">f4", ">i2", np.dtype(">c16")):
        with pytest.raises(egmem.InvalidArgument, match="byte order") as caught:
            buffer.view(given)
        assert "little-endian" in caught.value.remedy
    for given in (np.dtype("<f4"), np.dtype("=f4"), "<f4", "=f4", "f4"):
        assert buffer.view(given).dtype == "float32"
    assert buffer.view(np.dtype(">u1")).dtype == buffer.view("|u1").dtype == "uint8"


def test_types_without_a_meaning_for_gpus_are_refused(buffer):
    for given in (np.dtype("V2"), np.dtype("V1"), "|V2", np.dtype([("x", "f4")]), np.dtype(("f4", (2,))), np.dtype("M8[ns]"), ">x"):
        with pytest.raises(egmem.InvalidArgument, match="no element type"):
            buffer.view(given)


def test_shapes_of_any_integers(buffer):
    import egmem.numpy as en

    for shape in (np.int64(6), 6, np.array(6), [np.int32(6)], np.array([6]), (np.uint8(6),)):
        assert buffer.view("f4", shape).shape == (6,)
    assert buffer.view("f4", np.array([2, 3])).shape == (2, 3)
    heap = egmem.Heap(0, limit=2 << 20, driver=buffer.driver)
    for shape in (np.int64(4), np.array(4), [np.int32(4)], np.array([4]), (np.uint8(4),)):
        assert en.zeros(shape, heap=heap).shape == (4,)
    assert en.empty((np.int64(2), 3), heap=heap).shape == (2, 3) and en.empty((), heap=heap).shape == ()
    for wrong, error in ((-1, ValueError), ((2, -3), ValueError), (2.0, TypeError), ((2.5,), TypeError), ("4", TypeError)):
        with pytest.raises(error):
            en.zeros(wrong, heap=heap)


def test_memory_of_a_gpu_is_not_the_cpus(driver):
    buffer = egmem.Buffer(100, device=1, driver=driver)
    assert buffer.__dlpack_device__() == (2, 1)
    with pytest.raises(egmem.NotAccessible):
        np.asarray(buffer.on("cpu"))
    with pytest.raises(egmem.NotAccessible):
        memoryview(buffer)


def test_arrays_on_a_node(driver):
    import egmem.numpy as en

    egmem.set_default_driver(driver)
    topology = driver.topology()
    free = topology.free_memory(2)
    array = en.zeros((17, 1 << 20), "f4", node=2)  # mapped for itself
    assert array.shape == (17, 1 << 20) and array.dtype == np.float32 and not array.any()
    assert topology.free_memory(2) < free
    part = array[10:]
    del array
    part[...] = 3
    assert part.sum() == 3 * 7 * (1 << 20)
    del part
    gc.collect()
    assert topology.free_memory(2) == free
    heap = egmem.Heap(1, driver=driver)
    copied = en.array([[1, 2], [3, 4]], heap=heap)
    assert copied.tolist() == [[1, 2], [3, 4]] and heap.stats()["live_blocks"] == 1
    assert en.empty((0, 3), heap=heap).shape == (0, 3) and en.empty(5, "u1", heap=heap).size == 5
    assert not en.zeros(100, heap=heap).any()
    with pytest.raises(TypeError, match="objects"):
        en.empty(3, object)
