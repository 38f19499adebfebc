"""egmem.torch.offload on the simulator: tensors of the CPU that say they are a GPU's, and streams that only keep order."""

import contextlib
import gc
import random
import weakref

import pytest

import egmem

torch = pytest.importorskip("torch")
from streams_in_order import Gpu, Stream, on_gpu  # noqa: E402

import egmem.torch as et  # noqa: E402
from egmem import _offload  # noqa: E402


@pytest.fixture
def gpu(driver, monkeypatch):
    egmem.set_default_driver(driver)
    gpu = Gpu(egmem.Heap(0, driver=driver))
    monkeypatch.setattr(_offload, "cuda", gpu)
    monkeypatch.setattr(_offload, "_streams", {})
    monkeypatch.setattr(_offload, "_copy", gpu.copy)
    monkeypatch.setattr(_offload, "_used_on", gpu.use)
    return gpu


@pytest.fixture
def saved(gpu):
    return _offload.Offload(gpu, 1, 0)


def expect_same(one, other):
    assert (one.size(), one.stride(), one.dtype) == (other.size(), other.stride(), other.dtype)
    assert torch.equal(one, other)


def rows(*size):
    count = 1
    for each in size:
        count *= each
    return torch.arange(count, dtype=torch.float32).reshape(size)


VIEWS = {
    "contiguous": lambda: rows(4, 6),
    "channels_last": lambda: rows(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: rows(4, 6).t(),
    "of one element": lambda: rows(9)[4],
    "expanded": lambda: rows(1, 6).expand(50, 6),
    "expanded twice": lambda: rows(5, 1, 3, 1).expand(5, 7, 3, 4),
    "columns": lambda: rows(6, 9)[:, 2:5],
    "every second": lambda: rows(40)[1::2],
    "windows that overlap": lambda: rows(20).unfold(0, 5, 1),
    "rows that overlap": lambda: rows(100).as_strided((3, 4), (5, 3), 7),
    "bytes": lambda: torch.arange(100, dtype=torch.uint8)[3:70],
    "bool": lambda: rows(8, 3) > 7,
    "bfloat16": lambda: rows(8, 3).bfloat16()[1:],
    "float8": lambda: rows(8, 3).to(torch.float8_e4m3fn)[1:].float().to(torch.float8_e4m3fn),
    "complex128": lambda: torch.complex(rows(4, 3).double(), -rows(4, 3).double()).t(),
    "conjugate": lambda: torch.complex(rows(4, 3), -rows(4, 3)).conj(),
    "negative": lambda: torch.complex(rows(4, 3), -rows(4, 3)).conj().imag,
}
# Bytes, where they are not those of all elements. Rows that may overlap are copied with what is between them.
DISTINCT = {"expanded": 24, "expanded twice": 60, "windows that overlap": 80, "rows that overlap": 80}


@pytest.mark.parametrize("name", VIEWS)
def test_a_tensor_comes_back_as_it_was(gpu, saved, name):
    tensor = VIEWS[name]()
    packed = saved.pack(on_gpu(tensor))
    assert gpu.bytes_out == DISTINCT.get(name, tensor.numel() * tensor.element_size())
    unpacked = saved.unpack(packed)
    gpu.expect_ready(unpacked)
    if tensor.dtype == torch.float8_e4m3fn:
        tensor, unpacked = tensor.view(torch.uint8), unpacked.view(torch.uint8)
    expect_same(unpacked, tensor)
    assert (unpacked.is_conj(), unpacked.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert (unpacked.storage_offset() - tensor.storage_offset()) * tensor.element_size() % 512 == 0, "its alignment"


def test_views_of_every_kind_come_back(gpu):
    chance = random.Random(5)
    for _ in range(60):
        saved = _offload.Offload(gpu, 1, chance.randrange(3))
        base = torch.arange(2000, dtype=torch.int32)
        views = []
        for _ in range(chance.randrange(1, 6)):
            size = [chance.randrange(1, 6) for _ in range(chance.randrange(4))]
            stride = [chance.choice((0, 1, 2, 3, 7, 12, 40)) for _ in size]
            view = base.as_strided(size, stride, chance.randrange(800))
            views.append((view, saved.pack(on_gpu(view))))
        chance.shuffle(views)
        for view, packed in views * chance.randrange(1, 3):
            unpacked = saved.unpack(packed)
            gpu.expect_ready(unpacked)
            expect_same(unpacked, view)
    del views, packed, saved
    gc.collect()
    assert gpu.heap.stats()["live_blocks"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x, x.t(), x[2:5], x.view(-1)],
        lambda x: [x[2:5], x, x.t()],
        lambda x: list(x.chunk(3, dim=1)),
        lambda x: list(x.split(3)),
        lambda x: [x.unsqueeze(0).expand(8, *x.shape), x],
        lambda x: [x, x.view(torch.int16)],
    ],
    ids=["whole", "part first", "columns", "rows", "expanded", "another type"],
)
def test_views_of_one_storage_share_one_again_and_are_copied_once(gpu, saved, make):
    base = rows(12, 9)
    views = make(base)
    packed = [saved.pack(on_gpu(view)) for view in views]
    assert gpu.bytes_out == base.numel() * 4
    out = len(gpu.copies)
    unpacked = [saved.unpack(each) for each in reversed(packed)][::-1]
    for view, each in zip(views, unpacked):
        expect_same(each, view)
        gpu.expect_ready(each)
    assert len({each.untyped_storage().data_ptr() for each in unpacked}) == 1
    assert len(gpu.copies) == 2 * out, "each part is copied back once"
    if len(views) > 1 and views[0].data_ptr() == views[1].data_ptr():
        unpacked[0][(0,) * views[0].dim()] = -5.0
        assert unpacked[1].flatten()[:2].view(torch.float32)[0] == -5.0


