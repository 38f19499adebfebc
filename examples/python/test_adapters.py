"""The adapters with the real packages, on the simulator: python -m pytest examples/python. Skipped where a package is missing.

vllm 0.33.0, sglang 0.5.23 and lmcache 0.5.6 were installed without their dependencies on kernels for GPUs.
"""

import dataclasses
import gc
import itertools
import os
import sys
import tempfile
import types

import pytest

import egmem
import egmem.kv

torch = pytest.importorskip("torch")
sys.path.insert(0, os.path.dirname(__file__))

BLOCKS, PAGE, LAYERS = 16, 1024, 3
NUMBERS = itertools.count()  # of engines


@pytest.fixture(autouse=True)
def driver():
    driver = egmem.simulated("gh200")
    egmem.set_default_driver(driver)
    yield driver
    egmem.set_default_driver(None)


class Engine:
    """As much of a vLLM engine as the connector shows to a spec."""

    def __init__(self, driver, chunk=1, is_first="manager", **extra):
        from vllm.v1.kv_offload import base, factory
        from vllm_config import offloading_config

        self.base = base
        extra = {
            "spec_name": "EgmemOffloadingSpec",
            "spec_module_path": "egmem_vllm",
            "cpu_bytes_to_use": 4 * chunk * LAYERS * PAGE,
            **extra,
        }
        layers = [[f"layer{n}" for n in range(LAYERS)]]
        self.config = offloading_config(layers, LAYERS * PAGE, extra, chunk=chunk, engine_id=f"engine-{next(NUMBERS)}")
        memory = egmem.Buffer(LAYERS * BLOCKS * PAGE, node=0, driver=driver)
        self.cache = torch.from_dlpack(memory).view(torch.int8).view(LAYERS, BLOCKS, PAGE)
        caches = base.CanonicalKVCaches(
            [base.CanonicalKVCacheTensor(layer, PAGE) for layer in self.cache],
            [[base.CanonicalKVCacheRef(index, PAGE) for index in range(LAYERS)]],
        )
        # The scheduler and the worker make a spec each.
        specs = [factory.OffloadingSpecFactory.create_spec(self.config) for _ in range(2)]
        if is_first == "worker":
            self.worker = specs[1].get_worker(caches)
        self.manager = specs[0].get_manager()
        self.worker = specs[1].get_worker(caches)
        self.request = base.ReqContext("request")
        self.manager.on_new_request(self.request)

    def keys(self, *numbers):
        return [self.base.make_offload_key(bytes([number]) * 32, 0) for number in numbers]

    def blocks(self, *blocks, index=0):
        return self.base.GPULoadStoreSpec(list(blocks), [len(blocks)], [index])

    def finish(self, job_id):
        self.worker.wait({job_id})
        (result,) = self.worker.get_finished()
        assert (result.job_id, result.success) == (job_id, True) and result.transfer_time >= 0
        return result

    def store(self, keys, *blocks):
        output = self.manager.prepare_store(keys, self.request)
        assert self.worker.submit_store(1, self.blocks(*blocks), output.store_spec)
        assert self.finish(1).transfer_size == len(blocks) * LAYERS * PAGE
        self.manager.complete_store(output.keys_to_store, self.request)
        return output


def test_vllm_stores_and_loads(driver):
    pytest.importorskip("vllm")
    engine = Engine(driver)
    hit, miss, pending = (engine.base.LookupResult[name] for name in ("HIT", "MISS", "HIT_PENDING"))
    for block in range(BLOCKS):
        engine.cache[:, block] = block
    keys = engine.keys(1, 2, 3)
    assert engine.manager.lookup(keys[0], engine.request) == miss
    output = engine.manager.prepare_store(keys, engine.request)
    assert output.keys_to_store == keys and output.evicted_keys == []
    assert engine.manager.lookup(keys[0], engine.request) == pending
    engine.worker.submit_store(7, engine.blocks(4, 5, 6), output.store_spec)
    engine.finish(7)
    engine.manager.complete_store(keys, engine.request)
    assert [engine.manager.lookup(key, engine.request) for key in keys] == [hit] * 3
    engine.cache.zero_()
    spec = engine.manager.prepare_load([keys[2], keys[0]], engine.request)
    # A pinned page makes no room: the tier has four pages, of which one is free and one may be evicted.
    assert engine.manager.prepare_store(engine.keys(10, 11, 12), engine.request) is None
    assert engine.manager.lookup(engine.keys(10)[0], engine.request) == miss
    engine.worker.submit_load(8, spec, engine.blocks(0, 9))
    engine.finish(8)
    engine.manager.complete_load([keys[2], keys[0]], engine.request)
    assert engine.cache[:, 0].eq(6).all() and engine.cache[:, 9].eq(4).all() and engine.cache[:, 1].eq(0).all()


