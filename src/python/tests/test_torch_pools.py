"""egmem.torch's pools on a machine with several GPUs: the simulator's memory, and a torch.cuda that only has a current device."""

import contextlib
import copy
import gc
import importlib.util
import weakref

import pytest

import egmem

torch = pytest.importorskip("torch")
import egmem.torch  # noqa: E402


class Base:
    """Stands for ``torch.cuda.MemPool``: of the GPU that is current."""

    def __init__(self, allocator):
        self.made_on = torch.cuda.current_device()

    def __reduce_ex__(self, protocol):
        raise TypeError("a pool cannot be copied, nor saved")


class Cuda:
    def __init__(self):
        self.current = 0
        self.routed = []  # pool, GPU, current GPU

    @contextlib.contextmanager
    def device(self, gpu):
        before, self.current = self.current, gpu
        yield
        self.current = before

    @contextlib.contextmanager
    def use_mem_pool(self, pool, device=None):
        gpu = self.current if device is None else torch.device(device).index
        self.routed.append((pool, gpu, self.current))
        yield


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    for owner in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(owner, "use_mem_pool", cuda.use_mem_pool)
    monkeypatch.setattr(torch.cuda, "MemPool", Base)
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda.current)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    return cuda


@pytest.fixture
def et(driver, cuda, monkeypatch):
    """The module once more, over that torch.cuda."""
    egmem.set_default_driver(driver)
    spec = importlib.util.spec_from_file_location("egmem.torch_again", egmem.torch.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_custom_allocator", lambda heap, keep, segments: (object(), object()))
    return module


def test_a_pool_is_of_the_gpu_that_it_was_made_for(et, cuda):
    cuda.current = 2
    for device, gpu in ((None, 2), ("cuda", 2), ("cuda:1", 1), (3, 3), (torch.device("cuda:0"), 0)):
        pool = et.MemPool(device=device)
        assert (pool.gpu, pool.made_on, pool.heap.node) == (gpu, gpu, gpu)
        assert cuda.current == 2
    assert et.MemPool(3, device="cuda:1").heap.node == 3
    for wrong in (4, -1):
        with pytest.raises(egmem.NoSuchPlace, match=str(wrong)):
            et.MemPool(0, device=wrong)
    with pytest.raises(egmem.InvalidArgument, match="no GPU"):
        et.MemPool(0, device="cpu")


def test_a_node_is_chosen_without_initialising_cuda(et, monkeypatch):
    """Once CUDA is initialised, PyTorch refuses another allocator for the process."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", None)
    assert et.heap_on().node == 0


def test_use_makes_a_pool_of_the_device_and_makes_it_current(et, cuda):
    with et.use(0, device="cuda:1") as pool:
        assert (pool.gpu, pool.heap.node) == (1, 0) and cuda.current == 1
    assert cuda.routed == [(pool, 1, 1)] and cuda.current == 0


def test_another_current_gpu_changes_nothing_for_a_pool(et, cuda):
    pool = et.MemPool(0)
    cuda.current = 3
    with et.use(pool):
        assert cuda.current == 0
        cuda.current = 2  # set_device
    with et.use(pool, device="cuda:0"):
        pass
    assert cuda.routed == [(pool, 0, 0)] * 2


def test_a_pool_on_another_gpu_is_refused(et, cuda):
    pool = et.MemPool(0)
    with pytest.raises(egmem.InvalidArgument, match="of GPU 0.*GPU 1") as refused:
        with et.use(pool, device="cuda:1"):
            pass
    assert "MemPool(device=1)" in refused.value.remedy
    with pytest.raises(egmem.InvalidArgument):
        torch.cuda.use_mem_pool(pool, 1)
    with torch.cuda.use_mem_pool(pool, "cuda:0"):
        pass
    cuda.current = 1
    for function in (torch.cuda.use_mem_pool, torch.cuda.memory.use_mem_pool):
        with pytest.raises(egmem.InvalidArgument):
            function(pool)
    theirs = Base(None)
    with torch.cuda.use_mem_pool(theirs):
        pass
    assert [pool for pool, *_ in cuda.routed] == [pool, theirs]


def test_a_heap_that_the_gpu_cannot_use_is_refused(et, driver):
    heap = egmem.Heap(0, access_by=[0], driver=driver)
    assert et.MemPool(heap=heap, device=0).heap is heap
    with pytest.raises(egmem.NotAccessible, match="GPU 1"):
        et.MemPool(heap=heap, device=1)
    full = egmem.Heap(0, limit=2 << 20, driver=driver)
    kept = full.allocate(2 << 20)
    assert et.MemPool(heap=full, device=1).gpu == 1 and kept.nbytes


def on_gpu(tensor, gpu):
    class OnGpu(torch.Tensor):
        """A tensor that says it is a GPU's."""

        is_cuda = True
        device = torch.device("cuda", gpu)
        __torch_function__ = torch._C._disabled_torch_function_impl  # tensors made from it are plain ones

    return tensor.as_subclass(OnGpu)


def optimizer_on(*gpus):
    parameters = [torch.nn.Parameter(torch.zeros(1 << 15)) for _ in gpus]
    optimizer = torch.optim.SGD(parameters, momentum=0.9)
    for parameter, gpu in zip(parameters, gpus):
        optimizer.state[parameter]["momentum_buffer"] = on_gpu(torch.ones(1 << 15), gpu)
    return optimizer, [optimizer.state[parameter] for parameter in parameters]


def test_the_state_on_each_gpu_moves_to_a_pool_of_it(et, cuda):
    optimizer, _ = optimizer_on(0, 2, 2, 1)
    pool = et.offload_optimizer(optimizer)
    assert [(each.gpu, each.made_on, each.heap.node, gpu, current) for each, gpu, current in cuda.routed] == [
        (gpu, gpu, gpu, gpu, gpu) for gpu in (0, 2, 2, 1)
    ]
    assert len({id(each) for each, *_ in cuda.routed}) == 3 and pool.gpu == 0
    cuda.routed.clear()
    et.offload_optimizer(optimizer_on(2, 0)[0], 3)
    assert [(each.gpu, each.heap.node) for each, *_ in cuda.routed] == [(2, 3), (0, 3)]


def test_a_given_pool_s_heap_has_the_state_of_all_gpus(et, cuda, driver):
    pool = et.MemPool(heap=egmem.Heap(0, driver=driver), device=1)
    assert et.offload_optimizer(optimizer_on(1, 3)[0], pool=pool) is pool
    assert [(each.gpu, each.heap is pool.heap) for each, *_ in cuda.routed] == [(1, True), (3, True)]


def test_an_offloaded_optimizer_is_saved_and_copied(et, cuda, tmp_path):
    optimizer, (state,) = optimizer_on(0)
    pool = et.MemPool(0)
    alive = weakref.ref(pool)
    assert et.offload_optimizer(optimizer, pool=pool) is pool
    moved = state["momentum_buffer"]
    copied = copy.deepcopy(optimizer.state_dict())
    torch.save(optimizer.state_dict(), tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=False)
    for saved in (copied, loaded):
        assert bool((saved["state"][0]["momentum_buffer"] == 1).all())
    cuda.routed.clear()
    del pool, optimizer
    gc.collect()
    assert alive() is not None, "the pool lives as long as its tensors"
    state.clear()
    del moved
    gc.collect()
    assert alive() is None