def test_a_view_far_away_takes_no_memory_for_the_gap(gpu, saved):
    base = rows(1000, 1000)
    first, last = saved.pack(on_gpu(base[:2])), saved.pack(on_gpu(base[-2:]))
    for packed, view in ((first, base[:2]), (last, base[-2:])):
        unpacked = saved.unpack(packed)
        expect_same(unpacked, view)
        assert unpacked.untyped_storage().nbytes() < 4 * 2000 + 512
    assert gpu.bytes_out == 4 * 4000


def test_a_view_beside_the_image_of_another_is_fetched(gpu, saved):
    base = torch.arange(2000, dtype=torch.uint8)
    late, early = saved.pack(on_gpu(base[600:700])), saved.pack(on_gpu(base[520:560]))
    kept = saved.unpack(late)
    expect_same(saved.unpack(early), base[520:560])
    expect_same(kept, base[600:700])


def test_a_view_between_the_columns_of_an_image_is_fetched(gpu, saved):
    base = rows(9, 9)
    outer = [saved.pack(on_gpu(base[:, ::8])) for _ in range(2)]
    kept = saved.unpack(outer[0])  # the image waits for the other one
    inner = saved.pack(on_gpu(base[1:8, 3:5]))
    expect_same(saved.unpack(inner), base[1:8, 3:5])
    expect_same(saved.unpack(outer[1]), base[:, ::8])
    expect_same(kept, base[:, ::8])


def test_a_storage_that_was_changed_in_place_is_saved_anew(gpu, saved):
    base = rows(10)
    before = saved.pack(on_gpu(base))
    base.add_(1)
    after = saved.pack(on_gpu(base))
    assert torch.equal(saved.unpack(after), rows(10) + 1)
    assert torch.equal(saved.unpack(before), rows(10))


def test_the_storage_of_a_tensor_that_ended_is_no_other_s(gpu, saved):
    packed = []
    for value in range(20):
        packed.append(saved.pack(on_gpu(torch.full((1000,), float(value)))))  # in the memory of the one before
    for value, each in enumerate(packed):
        assert torch.equal(saved.unpack(each), torch.full((1000,), float(value)))