def test_vllm_is_told_what_was_evicted(driver):
    pytest.importorskip("vllm")
    engine = Engine(driver)
    keys = engine.keys(1, 2, 3, 4)
    engine.store(keys, 0, 1, 2, 3)
    engine.manager.touch(keys[1:], engine.request)
    assert engine.store(engine.keys(5), 4).evicted_keys == [keys[0]]
    # A page that is there already is not stored once more, and stays although it is the least recently used.
    engine.manager.touch(engine.keys(3, 4, 5), engine.request)
    output = engine.manager.prepare_store(engine.keys(6, 2), engine.request)
    assert output.keys_to_store == engine.keys(6) and output.evicted_keys != engine.keys(2)
    assert engine.manager.lookup(keys[1], engine.request) == engine.base.LookupResult.HIT
    engine.manager.complete_store(output.keys_to_store, engine.request, success=False)
    assert engine.manager.lookup(engine.keys(6)[0], engine.request) == engine.base.LookupResult.MISS
    engine.manager.reset_cache()
    assert engine.manager.tier.stats()["free"] == 4
    engine.manager.shutdown()


@pytest.mark.skipif("at" not in (egmem.kv.GpuPages.__text_signature__ or ""), reason="copies of parts of pages are not there yet")
def test_vllm_puts_the_blocks_of_a_chunk_into_a_page(driver):
    pytest.importorskip("vllm")
    engine = Engine(driver, chunk=2)
    for block in range(BLOCKS):
        engine.cache[:, block] = block
    keys = engine.keys(1, 2)
    output = engine.manager.prepare_store(keys, engine.request)
    engine.worker.submit_store(1, engine.blocks(4, 9, 5, 2), output.store_spec)
    engine.finish(1)
    engine.manager.complete_store(keys, engine.request)
    engine.cache.zero_()
    # The request has the first block already.
    engine.worker.submit_load(2, engine.manager.prepare_load(keys, engine.request), engine.blocks(1, 3, 7, index=1))
    assert engine.finish(2).transfer_size == 3 * LAYERS * PAGE
    engine.manager.complete_load(keys, engine.request)
    assert [int(engine.cache[0, block, 0]) for block in (1, 3, 7)] == [9, 5, 2] and engine.cache[:, 4].eq(0).all()
    engine.worker.shutdown()
    engine.manager.shutdown()


def test_vllm_resets_while_a_load_runs(driver):
    pytest.importorskip("vllm")
    engine = Engine(driver)
    hit, miss = (engine.base.LookupResult[name] for name in ("HIT", "MISS"))
    keys = engine.keys(1, 2)
    engine.store(keys, 0, 1)
    spec = engine.manager.prepare_load(keys[:1], engine.request)
    engine.worker.submit_load(8, spec, engine.blocks(5))
    engine.manager.reset_cache()
    assert [engine.manager.lookup(key, engine.request) for key in keys] == [miss, miss], "they are of the old weights"
    assert engine.manager.prepare_store(keys, engine.request).keys_to_store == keys[1:], "the other page is in use"
    engine.manager.reset_cache()  # once more, before the first is flushed
    engine.finish(8)
    engine.manager.on_reset_flushed()
    assert engine.manager.tier.stats()["free"] == 4
    engine.store(keys, 2, 3)
    assert [engine.manager.lookup(key, engine.request) for key in keys] == [hit, hit]
    engine.manager.shutdown()


def test_vllm_resets_before_a_store_is_submitted(driver):
    pytest.importorskip("vllm")
    engine = Engine(driver)
    (key,) = engine.keys(1)
    output = engine.manager.prepare_store([key], engine.request)
    engine.manager.reset_cache()
    assert engine.manager.lookup(key, engine.request) == engine.base.LookupResult.MISS
    assert engine.worker.submit_store(3, engine.blocks(4), output.store_spec)
    engine.finish(3)
    engine.manager.on_reset_flushed()
    assert engine.manager.lookup(key, engine.request) == engine.base.LookupResult.MISS
    assert engine.manager.tier.stats()["free"] == 4
    engine.manager.shutdown()


