"""egmem.kv on the simulator: pages, pins, eviction, copies, views."""

import contextlib
import ctypes
import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import types
import warnings
import weakref

import numpy as np
import pytest

import egmem
import egmem.kv

PAGE = 4096
BLOCKS = 16


def key(number):
    return number.to_bytes(4, "little") * 8


@pytest.fixture
def tier(driver):
    return egmem.kv.Tier(pages=4, page_bytes=PAGE, node=1, driver=driver)


def test_a_tier_tells_what_it_is_and_why(driver):
    discrete = egmem.simulated("h200x8")

    def told(of, **options):
        tier = egmem.kv.Tier(pages=4, page_bytes=PAGE, node=0, driver=of, **options)
        return tier.backing, tier.backing_reason

    asked = "the program asked for it"
    assert told(discrete) == told(discrete, backing="auto") == ("registered", "registered memory is pinned faster")
    assert told(discrete, backing="driver") == ("driver", asked) and told(discrete, backing="registered") == ("registered", asked)
    assert told(driver) == ("driver", "registered memory was never measured on coherent machines")
    attached = egmem.kv.Tier.attach(egmem.Buffer("1MiB", node=0, backing="registered", driver=discrete), page_bytes=PAGE)
    assert (attached.backing, attached.backing_reason) == ("registered", asked)


