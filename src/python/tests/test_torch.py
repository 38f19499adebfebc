"""egmem.torch with the real package on the simulator: tensors of the CPU, which need no GPU. Skipped where PyTorch is missing."""

import gc

import numpy
import pytest

import egmem

torch = pytest.importorskip("torch")
import egmem.torch as et  # noqa: E402


@pytest.fixture
def default(driver):
    egmem.set_default_driver(driver)
    yield driver


def test_large_tensors_are_mapped_for_themselves(default):
    heap = et.heap_on(1)
    backed = heap.backed
    size = (64 << 20) + (3 << 20) + 5
    tensor = et.empty(size, dtype=torch.uint8, node=1)
    assert tensor.shape == (size,) and tensor.device.type == "cpu"
    assert heap.backed == backed, "the shared heap grew"
    tensor[-1] = 7
    rows = tensor[: 64 << 20].view(torch.float32).view(4, -1)
    del tensor
    gc.collect()
    rows.fill_(1.5)
    assert float(rows[3, -1]) == 1.5


def test_the_machine_is_read_once_for_a_driver(default, monkeypatch):
    class Driver:
        """The driver, which counts."""

        read = 0

        def topology(self):
            self.read += 1
            return default.topology()

    drivers = [Driver(), Driver()]
    for driver in drivers * 3:
        for gpu in range(4):
            assert et._heaps.node_of(driver, None, gpu) == gpu
    assert [driver.read for driver in drivers] == [1, 1]
    assert et._heaps.node_of(Driver(), 3) == 3


def test_small_tensors_and_those_of_a_given_heap_are_blocks(default):
    heap = egmem.Heap(2, driver=default)
    tensors = [et.empty(64 << 20, dtype=torch.uint8, heap=heap), et.empty(3, 5, dtype=torch.float16, heap=heap)]
    assert heap.stats()["live_blocks"] == 2 and tensors[1].shape == (3, 5)
    del tensors
    gc.collect()
    assert heap.stats()["live_blocks"] == 0
    small = et.empty(1000, node=3)
    assert et.heap_on(3).stats()["live_blocks"] == 1 and small.dtype == torch.get_default_dtype()
    assert et.empty(0, 4).shape == (0, 4)


def test_pin_copies_and_requires_grad_is_kept(default):
    source = torch.arange(1000, dtype=torch.int64).reshape(10, 100)
    pinned = et.pin(source, node=0)
    assert torch.equal(pinned, source) and pinned.data_ptr() != source.data_ptr()
    assert et.empty(4, requires_grad=True, node=0).requires_grad


def test_sizes_of_any_integers(default):
    heap = egmem.Heap(0, driver=default)
    for size in ((numpy.int64(4),), (numpy.array([4]),), ([numpy.int32(4)],), (torch.Size([4]),), (torch.tensor(4),)):
        assert et.empty(*size, heap=heap).shape == (4,)
    assert et.empty(numpy.int64(2), 3, heap=heap).shape == et.empty((2, numpy.int16(3)), heap=heap).shape == (2, 3)
    assert et.empty(heap=heap).shape == et.empty((), heap=heap).shape == ()
    with pytest.raises(egmem.InvalidArgument, match="-2"):
        et.empty(-2, heap=heap)
    with pytest.raises(TypeError):
        et.empty(2.0, heap=heap)


FLOAT8 = [name for name in dir(torch) if name.startswith("float8_")]


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_tensors(default, name):
    dtype = getattr(torch, name)
    buffer = egmem.Buffer(4096, driver=default)
    assert buffer.view(dtype, (4, 4)).dtype == name
    assert et.empty(4, dtype=dtype, node=0).dtype == dtype
    tensor = torch.from_dlpack(buffer.view(dtype, (4, 4)))
    assert tensor.dtype == dtype and tensor.data_ptr() == buffer.address


PERMUTED = {
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(6, 4).t(),
    "part": lambda: torch.randn(6, 4)[2:4],
    "columns": lambda: torch.randn(6, 9)[:, 2:5],
    "expanded": lambda: torch.randn(1, 9).expand(5, 9),
    "windows that overlap": lambda: torch.randn(20).unfold(0, 5, 1),
    "empty": lambda: torch.randn(0, 3).t(),
}


@pytest.mark.parametrize("name", PERMUTED)
def test_strides_are_kept(default, name):
    tensor = PERMUTED[name]()
    like, theirs = et.empty_like(tensor, node=0), torch.empty_like(tensor)
    assert (like.size(), like.stride(), like.dtype) == (theirs.size(), theirs.stride(), theirs.dtype)
    pinned = et.pin(tensor, node=0)
    assert pinned.stride() == tensor.stride() and torch.equal(pinned, tensor)
    assert pinned.data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_a_pinned_expanded_tensor_takes_its_distinct_elements(default):
    heap = egmem.Heap(0, driver=default)
    pinned = et.pin(torch.randn(1, 64).expand(1 << 16, 64), heap=heap)
    assert pinned.shape == (1 << 16, 64) and heap.stats()["used"] <= 1024
    assert not et.empty_like(torch.nn.Parameter(torch.ones(3)), heap=heap).requires_grad


def test_captures_of_this_pytorch_are_noticed():
    """On the class alone: a capture takes a GPU."""
    for method in (torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end):
        assert method.__module__ == torch.cuda.CUDAGraph.__module__ and method.__wrapped__
    graph = torch.cuda.CUDAGraph.__new__(torch.cuda.CUDAGraph)
    with pytest.raises(Exception):
        graph.capture_begin()
    buffer = egmem.Buffer(1 << 20, driver=egmem.simulated())
    assert buffer.address
    del buffer
    assert egmem.deferred() == (0, 0), "the capture has not begun"


def test_a_simulated_driver_is_no_allocator_of_pytorch(default):
    with pytest.raises(egmem.NotSupported, match="simulated"):
        et.set_current_allocator(0)