def test_vllm_goes_on_after_a_page_that_is_not_stored(driver):
    pytest.importorskip("vllm")
    engine = Engine(driver)
    keys = engine.keys(1, 2)
    engine.manager.prepare_store(keys, engine.request)
    view = engine.manager._storing[keys[0]].held.view(0)  # as a copy that has not ended, it keeps the store from its commit
    engine.manager.complete_store(keys, engine.request)
    results = [engine.manager.lookup(key, engine.request) for key in keys]
    assert results == [engine.base.LookupResult.MISS] * 2  # the pages of a job are stored together
    del view
    gc.collect()
    assert engine.manager.tier.stats()["free"] == 4


def test_vllm_tensors_have_as_many_blocks(driver):
    pytest.importorskip("vllm")
    engine = Engine(driver)
    caches = engine.base.CanonicalKVCaches(
        [engine.base.CanonicalKVCacheTensor(layer, PAGE) for layer in (engine.cache[0], engine.cache[1, : BLOCKS - 1])],
        [[engine.base.CanonicalKVCacheRef(index, PAGE) for index in range(2)]],
    )
    import egmem_vllm

    with pytest.raises(ValueError, match="as many blocks"):
        egmem_vllm._gpu_pages(caches, engine.manager.tier, egmem_vllm.Share())


def test_vllm_finds_its_pages_again(driver, server):
    pytest.importorskip("vllm")
    first = Engine(driver, egmem_address=server, egmem_tag="test")
    first.cache[:, 3] = 33
    first.store(first.keys(9), 3)
    first.worker.shutdown()
    first.manager.shutdown()
    second = Engine(driver, egmem_address=server, egmem_tag="test")
    assert second.manager.lookup(second.keys(9)[0], second.request) == second.base.LookupResult.HIT
    spec = second.manager.prepare_load(second.keys(9), second.request)
    second.worker.submit_load(1, spec, second.blocks(12))
    second.finish(1)
    assert second.cache[:, 12].eq(33).all()


def test_vllm_takes_a_tier_over_from_a_killed_container(driver, server):
    pytest.importorskip("vllm")
    options = {"egmem_address": server, "egmem_name": "container", "egmem_tag": "test"}
    first = Engine(driver, **options)
    first.store(first.keys(9), 3)
    # What a process of another PID namespace leaves that is killed: nothing here tells that it has ended.
    with egmem.connect(server) as client, client.fetch("container", mode="rw") as memory:
        word = int.from_bytes(memory.read(4096, 8), "little")
        memory.write((word ^ 1 << 22).to_bytes(8, "little"), 4096)
    with pytest.raises(egmem.InUse, match="take_over"):
        Engine(driver, **options)
    second = Engine(driver, egmem_take_over=True, **options)
    assert second.manager.lookup(second.keys(9)[0], second.request) == second.base.LookupResult.HIT
    for engine in (first, second):
        engine.worker.shutdown()
        engine.manager.shutdown()