def test_memory_is_freed_after_the_copies_of_all_streams(gpu, saved):
    packed = saved.pack(on_gpu(rows(100)))
    block = gpu.copies[0][0]
    tensors = []
    for _ in range(2):
        gpu.current = Stream()
        gpu.current.work()
        tensors.append(saved.unpack(packed))
        gpu.expect_ready(tensors[-1])
    copies = gpu.copies_of(block, 400)
    assert len(copies) == 3
    assert not Stream().is_after(copies[1])
    del packed
    gc.collect()
    assert gpu.freed == [block]


def test_memory_that_was_never_asked_for_is_freed_after_the_copy(gpu, saved):
    packed = saved.pack(on_gpu(rows(100)))
    del packed
    gc.collect()
    assert len(gpu.freed) == 1


def test_no_stream_of_the_program_waits_when_a_tensor_ends(gpu, saved):
    """The thread that collects garbage may capture its current stream."""
    packed = saved.pack(on_gpu(rows(100)))
    saved.unpack(packed)
    gpu.current_stream = None
    before = dict(gpu.current.seen)
    del packed
    gc.collect()
    assert gpu.current.seen == before and len(gpu.freed) == 1


def test_an_image_for_two_streams_is_recorded_for_the_second(gpu, saved):
    base = rows(10, 10)
    packed = [saved.pack(on_gpu(base)), saved.pack(on_gpu(base.t()))]
    first = saved.unpack(packed[0])
    storage = first.untyped_storage().data_ptr()
    assert (storage, gpu.current) not in gpu.used_on, "PyTorch knows the stream that the memory is of"
    gpu.current = Stream()
    second = saved.unpack(packed[1])
    gpu.expect_ready(second)
    assert second.untyped_storage().data_ptr() == storage and (storage, gpu.current) in gpu.used_on


def test_the_source_is_recorded_for_the_stream_that_copies_it(gpu, saved):
    tensor = rows(10)
    work = gpu.current.work()
    saved.pack(on_gpu(tensor))
    address, stream = gpu.used_on[0]
    assert address == tensor.data_ptr() and stream.is_after(work) and stream is not gpu.current


def packed_in_turn(gpu, ahead, count=6):
    saved = _offload.Offload(gpu, 1, ahead)
    tensors = [torch.full((1000,), float(value)) for value in range(count)]
    return saved, tensors, [saved.pack(on_gpu(tensor)) for tensor in tensors]


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_tensors_are_fetched_ahead_once(gpu, ahead):
    saved, tensors, packed = packed_in_turn(gpu, ahead)
    for number in reversed(range(6)):
        unpacked = saved.unpack(packed[number])
        assert torch.equal(unpacked, tensors[number])
        gpu.expect_ready(unpacked)
        assert len(gpu.copies) - 6 == min(6, 6 - number + ahead)
        packed[number] = unpacked = None
    gc.collect()
    assert len(gpu.freed) == 6 and not gpu.heap.stats()["live_blocks"]


def test_the_current_stream_does_not_wait_for_what_is_fetched_ahead(gpu):
    saved, _, packed = packed_in_turn(gpu, 2)
    saved.unpack(packed[5])
    own, *ahead = (work for *_, work in gpu.copies[6:])
    assert gpu.current.is_after(own) and not any(map(gpu.current.is_after, ahead))


def test_copies_back_wait_for_the_work_before_their_memory_was_allocated_alone(gpu):
    saved, _, packed = packed_in_turn(gpu, 2)
    earlier = gpu.current.work()
    saved.unpack(packed[5])
    later = gpu.current.work()
    back = next(iter(_offload._streams.values())).back
    assert back.is_after(earlier) and not back.is_after(later)
    unpacked = saved.unpack(packed[4])
    gpu.expect_ready(unpacked)


def test_an_image_that_was_not_asked_for_ends_after_its_copy(gpu):
    saved, _, packed = packed_in_turn(gpu, 1)
    saved.unpack(packed[5])
    written = gpu.copies[-1][0]
    back = next(iter(_offload._streams.values())).back
    assert (written, back) not in gpu.used_on
    del packed
    gc.collect()
    assert (written, back) in gpu.used_on