class Cache:
    """A serving engine's blocks: two parts in host memory of the simulator, so that the CPU sees them."""

    def __init__(self, driver):
        self.parts = [egmem.Buffer(BLOCKS * PAGE, node=0, driver=driver) for _ in range(2)]
        self.arrays = [np.asarray(part).reshape(BLOCKS, PAGE)[:, : PAGE // 2] for part in self.parts]
        bases = [part.address for part in self.parts]
        self.gpu_pages = egmem.kv.GpuPages(bases, PAGE, PAGE // 2, BLOCKS, keep=self.parts)
        self.stream = egmem.Stream(0, driver=driver)

    def fill(self, block, value):
        for part, array in enumerate(self.arrays):
            array[block] = value + part

    def values(self, block):
        return [set(array[block].tolist()) for array in self.arrays]


@pytest.fixture
def cache(driver):
    return Cache(driver)


def store(tier, cache, numbers, first_block=0):
    with tier.prepare_store([key(number) for number in numbers]) as pages:
        blocks = list(range(first_block, first_block + len(pages)))
        for block, index in zip(blocks, pages.indices):
            cache.fill(block, numbers[index])
        job = tier.store(pages.pages, blocks, cache.gpu_pages, stream=cache.stream)
        assert job.nbytes == len(pages) * PAGE
        job.wait()
        pages.commit()
        return pages.evicted


def test_pages_come_back(tier, cache):
    assert store(tier, cache, [10, 20, 30]) == []
    for block in range(BLOCKS):
        cache.fill(block, 0)
    assert tier.lookup([key(10), key(20), key(30), key(40)]) == 3
    assert tier.lookup([key(40), key(10)]) == 0
    with tier.prepare_load([key(30), key(10)]) as load:
        job = tier.load(load.pages, [5, 15], cache.gpu_pages, stream=cache.stream)
        job.wait()
        assert job.is_done() and "ended" in repr(job)
    assert cache.values(5) == [{30}, {31}] and cache.values(15) == [{10}, {11}]
    assert cache.values(4) == [{0}, {1}]
    stats = tier.stats()
    assert (stats["pages"], stats["ready"], stats["free"], stats["pinned"]) == (4, 3, 1, 0)
    assert stats["loaded_bytes"] == 2 * PAGE and stats["stored_bytes"] == 3 * PAGE
    assert "4 pages of 4 KiB" in repr(tier) and "NUMA node 1" in repr(tier)


def test_the_least_recently_used_page_makes_room_but_no_pinned_one(tier, cache):
    store(tier, cache, [1, 2, 3, 4])
    tier.touch([key(1)])
    with tier.prepare_load([key(2)]):
        assert tier.stats()["pinned"] == 1
        # The end of a sequence goes first: it is useless without its beginning.
        assert store(tier, cache, [5]) == [key(4)]
        with pytest.raises(egmem.OutOfMemory, match="pinned") as caught:
            tier.prepare_store([key(number) for number in range(10, 14)])
        assert caught.value.remedy
    assert sorted(number for number, _ in tier.keys()) == sorted(key(number) for number in (1, 2, 3, 5))
    assert tier.remove([key(1), key(9)]) == 1
    assert tier.lookup([key(1)]) == 0


def test_what_is_not_committed_is_free_again(tier, cache):
    with tier.prepare_store([key(1), key(2)]) as pages:
        assert tier.stats()["writing"] == 2 and tier.lookup([key(1)]) == 0
        assert pages.keys == [key(1), key(2)] and len(pages) == 2
        # Another store of the same key has nothing to do.
        assert tier.prepare_store([key(2)]).keys == []
    assert tier.stats()["free"] == 4
    with pytest.raises(egmem.Closed):
        pages.commit()
    with pytest.raises(egmem.NotReady) as caught:
        tier.prepare_load([key(1)])
    assert isinstance(caught.value, KeyError)


def test_views_of_pages(tier):
    with tier.prepare_store([b"short"]) as pages:
        view = pages.view(0)
        assert isinstance(view, egmem.kv.Page) and view.nbytes == PAGE and view.node == 1
        np.asarray(memoryview(view))[:] = 9
        view.write(b"head")
        with pytest.raises(egmem.InUse, match="views"):
            pages.commit()
        view.fill(7, PAGE - 1)
        del view
        gc.collect()
        pages.commit()
    load = tier.prepare_load([b"short"])
    view = load.view(0)
    load.release()
    assert tier.stats()["pinned"] == 1, "the view keeps the page"
    assert view.read(0, 5) == b"head\t" and view.read(PAGE - 1) == b"\7"
    assert memoryview(view).readonly and view.address == tier.page_address(tier.keys()[0][1])
    with pytest.raises(egmem.Error):
        view.fill(1)
    with pytest.raises(egmem.Error):
        view.on("cuda:0").__cuda_array_interface__
    del view
    gc.collect()
    assert tier.stats()["pinned"] == 0


def test_wrong_arguments_are_typed(tier, cache, driver):
    with pytest.raises(egmem.InvalidArgument, match="2 blocks"):
        tier.load([0], [0, 1], cache.gpu_pages, stream=cache.stream)
    with pytest.raises(egmem.InvalidArgument):
        tier.load([0], [0], cache.gpu_pages, stream=cache.stream)  # not pinned
    with pytest.raises(egmem.InvalidArgument, match="method"):
        tier.load([], [], cache.gpu_pages, stream=cache.stream, method="fast")
    for method in ("kernel:0", "kernel:", "kernel:4:4", "bulk", "batch:2"):
        with pytest.raises(egmem.InvalidArgument):
            tier.load([], [], cache.gpu_pages, stream=cache.stream, method=method)
    for method in ("kernel", "kernel:16", "batch", "loop"):
        tier.load([], [], cache.gpu_pages, stream=cache.stream, method=method).wait()
    with pytest.raises(egmem.InvalidArgument):
        egmem.kv.GpuPages([0], 10, 20, 1)
    with tier.prepare_store([key(1)]) as pages:
        with pytest.raises(egmem.Error):
            tier.store(pages.pages, [BLOCKS], cache.gpu_pages, stream=cache.stream)
        with pytest.raises(egmem.Error):
            tier.store(pages.pages, [0], cache.gpu_pages, stream=egmem.Stream(0, driver=egmem.simulated()))
        tier.store(pages.pages, [0], cache.gpu_pages, stream=egmem.Stream(3, driver=driver)).wait()


def test_a_page_that_has_another_key_by_now_is_refused(tier, cache):
    old = tier.prepare_store([key(1)])
    pages = old.pages
    old.close()
    with tier.prepare_store([key(2)]) as new:
        assert new.pages != pages and tier.page_address(new.pages[0]) == tier.page_address(pages[0])
        with pytest.raises(egmem.InvalidArgument, match="another key"):
            tier.store(pages, [0], cache.gpu_pages, stream=cache.stream)
        cache.fill(3, 9)
        tier.store(np.array(new.pages), [3], cache.gpu_pages, stream=cache.stream).wait()
        new.commit()


def test_numbers_are_sequences_or_arrays(tier, cache):
    store(tier, cache, [1, 2, 3])
    with tier.prepare_load([key(1), key(2), key(3)]) as load:
        for kind in ("u4", "i8", ">i2"):
            cache.fill(9, 0)
            tier.load(np.array(load.pages, kind), np.array([7, 8, 9, 0], kind)[:3], cache.gpu_pages, stream=cache.stream).wait()
            assert cache.values(9) == [{3}, {4}]
        tier.load(tuple(load.pages), range(3), cache.gpu_pages, stream=cache.stream).wait()
        with pytest.raises(egmem.InvalidArgument, match="integers"):
            tier.load(np.array(load.pages, "f4"), [1, 2, 3], cache.gpu_pages, stream=cache.stream)
        with pytest.raises(egmem.InvalidArgument, match="one dimension"):
            tier.load(load.pages, np.zeros((3, 1), int), cache.gpu_pages, stream=cache.stream)
        with pytest.raises(egmem.InvalidArgument, match="not of this tier"):
            tier.load(np.array([-1]), [1], cache.gpu_pages, stream=cache.stream)
        with pytest.raises(egmem.Error):
            tier.load(load.pages, np.array([0, 1, -1]), cache.gpu_pages, stream=cache.stream)


class Tensor:
    """As much of a PyTorch tensor as is asked for, over memory of NumPy or of a buffer."""

    def __init__(self, array, device="cuda", index=0):
        self.array = array
        self.shape = array.shape
        self.device = types.SimpleNamespace(type=device, index=index)

    def data_ptr(self):
        return self.array.ctypes.data

    def element_size(self):
        return self.array.itemsize

    def stride(self):
        return tuple(stride // self.array.itemsize for stride in self.array.strides)


class Ndarray:
    """As much of a CuPy array as is asked for."""

    def __init__(self, array, gpu=0):
        self.shape, self.strides, self.itemsize = array.shape, array.strides, array.itemsize
        self.data = types.SimpleNamespace(ptr=array.ctypes.data)
        self.device = types.SimpleNamespace(id=gpu)
        self.array = array


class Library:
    """PyTorch or CuPy, with a current stream for each GPU and a record of the GPUs whose stream was asked for."""

    def __init__(self, driver):
        self.streams = [egmem.Stream(gpu, driver=driver) for gpu in range(4)]
        self.asked = []
        self.cuda = types.SimpleNamespace(current_stream=self.current, get_current_stream=self.current)

    def current(self, gpu):
        self.asked.append(gpu)
        return self.streams[gpu]


@pytest.fixture
def torch(driver, monkeypatch):
    library = Library(driver)
    library.Tensor = Tensor
    monkeypatch.setitem(sys.modules, "torch", library)
    return library


@pytest.fixture
def cupy(driver, monkeypatch):
    library = Library(driver)
    library.ndarray = Ndarray
    monkeypatch.setitem(sys.modules, "cupy", library)
    return library


def test_copies_of_tensors_follow_the_current_stream(driver, torch):
    """On a stream of its own, a store would copy what the cache had before PyTorch's kernels."""
    tier = egmem.kv.Tier(pages=4, page_bytes=PAGE, driver=driver)
    gpu_pages = egmem.kv.GpuPages.from_tensors([Tensor(np.zeros((8, PAGE), "u1"), index=3)])
    with tier.prepare_store([key(1)]) as pages:
        tier.store(pages.pages, [0], gpu_pages).wait()
        assert torch.asked == [3]
        pages.commit()
    with tier.prepare_load([key(1)]) as load:
        tier.load(load.pages, [1], gpu_pages, gpu=3).wait()
        assert torch.asked == [3, 3]
        tier.load(load.pages, [1], gpu_pages, stream=egmem.Stream(3, driver=driver)).wait()
        assert torch.asked == [3, 3], "the caller's stream is taken"


def test_copies_of_cupys_arrays_follow_its_current_stream(driver, torch, cupy):
    tier = egmem.kv.Tier(pages=4, page_bytes=PAGE, driver=driver)
    array = np.arange(8 * PAGE, dtype="u2").reshape(8, PAGE // 2, 2)[:, :, :1]
    gpu_pages = egmem.kv.GpuPages.from_tensors([Ndarray(np.ascontiguousarray(array), gpu=2)])
    assert (gpu_pages.blocks, gpu_pages.block_bytes) == (8, PAGE)
    with tier.prepare_store([key(1)]) as pages:
        tier.store(pages.pages, [0], gpu_pages).wait()
        assert (cupy.asked, torch.asked) == ([2], [])
        with pytest.raises(egmem.InvalidArgument, match="negative"):
            egmem.kv.GpuPages.from_tensors([Ndarray(np.zeros((8, PAGE), "u1")[::-1])])


def test_copies_of_addresses_need_a_stream(driver, tier, cache):
    unknown = egmem.kv.GpuPages.from_tensors([Tensor(np.zeros((8, PAGE), "u1"))])
    with tier.prepare_store([key(1)]) as pages:
        for gpu_pages, given in ((cache.gpu_pages, "addresses"), (unknown, "another library")):
            for call in (tier.store, tier.load):
                with pytest.raises(egmem.InvalidArgument, match=f"{given}.*pass stream="):
                    call(pages.pages, [0], gpu_pages)
                with pytest.raises(egmem.InvalidArgument, match="pass stream="):
                    call([], [], gpu_pages, gpu=0)
        tier.store(pages.pages, [0], unknown, stream=cache.stream).wait()


def test_tensors_tell_their_layout(driver):
    layers = [Tensor(np.zeros((8, 2, 16), "f4")) for _ in range(3)]
    pages = egmem.kv.GpuPages.from_tensors(layers)
    assert (pages.blocks, pages.parts, pages.block_bytes) == (8, 3, 3 * 2 * 16 * 4)
    strided = Tensor(np.zeros((8, 4, 16), "f4")[:, :2])
    assert egmem.kv.GpuPages.from_tensors([strided]).block_bytes == 2 * 16 * 4
    with pytest.raises(egmem.InvalidArgument, match="contiguous.*block_dim"):
        egmem.kv.GpuPages.from_tensors([Tensor(np.zeros((8, 4, 16), "f4")[:, :, :2])])
    with pytest.raises(egmem.InvalidArgument, match="8 and 9 blocks"):
        egmem.kv.GpuPages.from_tensors([layers[0], Tensor(np.zeros((9, 2, 16), "f4"))])
    with pytest.raises(egmem.InvalidArgument, match="block_dim is 3"):
        egmem.kv.GpuPages.from_tensors(layers, block_dim=3)
    for shape in ((0, 4), (4, 0)):
        with pytest.raises(egmem.InvalidArgument, match="no block"):
            egmem.kv.GpuPages.from_tensors([Tensor(np.zeros(shape, "f4"))])
    with pytest.raises(egmem.InvalidArgument):
        egmem.kv.GpuPages.from_tensors([])


def test_arrays_that_lie_nowhere_are_named(driver):
    array = Tensor(np.zeros((8, 16), "u1"))
    for device, address, named in ((None, 4096, "GPU None"), (0, "somewhere", "'somewhere'")):
        array.device.index, array.data_ptr = device, lambda address=address: address
        with pytest.raises(TypeError, match=f"Tensor.*{named}"):
            egmem.kv.GpuPages.from_tensors([array])
    array.device.index = 0
    for address in (-1, (1 << 64) - 127):
        array.data_ptr = lambda address=address: address
        with pytest.raises(egmem.InvalidArgument, match="ends beyond"):
            egmem.kv.GpuPages.from_tensors([array])


def stored(driver, gpu_pages, block):
    """Returns the bytes of the page that a block is stored to, and loads it into the first block."""
    tier = egmem.kv.Tier(pages=1, page_bytes=gpu_pages.block_bytes, driver=driver)
    stream = egmem.Stream(0, driver=driver)
    with tier.prepare_store([b"block"]) as store:
        tier.store(store.pages, [block], gpu_pages, stream=stream).wait()
        store.commit()
    with tier.prepare_load([b"block"]) as load:
        tier.load(load.pages, [0], gpu_pages, stream=stream).wait()
        return load.view(0).read()


def numbers_of(driver, shape):
    """An array of different bytes on the simulator's host node, which GPUs may use too."""
    count = int(np.prod(shape))
    array = np.asarray(egmem.Buffer(2 * count, node=0, driver=driver)).view("u2")
    array[:] = np.arange(count)
    return array.reshape(shape)


def test_blocks_may_be_stored_permuted(driver):
    """vLLM's preferred layout (HND): the shape is (blocks, tokens, heads, size), stored as (blocks, heads, tokens, size)."""
    cache = numbers_of(driver, (6, 2, 4, 8)).transpose(0, 2, 1, 3)
    wanted = cache[5].copy()
    gpu_pages = egmem.kv.GpuPages.from_tensors([Tensor(cache)])
    assert (gpu_pages.blocks, gpu_pages.parts, gpu_pages.block_bytes) == (6, 1, 2 * 4 * 8 * 2)
    stored(driver, gpu_pages, 5)
    assert (cache[0] == wanted).all() and (cache[1] != wanted).all()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2)])
def test_keys_and_values_before_the_blocks_are_two_parts(driver, order):
    """FlashAttention's (2, blocks, ...), also where the blocks are the outermost dimension in memory."""
    shape = [2, 6, 4, 8]
    cache = numbers_of(driver, [shape[axis] for axis in order]).transpose(np.argsort(order))
    assert cache.shape == tuple(shape)
    wanted = cache[:, 5].copy()
    gpu_pages = egmem.kv.GpuPages.from_tensors([Tensor(cache)], block_dim=1)
    assert (gpu_pages.blocks, gpu_pages.block_bytes) == (6, 2 * 4 * 8 * 2)
    assert gpu_pages.parts == (1 if order[0] else 2), "keys and values side by side are one part"
    page = stored(driver, gpu_pages, 5)
    assert (cache[:, 0] == wanted).all() and (cache[:, 1] != wanted).all()
    if order == (0, 1, 2, 3):
        assert page == wanted.tobytes()


def test_a_first_dimension_of_two_is_refused_until_it_is_named(driver):
    cache = Tensor(np.zeros((2, 6, 4, 8), "f2"))
    with pytest.raises(egmem.InvalidArgument, match="block_dim=1 for keys and values, block_dim=0 for 2 blocks"):
        egmem.kv.GpuPages.from_tensors([cache])
    assert egmem.kv.GpuPages.from_tensors([cache], block_dim=0).blocks == 2
    assert egmem.kv.GpuPages.from_tensors([cache], block_dim=1).blocks == 6
    assert egmem.kv.GpuPages.from_tensors([Tensor(np.zeros((2, 6), "f2"))]).blocks == 2


def test_parts_of_a_page_may_have_different_sizes(driver):
    """As the caches of attention (36,864 bytes a block) and of its index (8,448)."""
    layers = [numbers_of(driver, (4, size // 2)) for size in (36_864, 8_448, 36_864, 8_448)]
    for number, layer in enumerate(layers):
        layer += number
    wanted = [layer[3].copy() for layer in layers]
    page = b"".join(block.tobytes() for block in wanted)
    of_tensors = egmem.kv.GpuPages.from_tensors([Tensor(layer) for layer in layers])
    sizes = [layer[0].nbytes for layer in layers]
    of_addresses = egmem.kv.GpuPages([layer.ctypes.data for layer in layers], sizes, sizes, 4, keep=layers)
    for gpu_pages in (of_tensors, of_addresses):
        assert (gpu_pages.blocks, gpu_pages.parts, gpu_pages.block_bytes) == (4, 4, sum(sizes))
        for layer in layers:
            layer[0] = 0
        assert stored(driver, gpu_pages, 3) == page
        assert all((layer[0] == block).all() for layer, block in zip(layers, wanted))
    with pytest.raises(egmem.InvalidArgument, match="3 numbers for 4 bases"):
        egmem.kv.GpuPages([0] * 4, [16] * 3, 16, 1)
    with pytest.raises(egmem.InvalidArgument, match="32 bytes that are 16 bytes apart"):
        egmem.kv.GpuPages([0] * 2, 16, [16, 32], 1)


def test_keys_have_any_length(driver, cache):
    """vLLM's keys have 36 bytes: a hash, and the number of a group. They come back as they were given."""
    tier = egmem.kv.Tier(pages=8, page_bytes=PAGE, driver=driver)
    padded = b"k" * 31 + bytes([31])
    given = [b"h" * 32 + bytes(4), b"h" * 32 + bytes([0, 0, 0, 1]), b"h" * 32, b"k" * 31, padded, b"", bytes(1000)]
    with tier.prepare_store(given) as store:
        assert store.keys == given, "no two are the same"
        store.commit()
    assert tier.lookup(given) == len(given)
    assert [name for name, _ in reversed(tier.keys())][:-1] == given[:-1]
    assert tier.keys()[0][0] == egmem.kv.Tier.stored_key(bytes(1000)), "a hash"
    assert egmem.kv.Tier.stored_key(b"h" * 64) == b"h" * 64 and len(egmem.kv.Tier.stored_key(b"h" * 65)) == 32
    with tier.prepare_store([b"new"] + given[:-1]) as store:
        assert store.keys == [b"new"] and not store.evicted, "there is a free page"
        store.commit()
    with tier.prepare_store([b"newer"] + given[:-1]) as store:
        assert store.evicted == [egmem.kv.Tier.stored_key(bytes(1000))]
        store.commit()
    with tier.prepare_store([b"newest"] + [b"new"] + given[1:-1]) as store:
        assert store.evicted == [given[0]]
        store.commit()
    tier = egmem.kv.Tier(pages=8, page_bytes=PAGE, driver=driver)
    with tier.prepare_store(given) as store:
        store.commit()
    assert tier.remove([name for name, _ in tier.keys()]) == len(given), "a stored key is a key"


def test_one_key_is_no_list_of_keys(tier):
    calls = (tier.prepare_store, tier.prepare_load, tier.lookup, tier.touch, tier.remove)
    for call in calls:
        with pytest.raises(TypeError, match=re.escape("keys is bytes: pass a list of keys: [b'one key']")):
            call(b"one key")
        with pytest.raises(TypeError, match=re.escape("pass a list of keys: ['one key'.encode()]")):
            call("one key")
        with pytest.raises(TypeError, match=re.escape("key 1 is str, and a key is bytes: pass 'b'.encode()")):
            call([b"a", "b"])
        with pytest.raises(TypeError, match="key 0 is int, and a key is bytes"):
            call([5])
        with pytest.raises(TypeError):
            call(5)
        call(iter([]))


def resource_warnings(caught):
    return [str(each.message) for each in caught if each.category is ResourceWarning]


def test_a_store_without_commit_warns(tier):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = tier.prepare_store([b"a", b"b"])
        del store
        gc.collect()
        assert len(resource_warnings(caught)) == 1 and "2 page(s) are discarded" in resource_warnings(caught)[0]
        with tier.prepare_store([b"a"]):
            pass
        assert len(resource_warnings(caught)) == 2
    assert tier.stats()["writing"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ResourceWarning):
            with tier.prepare_store([b"a"]):
                pass
    assert tier.stats()["writing"] == 0


def test_a_store_that_was_given_up_is_silent(tier):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = tier.prepare_store([b"a"])
        store.close()
        with pytest.raises(KeyError):
            with tier.prepare_store([b"a"]):
                raise KeyError
        with tier.prepare_store([b"a"]) as store:
            store.commit()
        store = tier.prepare_store([b"b"])
        store.commit()
        del store
        tier.prepare_store([b"a"])  # nothing is to be stored
        gc.collect()
    assert not resource_warnings(caught)


def test_a_store_may_end_while_an_exception_passes(tier):
    """The temporary store ends with the exception set, which stays the one that is raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError):
            len(tier.prepare_store([b"a"])) / 0
        with pytest.raises(TypeError):
            egmem.Heap(tier.prepare_store([b"a"]), nothing=1)
        gc.collect()
    assert len(resource_warnings(caught)) == 2


@pytest.mark.parametrize("how", ["always", "error", "default"])
def test_a_store_at_the_interpreters_end(how):
    code = """
        import egmem, egmem.kv
        tier = egmem.kv.Tier(4, 4096, driver=egmem.simulated("gh200"))
        stores = [tier.prepare_store([b"a"]), tier.prepare_store([b"b"])]
    """
    done = subprocess.run([sys.executable, "-W", how, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tensors_are_on_one_gpu(driver, torch, cupy):
    """A kernel that reads a tensor of the CPU, or of another GPU, loses the context of its own."""
    array = np.zeros((8, PAGE), "u1")
    with pytest.raises(egmem.InvalidArgument, match="cpu"):
        egmem.kv.GpuPages.from_tensors([Tensor(array), Tensor(array, "cpu", None)])
    with pytest.raises(egmem.InvalidArgument, match="one GPU"):
        egmem.kv.GpuPages.from_tensors([Tensor(array), Tensor(array, index=1)])
    with pytest.raises(egmem.InvalidArgument, match="one library"):
        egmem.kv.GpuPages.from_tensors([Tensor(array), Ndarray(array)])
    tier = egmem.kv.Tier(pages=4, page_bytes=PAGE, driver=driver)
    second = egmem.kv.GpuPages.from_tensors([Tensor(array, index=1)])
    with tier.prepare_store([key(1)]) as pages:
        with pytest.raises(egmem.InvalidArgument, match="GPU 1"):
            tier.store(pages.pages, [0], second, stream=egmem.Stream(0, driver=driver))
        with pytest.raises(egmem.InvalidArgument, match="GPU 1"):
            tier.store(pages.pages, [0], second, gpu=0)
        tier.store(pages.pages, [0], second).wait()
        tier.store(pages.pages, [0], second, stream=egmem.Stream(1, driver=driver)).wait()
        pages.commit()


@pytest.mark.parametrize("given", ["generator", "list", "tuple"])
def test_tensors_live_as_long_as_their_copies(driver, given, torch):
    tier = egmem.kv.Tier(pages=4, page_bytes=2 * PAGE, driver=driver)
    tensors = [Tensor(np.full((8, PAGE), 7, "u1")) for _ in range(2)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    source = {"generator": iter, "list": list, "tuple": tuple}[given](tensors)
    gpu_pages = egmem.kv.GpuPages.from_tensors(source)
    if given == "list":
        source.clear()
    del tensors, source
    gc.collect()
    assert all(tensor() is not None for tensor in alive)
    with tier.prepare_store([key(1)]) as pages:
        job = tier.store(pages.pages, [3], gpu_pages)
        del gpu_pages
        gc.collect()
        assert all(tensor() is not None for tensor in alive)
        job.wait()
        gc.collect()
        assert all(tensor() is None for tensor in alive), "the copies have ended"
        pages.commit()
    with tier.prepare_load([key(1)]) as load:
        assert set(load.view(0).read()) == {7}


def test_threads_and_lifetimes(driver, cache):
    tier = egmem.kv.Tier(pages=64, page_bytes=PAGE, driver=driver)
    failures = []

    def work(first):
        try:
            for number in range(first, first + 20):
                with tier.prepare_store([key(number)]) as pages:
                    with memoryview(pages.view(0)) as bytes_of_page:
                        bytes_of_page[:4] = number.to_bytes(4, "little")
                    pages.commit()
                if tier.lookup([key(number)]):
                    with tier.prepare_load([key(number)]) as load:
                        assert load.view(0).read(0, 4) == number.to_bytes(4, "little")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    load = tier.prepare_load([tier.keys()[-1][0]])
    job = tier.load(load.pages, [0], cache.gpu_pages, stream=cache.stream)
    tier.close()
    assert tier.closed
    with pytest.raises(egmem.Closed):
        tier.lookup([])
    del tier, load
    job.wait()


def test_a_forked_child_is_refused(tier, cache):
    store(tier, cache, [1])
    load = tier.prepare_load([key(1)])
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: tier.lookup([]), tier.stats, lambda: load.view(0), lambda: tier.prepare_store([key(2)])):
            try:
                call()
            except egmem.InvalidArgument:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert tier.stats()["pinned"] == 1


def test_ranks_have_parts_of_pages(tier, driver):
    """Two GPUs of a tensor-parallel engine: each rank's cache has half of every page."""
    caches, pages = [], []
    for rank in range(2):
        cache = egmem.Buffer(BLOCKS * PAGE // 2, node=0, driver=driver)
        of_rank = egmem.kv.GpuPages([cache.address], PAGE // 2, PAGE // 2, BLOCKS, at=f"{rank * 2} KiB", keep=cache)
        caches.append(cache)
        pages.append((of_rank, egmem.Stream(rank, driver=driver)))
        cache.fill(rank + 1)
    assert pages[1][0].block_bytes == PAGE // 2
    with tier.prepare_store([key(1)]) as writing:
        for of_rank, stream in pages:
            tier.store(writing.pages, [0], of_rank, stream=stream).wait()
        writing.commit()
    for cache in caches:
        cache.fill(0)
    with tier.prepare_load([key(1)]) as load:
        assert load.view(0).read() == b"\1" * (PAGE // 2) + b"\2" * (PAGE // 2)
        for of_rank, stream in pages:
            tier.load(load.pages, [3], of_rank, stream=stream).wait()
        beyond = egmem.kv.GpuPages([caches[0].address], PAGE // 2, PAGE // 2, 1, at=PAGE // 2 + 1, keep=caches[0])
        with pytest.raises(egmem.InvalidArgument):
            tier.load(load.pages, [0], beyond, stream=pages[0][1])
    for rank, cache in enumerate(caches):
        assert cache.read(3 * PAGE // 2, PAGE // 2) == bytes([rank + 1]) * (PAGE // 2)


def in_memory(pages, page_bytes, *, driver, **options):
    """A tier in given memory."""
    memory = egmem.Buffer(egmem.kv.Tier.bytes_needed(pages, page_bytes), driver=driver)
    return egmem.kv.Tier.attach(memory, page_bytes=page_bytes, **options)


@pytest.mark.parametrize("create", [egmem.kv.Tier, in_memory])
@pytest.mark.parametrize("verify, found", [("never", 0), ("sample", 2), ("always", 20)])
def test_damaged_pages_are_misses(driver, create, verify, found):
    tier = create(64, PAGE, driver=driver, verify=verify)
    with tier.events() as events:
        for number in range(20):
            with tier.prepare_store([key(number)]) as writing:
                (page,) = writing.pages
                writing.commit()
            ctypes.memset(tier.page_address(page) + PAGE - 1, 1, 1)
        for number in range(20):
            with contextlib.suppress(egmem.NotReady):
                tier.prepare_load([key(number)]).release()
        kinds = [events.get(0).kind for _ in range(20 + found)]
    assert (tier.stats()["damaged"], tier.stats()["ready"]) == (found, 20 - found)
    assert kinds[20:] == ["damaged"] * found


def test_verify_has_three_values(driver):
    with pytest.raises(egmem.InvalidArgument, match='verify is "yes"; valid: "never", "sample", "always"'):
        egmem.kv.Tier(4, PAGE, verify="yes", driver=driver)
    with pytest.raises(egmem.InvalidArgument, match="verify"):
        in_memory(4, PAGE, driver=driver, verify="")


def test_a_cycle_through_a_caches_owner_is_collected(tier):
    class Engine:
        pass

    engine = Engine()
    engine.cache = egmem.Buffer(PAGE, device=0, driver=tier.driver)
    engine.pages = egmem.kv.GpuPages([engine.cache.address], PAGE, PAGE, 1, keep=engine)
    with tier.prepare_store([b"key"]) as store:
        job = tier.store(store.pages, [0], engine.pages, stream=egmem.Stream(0, driver=tier.driver))
        gone = weakref.ref(engine)
        del engine
        gc.collect()
        assert gone() is not None, "the job copies from the engine's memory"
        job.wait()
        gc.collect()
        assert gone() is None