def test_vllm_places_a_tier_near_the_workers_gpu(driver, monkeypatch):
    pytest.importorskip("vllm")
    import egmem_vllm

    many = egmem.simulated("gh200x4")
    nodes = [many.topology().gpu(gpu).host_node for gpu in range(4)]
    cache = types.SimpleNamespace(tensor=types.SimpleNamespace(is_cuda=True, device=torch.device("cuda", 2)))
    assert egmem_vllm._gpu_of(types.SimpleNamespace(tensors=[cache])) == 2
    assert len(set(nodes)) == 4
    with tempfile.TemporaryDirectory(prefix="egmem-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        egmem.set_default_driver(many)
        monkeypatch.setattr(egmem_vllm, "_gpu_of", lambda kv_caches: 2)
        named = {"egmem_name": "near", "egmem_tag": "test"}
        for extra, node in [({}, nodes[2]), (named, nodes[2]), ({"egmem_node": nodes[1]}, nodes[1])]:
            engine = Engine(many, is_first="worker", **extra)
            assert repr(engine.worker.tier).endswith(f" on host NUMA node {node}>"), extra
            engine.worker.shutdown()
            engine.manager.shutdown()


def _configuration(folder, **changes):
    """As much of vLLM's configuration as the tag looks at."""

    class VllmConfig:
        use_v2_model_runner = True
        parallel_config = types.SimpleNamespace(nnodes_within_dp=1, distributed_executor_backend="uni")
        cache_config = types.SimpleNamespace(cache_dtype="auto")
        load_config = types.SimpleNamespace(load_format="auto", download_dir=None)
        model_config = types.SimpleNamespace(
            model=str(folder), revision=None, dtype=torch.bfloat16, quantization=None, seed=0, hf_config=types.SimpleNamespace(layers=2)
        )

    for name, value in changes.items():
        part, _, field = name.partition("__")
        setattr(getattr(VllmConfig, part), field, value) if field else setattr(VllmConfig, part, value)
    return VllmConfig()


def test_vllm_tags_tell_models_apart(driver, tmp_path):
    pytest.importorskip("vllm")
    import egmem_vllm

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    config = Engine(driver).config

    def tag(config=config, **changes):
        return egmem_vllm.model_tag(config, _configuration(tmp_path, **changes))

    first = tag()
    assert tag() == first and len(first) == 32
    for changes in [
        {"model_config__revision": "other"},
        {"model_config__dtype": torch.float16},
        {"model_config__hf_config": types.SimpleNamespace(layers=3)},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        {"cache_config__mamba_cache_dtype": "float16"},
        {"cache_config__mamba_ssm_cache_dtype": "float16"},
        {"cache_config__mamba_cache_mode": "align"},
        {"attention_config": types.SimpleNamespace(indexer_kv_dtype="fp8")},
        {"model_config__original_max_model_len": 4096},
        {"use_v2_model_runner": False},
    ]:
        assert tag(**changes) != first, changes
    for changed in [
        dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tp_size=2)),
        dataclasses.replace(config, cache=dataclasses.replace(config.cache, blocks_per_chunk=2)),
        dataclasses.replace(config, extra_config={"egmem_tag": "other"}),
    ]:
        assert tag(changed) != first
    # Of another rank of the same engine it is the same.
    assert tag(dataclasses.replace(config, worker_kv_bytes_per_block=5, engine_id="other")) == first
    for offset in (0, (3 << 20) - 1):
        content = bytearray(3 << 20)
        content[offset] = 1
        weights.write_bytes(content)
        assert tag() != first
    weights.write_bytes(bytes((3 << 20) + 1))
    assert tag() != first
    weights.write_bytes(bytes(3 << 20))
    assert tag() == first
    with pytest.raises(ValueError, match="egmem_tag"):
        egmem_vllm.model_tag(config)
    defaults = {"kv_cache_dtype_skip_layers": [], "mamba_cache_dtype": "auto", "mamba_cache_mode": "none", "calculate_kv_scales": False}
    assert tag(**{f"cache_config__{name}": value for name, value in defaults.items()}, model_config__original_max_model_len=-1) == first
    with pytest.raises(ValueError, match="calculate_kv_scales"):
        tag(cache_config__calculate_kv_scales=True)
    # Another adapter of the same name has the same keys.
    with pytest.raises(ValueError, match="LoRA.*egmem_tag"):
        tag(lora_config=types.SimpleNamespace(max_lora_rank=16))
    named = [dataclasses.replace(config, extra_config={"egmem_tag": text}) for text in ("adapters 1", "adapters 2")]
    assert len({tag(config, lora_config=types.SimpleNamespace(max_lora_rank=16)) for config in named}) == 2


@pytest.mark.parametrize("suffix", ["safetensors", "tensors"])
def test_vllm_tags_depend_on_the_weights(driver, tmp_path, suffix):
    pytest.importorskip("vllm")
    import egmem_vllm

    snapshot, file = tmp_path / "snapshot", tmp_path / "snapshot" / f"model.{suffix}"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    assert egmem_vllm.weights_digest(snapshot) is None, "the weights are elsewhere"
    file.write_bytes(b"1" * 100)
    first = egmem_vllm.weights_digest(snapshot)
    file.write_bytes(b"2" * 100)
    assert egmem_vllm.weights_digest(snapshot) not in (None, first)
    # Hugging Face's cache: a file that differs between the samples has another hash.
    digests = set()
    for name, content in (("hash-1", b"1"), ("hash-2", b"2")):
        blob = bytearray(4 << 20)
        blob[100 << 10] = content[0]
        (tmp_path / name).write_bytes(blob)
        file.unlink()
        file.symlink_to(tmp_path / name)
        digests.add(egmem_vllm.weights_digest(snapshot))
    assert len(digests) == 2