def test_each_use_has_the_same_streams(gpu):
    for _ in range(3):
        saved, _, packed = packed_in_turn(gpu, 1)
        saved.unpack(packed[0])
    assert len(_offload._streams) == 1
    assert len({stream for *_, (stream, _) in gpu.copies}) == 2, "one for copies out, one for copies back"


def test_no_room_ahead_is_no_failure(gpu, monkeypatch):
    saved, tensors, packed = packed_in_turn(gpu, 1)
    image = _offload._Image

    def no_room(start, end, parts, streams):
        if any(part in packed[4].parts for part in parts):
            raise torch.cuda.OutOfMemoryError
        return image(start, end, parts, streams)

    monkeypatch.setattr(_offload, "_Image", no_room)
    assert torch.equal(saved.unpack(packed[5]), tensors[5])
    with pytest.raises(torch.cuda.OutOfMemoryError):
        saved.unpack(packed[4])
    monkeypatch.undo()


def test_small_tensors_stay_and_expanded_ones_count_their_distinct_elements(gpu):
    saved = _offload.Offload(gpu, 1000, 0)
    for small in (rows(10), rows(1).expand(100000), torch.empty(0)):
        tensor = on_gpu(small)
        unpacked = saved.unpack(saved.pack(tensor))
        assert unpacked.data_ptr() == small.data_ptr() and unpacked.stride() == small.stride()
    assert not gpu.copies
    sparse = rows(500, 500).to_sparse()
    assert saved.unpack(saved.pack(sparse)).layout == torch.sparse_coo


def test_parameters_and_their_views_stay(gpu, saved):
    parameter = torch.nn.Parameter(rows(10, 10))
    leaf = rows(10, 10).clone().requires_grad_()
    for tensor in (parameter, leaf):
        for view in (tensor, tensor.t(), tensor.t()[2:]):
            assert saved.unpack(saved.pack(on_gpu(view))).data_ptr() == view.data_ptr()
    assert not gpu.copies
    saved.pack(on_gpu(leaf * 1))
    assert len(gpu.copies) == 1


def test_nothing_is_offloaded_within_a_capture(gpu):
    weight = torch.ones(1 << 18, requires_grad=True)
    activations = on_gpu((weight * 1).detach())
    with et.offload(heap=gpu):
        loss = (weight * activations).sum()
        gpu.capturing = True
        with pytest.raises(egmem.NotSupported, match="CUDA graph") as refused:
            weight * activations
    assert "without a graph" in refused.value.remedy
    allocated = gpu.bytes_out
    with pytest.raises(egmem.NotSupported, match="CUDA graph"):
        loss.backward()
    assert gpu.bytes_out == allocated
    gpu.capturing = False


def test_gradients_of_expanded_and_permuted_tensors(gpu):
    torch.manual_seed(1)
    weight = torch.randn(64, 64, requires_grad=True)
    inputs = [torch.randn(64, 64).t(), torch.randn(1, 64).expand(64, 64), torch.randn(64, 128)[:, ::2]]

    def gradient(context):
        weight.grad = None
        with context:
            sum((weight * on_gpu(each)).pow(2).sum() for each in inputs).backward()
        return weight.grad

    plain = gradient(contextlib.nullcontext())
    assert torch.equal(gradient(et.offload(heap=gpu, min_bytes=256)), plain)
    assert gpu.bytes_out == 2 * 64 * 64 * 4 + 64 * 4
    gc.collect()
    assert len(gpu.freed) == 3


def test_a_tensor_that_stays_ends_with_its_last_reference(gpu):
    """Autograd refers to what a hook returns: a result of the graph's own would refer to the graph."""
    gc.disable()
    try:
        with et.offload(heap=gpu):
            result = torch.ones(10, requires_grad=True).exp()
        alive = weakref.ref(result)
        del result
        assert alive() is None
    finally:
        gc.enable()


def test_a_tensor_that_stays_and_is_changed_in_place_is_refused(gpu):
    weight = torch.ones(10, requires_grad=True)
    factor = torch.ones(10)
    with et.offload(heap=gpu):
        loss = (weight * factor).sum()
    factor.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()
