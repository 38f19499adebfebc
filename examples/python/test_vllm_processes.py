"""The vLLM adapter with a process for each rank, and one for the scheduler: they join one tier, on the simulator."""

import multiprocessing
import os
import sys
import tempfile

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, os.path.dirname(__file__))

import egmem
import egmem.kv

RANKS, BLOCKS, CHUNK = 2, 8, 2
ONE_SIZE, TWO_SIZES = ((64, 64), (32, 96)), ((64, 64), (64,))  # each group's bytes of a block in each layer

pytestmark = pytest.mark.skipif(not hasattr(egmem.kv, "join"), reason="a tier of several processes is not there yet")


def config_of(rank, groups):
    from vllm_config import offloading_config

    extra = {"cpu_bytes_to_use": 8 << 20, "egmem_node": 0}
    return offloading_config([()] * len(groups), 128, extra, rank=rank, ranks=RANKS, chunk=CHUNK, engine_id="processes")


def rank_main(rank, groups, pipe):
    import egmem_vllm
    from vllm.v1.kv_offload import base

    egmem.set_default_driver(egmem.simulated("gh200"))
    memory = egmem.Buffer(2 * BLOCKS * 96, node=0)
    cache = torch.from_dlpack(memory).view(torch.int8).view(2, BLOCKS, 96)
    caches = base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(layer, 96) for layer in cache],
        [[base.CanonicalKVCacheRef(n, size) for n, size in enumerate(sizes)] for sizes in groups],
    )
    worker = egmem_vllm.EgmemOffloadingSpec(config_of(rank, groups)).get_worker(caches)
    pipe.send("ready")
    for kind, *arguments in iter(pipe.recv, None):
        if kind == "fill":
            for block in range(BLOCKS):
                cache[:, block] = arguments[0] + block
        else:
            getattr(worker, kind)(*arguments)
            worker.wait({arguments[0]})
            assert [result.success for result in worker.get_finished()] == [True]
        pipe.send(cache.clone().numpy())
    worker.shutdown()


class Ranks:
    def __init__(self, groups):
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            pipe, other = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, groups, other))
            process.start()
            other.close()
            self.pipes.append(pipe)
            self.processes.append(process)
        assert [pipe.recv() for pipe in self.pipes] == ["ready"] * RANKS

    def ask(self, kind, *arguments, each=None):
        for rank, pipe in enumerate(self.pipes):
            pipe.send((kind, *arguments) if each is None else (kind, each[rank]))
        return [pipe.recv() for pipe in self.pipes]

    def end(self):
        for pipe, process in zip(self.pipes, self.processes):
            if process.is_alive():
                pipe.send(None)
            process.join()


@pytest.fixture(params=[ONE_SIZE, TWO_SIZES], ids=["one size", "two sizes"])
def engine(monkeypatch, request):
    import egmem_vllm
    from vllm.v1.kv_offload import base

    groups = request.param
    if groups == TWO_SIZES and not hasattr(egmem.kv.Tier, "groups"):
        pytest.skip("pages of several sizes are not there yet")
    folder = tempfile.TemporaryDirectory(prefix="egmem-")  # with a short path, as a socket needs
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder.name)  # of the processes too
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))
    egmem.set_default_driver(egmem.simulated("gh200"))
    ranks = Ranks(groups)
    manager = egmem_vllm.EgmemOffloadingSpec(config_of(0, groups)).get_manager()
    yield base, ranks, manager
    ranks.end()
    manager.shutdown()
    egmem.set_default_driver(None)
    folder.cleanup()


def test_each_rank_copies_its_part(engine):
    base, ranks, manager = engine
    request = base.ReqContext("request")
    keys = [base.make_offload_key(bytes([group]) * 32, group) for group in range(2)]
    ranks.ask("fill", each=[10, 60])
    output = manager.prepare_store(keys, request)
    ranks.ask("submit_store", 1, base.GPULoadStoreSpec([1, 2, 3, 4], [2, 2], [0, 0]), output.store_spec)
    manager.complete_store(keys, request)
    assert [manager.lookup(key, request) for key in keys] == [base.LookupResult.HIT] * 2
    ranks.ask("fill", each=[0, 0])
    spec = manager.prepare_load(keys, request)
    there = ranks.ask("submit_load", 2, spec, base.GPULoadStoreSpec([7, 6, 5, 0], [2, 2], [0, 0]))
    manager.complete_load(keys, request)
    for first, cache in zip((10, 60), there):
        assert [cache[0, block, 0] for block in (7, 6, 5, 0)] == [first + 1, first + 2, first + 3, first + 4]
        assert (cache[1, [7, 6], :64] == [[first + 1], [first + 2]]).all()


def test_a_rank_that_is_killed_keeps_no_page(engine):
    base, ranks, manager = engine
    request = base.ReqContext("request")
    key = base.make_offload_key(bytes(32), 0)
    output = manager.prepare_store([key], request)
    ranks.processes[1].kill()
    ranks.processes[1].join()
    manager.complete_store([key], request, success=False)
    assert len(output.keys_to_store) == 1 and manager.lookup(key, request) == base.LookupResult.MISS
    assert manager.prepare_store([key], request).keys_to_store == [key]