def test_vllm_finds_the_configuration_of_its_caller(driver, tmp_path):
    pytest.importorskip("vllm")
    import egmem_vllm

    def connector(vllm_config):
        return egmem_vllm.EgmemOffloadingSpec(Engine(driver).config)

    config = _configuration(tmp_path)
    assert connector(config)._engine is config
    config.parallel_config.nnodes_within_dp = 2
    with pytest.raises(ValueError, match="one machine"):
        connector(config)


def test_vllm_keeps_a_page_that_another_engine_would_evict(driver, server):
    pytest.importorskip("vllm")
    engine = Engine(driver, egmem_address=server, egmem_name="shared", egmem_tag="test")
    hit, miss = (engine.base.LookupResult[name] for name in ("HIT", "MISS"))
    keys = engine.keys(1, 2, 3, 4)
    engine.store(keys, 0, 1, 2, 3)
    assert engine.manager.lookup(keys[0], engine.request) == hit
    # Another engine's stores, which this manager does not see.
    with engine.manager.tier.prepare_store(engine.keys(5, 6, 7)) as store:
        store.commit()
    with pytest.raises(egmem.OutOfMemory):
        engine.manager.tier.prepare_store(engine.keys(5, 6, 7, 8))
    spec = engine.manager.prepare_load(keys[:1], engine.request)
    engine.manager.on_schedule_end(None)
    engine.manager.complete_load(keys[:1], engine.request)
    assert len(spec.block_ids) == 1 and engine.manager.lookup(keys[1], engine.request) == miss
    engine.manager.on_schedule_end(None)
    with engine.manager.tier.prepare_store(engine.keys(5, 6, 7, 8)) as store:
        store.commit()
    assert engine.manager.lookup(keys[0], engine.request) == miss
    engine.worker.shutdown()
    engine.manager.shutdown()


def test_vllm_evicts_the_end_of_a_sequence_first(driver):
    pytest.importorskip("vllm")
    engine = Engine(driver, egmem_verify="always")
    manager, keys = engine.manager, engine.keys(1, 2, 3, 4)
    engine.store(keys, 0, 1, 2, 3)

    def order():
        return [key for key, _ in manager.tier.keys()]

    def look_up():
        assert all(manager.lookup(key, engine.request) == engine.base.LookupResult.HIT for key in keys)

    look_up()
    manager.on_schedule_end(None)
    assert order() == keys[::-1]
    look_up()
    manager.prepare_load(keys, engine.request)
    manager.on_schedule_end(None)
    manager.complete_load(set(keys), engine.request)
    assert order() == keys[::-1]
    # Only two of them were looked up.
    for key in keys[2:]:
        manager.lookup(key, engine.request)
    manager.prepare_load(keys, engine.request)
    manager.complete_load(set(keys), engine.request)
    assert manager.tier.stats()["pinned"] == 0


@pytest.mark.skipif(not hasattr(egmem.kv, "join"), reason="a tier of several engines is not there yet")
def test_vllm_engines_share_a_tier(driver, monkeypatch):
    pytest.importorskip("vllm")
    with tempfile.TemporaryDirectory(prefix="egmem-") as folder:  # a socket's path is short
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        first, second = (Engine(driver, egmem_name="pool", egmem_tag="one", egmem_node=0) for _ in range(2))
        other = Engine(driver, egmem_name="pool", egmem_tag="other", egmem_node=0)
        hit, miss = (first.base.LookupResult[name] for name in ("HIT", "MISS"))
        first.cache[:, 3] = 33
        keys = first.keys(1, 2, 3, 4, 5)
        first.store(keys[:1], 3)
        assert other.manager.lookup(keys[0], other.request) == miss, "it serves another model"
        assert second.manager.lookup(keys[0], second.request) == hit
        # The page stays until the second engine has loaded it, although the first one needs all pages.
        assert first.manager.prepare_store(keys[1:], first.request) is None
        spec = second.manager.prepare_load(keys[:1], second.request)
        second.manager.on_schedule_end(None)
        second.worker.submit_load(1, spec, second.blocks(12))
        second.finish(1)
        second.manager.complete_load(keys[:1], second.request)
        assert second.cache[:, 12].eq(33).all()
        first.store(keys[1:], 4, 5, 6, 7)
        assert second.manager.lookup(keys[0], second.request) == miss
        for engine in (second, other, first):
            engine.worker.shutdown()
            engine.manager.shutdown()


def test_vllm_forgets_pages_of_before_a_reset_that_another_engine_had(driver, monkeypatch):
    pytest.importorskip("vllm")
    with tempfile.TemporaryDirectory(prefix="egmem-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        first, second = (Engine(driver, egmem_name="pool", egmem_tag="one", egmem_node=0) for _ in range(2))
        hit, miss = (first.base.LookupResult[name] for name in ("HIT", "MISS"))
        keys = first.keys(1, 2)
        first.store(keys, 0, 1)
        second.manager.prepare_load(keys, second.request)
        first.manager.reset_cache()
        for _ in range(4):
            first.manager.on_schedule_end(None)
        first.manager.on_reset_flushed()  # what vLLM does from 0.33 on
        assert [first.manager.lookup(key, first.request) for key in keys] == [miss] * 2, "they are of the old weights"
        second.manager.complete_load(keys, second.request)
        first.manager.on_schedule_end(None)
        assert first.manager.tier.stats()["free"] == 4
        second.store(keys, 2, 3)
        assert [first.manager.lookup(key, first.request) for key in keys] == [hit] * 2
        # A page that is stored again before the next step is new, too.
        second.manager.prepare_load(keys[:1], second.request)
        first.manager.reset_cache()
        first.manager.on_reset_flushed()
        second.manager.complete_load(keys[:1], second.request)
        second.manager.reset_cache()
        first.store(keys, 4, 5)
        assert [first.manager.lookup(key, first.request) for key in keys] == [hit] * 2
        for engine in (second, first):
            engine.worker.shutdown()
            engine.manager.shutdown()


def test_sglang_takes_tensors_of_their_size():
    common = pytest.importorskip("sglang.srt.mem_cache.pool_host.common")
    import egmem_sglang

    original = common.get_allocator_from_storage, dict(common.ALLOC_MEMORY_FUNCS)
    try:
        egmem_sglang.install(node=0)
        allocator = common.get_allocator_from_storage("default")
        assert isinstance(allocator, egmem_sglang.EgmemHostTensorAllocator)
        assert isinstance(common.get_allocator_from_storage("shm"), common.ShmHostTensorAllocator)
        allocate = common.ALLOC_MEMORY_FUNCS["cuda"]
        tensor = allocate((2, 8, 64, 4), dtype=torch.float16, device="cpu", pin_memory=True, allocator=allocator)
        tensor.fill_(2)
        assert (tensor.shape, tensor.dtype, allocator.dims) == ((2, 8, 64, 4), torch.float16, (2, 8, 64, 4))
        common._cuda_host_unregister_ranges(None, getattr(tensor, common._CUDA_HOST_REGISTERED_RANGES_ATTR), operation="test")
        with pytest.raises(ValueError):
            allocator.allocate((1,), torch.float16, "cuda")
    finally:
        common.get_allocator_from_storage = original[0]
        common.ALLOC_MEMORY_FUNCS.clear()
        common.ALLOC_MEMORY_FUNCS.update(original[1])


def test_sglang_finds_its_pool_again(server):
    pytest.importorskip("sglang.srt.mem_cache.pool_host.common")
    import egmem_sglang

    first = egmem_sglang.EgmemHostTensorAllocator(address=server, name="pool")
    first.allocate((4, 100), torch.float32)[2] = 5
    gc.collect()
    again = egmem_sglang.EgmemHostTensorAllocator(address=server, name="pool").allocate((4, 100), torch.float32)
    assert again[2].eq(5).all() and again[1].eq(0).all() and again.shape == (4, 100)
    # Another model, or another shape of as many bytes, has other memory.
    other = egmem_sglang.EgmemHostTensorAllocator(address=server, name="pool", tag="model").allocate((4, 100), torch.float32)
    reshaped = egmem_sglang.EgmemHostTensorAllocator(address=server, name="pool").allocate((100, 4), torch.float32)
    assert other.eq(0).all() and reshaped.eq(0).all()


def test_sglang_pools_share_no_memory(server, monkeypatch):
    common = pytest.importorskip("sglang.srt.mem_cache.pool_host.common")
    import egmem_sglang

    monkeypatch.setattr(egmem_sglang, "LEASE_SECONDS", 0.2)
    # `install` replaces these.
    monkeypatch.setattr(common, "get_allocator_from_storage", common.get_allocator_from_storage)
    monkeypatch.setattr(common, "ALLOC_MEMORY_FUNCS", dict(common.ALLOC_MEMORY_FUNCS))
    egmem_sglang.install(address=server)
    tensors = [common.get_allocator_from_storage("default").allocate((4, 100), torch.float32) for _ in range(2)]
    tensors[0].fill_(1)
    tensors[1].fill_(2)
    assert tensors[0].eq(1).all()
    # Another server that was given no name of its own.
    with pytest.raises(egmem.InUse, match="sglang-0-0"):
        egmem_sglang.EgmemHostTensorAllocator(address=server).allocate((4, 100), torch.float32)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    tensor = egmem_sglang.EgmemHostTensorAllocator(address=server).allocate((4, 100), torch.float32)
    tensor.fill_(3)
    assert tensors[0].eq(1).all() and tensors[1].eq(2).all()


@pytest.mark.parametrize("paging", [False, True])
def test_lmcache_allocates_objects(paging):
    management = pytest.importorskip("lmcache.v1.memory_management")
    import egmem_lmcache

    shape, dtype = torch.Size([2, LAYERS, 16, 64]), torch.float16
    bytes_of_one = shape.numel() * 2
    allocator = egmem_lmcache.EgmemMemoryAllocator(
        4 * bytes_of_one, node=0, use_paging=paging, shapes=[shape], dtypes=[dtype]
    )
    assert isinstance(allocator, management.MemoryAllocatorInterface)
    objects = allocator.batched_allocate(shape, dtype, 3)
    one = allocator.allocate(shape, dtype)
    assert allocator.allocate(shape, dtype) is None, "four fit"
    base = allocator.buffer.data_ptr()
    assert sorted(memory.data_ptr - base for memory in [*objects, one]) == [n * bytes_of_one for n in range(4)]
    one.tensor.fill_(3)
    assert set(bytes(one.byte_array)) == {0, 0x42} and one.get_size() == bytes_of_one
    one.ref_count_down()
    assert allocator.allocate(shape, dtype).data_ptr == one.data_ptr
    allocator.batched_free(objects)
    assert allocator.allocate(shape, dtype) is not None
    assert allocator.memcheck()
    kept = allocator.allocate(shape, dtype)
    kept.tensor.fill_(4)
    heap = egmem.torch.heap_on(0)
    allocator.close()
    assert allocator.allocate(shape, dtype) is None and allocator.batched_allocate(shape, dtype, 1) is None
    assert kept.tensor.eq(4).all()
    kept.ref_count_down()
    allocator.batched_free([kept])
    del kept, objects, one
    gc.collect()
    assert heap.stats()["live_blocks"] == 0, "the memory went back"



def test_lmcache_evicts_when_its_memory_is_full():
    backends = pytest.importorskip("lmcache.v1.storage_backend.local_cpu_backend")
    import egmem_lmcache
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig

    shape, dtype = torch.Size([2, LAYERS, 16, 64]), torch.float16
    allocator = egmem_lmcache.EgmemMemoryAllocator(4 * shape.numel() * 2, node=0)
    config = LMCacheEngineConfig.from_defaults(local_cpu=True, max_local_cpu_size=1)
    backend = backends.LocalCPUBackend(config, memory_allocator=allocator)
    # LMCache evicts in batches where it stores each layer by itself.
    chunks = [CacheEngineKey("model", 1, 0, number, dtype) for number in range(2)]
    keys = [key for chunk in chunks for key in chunk.split_layers(2)]
    for number, key in enumerate(keys):
        memory = backend.allocate(shape, dtype)
        memory.tensor.fill_(number)
        backend.submit_put_task(key, memory)
        memory.ref_count_down()
    new = backend.batched_allocate(shape, dtype, 2, eviction=True, busy_loop=False)
    assert len(new) == 2 and [backend.contains(key) for key in keys] == [False, False, True, True]
    found = backend.get_blocking(keys[2])
    assert found.tensor.eq(2).all()
    assert allocator.align_bytes == 4096  # LMCache's budget of chunks asks for it
    for memory in [*new, found]:
        memory.ref_count_down()
    backend.batched_remove(keys[2:])
    assert allocator.memcheck() and len(allocator.batched_allocate(shape, dtype, 4)) == 4
