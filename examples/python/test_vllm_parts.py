"""The vLLM adapter with several ranks, groups and blocks per chunk: which bytes go where.

The classes of vLLM are real. The tier is a model of one, in Python, with pages of several sizes that several workers copy.
"""

import ctypes
import dataclasses
import os
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, os.path.dirname(__file__))

import egmem
import egmem.kv

BLOCKS = 24


class FakeJob:
    def __init__(self, nbytes, error=None):
        self.nbytes, self.error = nbytes, error

    def is_done(self):
        if self.error:
            raise self.error
        return True

    def wait(self):
        self.is_done()


class FakeHeld:
    """A store or a load of keys."""

    def __init__(self, tier, keys, pages):
        self.tier, self.keys, self.pages, self.evicted = tier, keys, pages, []
        self.indices = list(range(len(keys)))

    def commit(self):
        if self.tier.failed.intersection(self.pages):
            raise egmem.InvalidArgument("a copy failed")
        self.tier.ready.update(zip(self.keys, self.pages))

    def close(self):
        self.pages = []

    release = close


class FakePages:
    """`GpuPages`: a part of a page for each base, the first at `at`."""

    def __init__(self, bases, strides, sizes, blocks, keep=None, at=0):
        self.parts = list(zip(bases, strides, sizes))
        self.blocks, self.at = blocks, at


class FakeTier:
    closed = False
    driver = None

    def __init__(self, sizes):
        self.sizes, self.groups = sizes, len(sizes)
        self.memory, self.of, self.ready, self.failed = {}, {}, {}, set()

    page_bytes = property(lambda self: self.sizes[0])

    def page_bytes_of(self, group):
        return self.sizes[group]

    def lookup(self, keys, group=None):
        return int(all(key in self.ready for key in keys))

    def prepare_store(self, keys, group=None):
        pages = []
        for size in group or [0] * len(keys):
            pages.append(len(self.memory))
            self.memory[pages[-1]], self.of[pages[-1]] = bytearray(self.sizes[size]), size
        return FakeHeld(self, list(keys), pages)

    def prepare_load(self, keys, group=None):
        for key in keys:
            if key not in self.ready:
                raise egmem.NotReady(key)
        return FakeHeld(self, list(keys), [self.ready[key] for key in keys])

    def _copy(self, pages, blocks, places, to_page):
        total = 0
        for page, block in zip(pages, blocks, strict=True):
            assert block < places.blocks
            offset = places.at
            for base, stride, size in places.parts:
                assert offset + size <= len(self.memory[page])
                there = (ctypes.c_char * size).from_buffer(self.memory[page], offset)
                here = (ctypes.c_char * size).from_address(base + int(block) * stride)
                ctypes.memmove(*((there, here) if to_page else (here, there)), size)
                offset += size
                total += size
        return FakeJob(total)

    def store(self, pages, blocks, places, *, stream):
        return self._copy(pages, blocks, places, True)

    def load(self, pages, blocks, places, *, stream):
        return self._copy(pages, blocks, places, False)

    def close(self):
        self.closed = True


class Machine:
    """An engine's scheduler and its ranks, each with the caches of its layers: one tensor for each size, shared by the groups."""

    def __init__(self, monkeypatch, ranks=1, groups=((64, 64),), chunk=1, replicated=False):
        import egmem_vllm
        from vllm.v1.kv_offload import base
        from vllm_config import offloading_config

        self.base, self.chunk = base, chunk
        monkeypatch.setattr(egmem.kv, "GpuPages", FakePages)
        monkeypatch.setattr(egmem, "Stream", lambda driver: None)
        self.options = None
        monkeypatch.setattr(egmem_vllm, "_join", self._join)
        monkeypatch.setattr(egmem_vllm, "_tiers", {})
        monkeypatch.setattr(egmem.kv, "Tier", lambda **options: self._join("private", options))
        self.tier = None
        self.caches, self.workers = [], []
        for rank in range(ranks):
            offloading = offloading_config(
                [map(str, sizes) for sizes in groups],
                max(map(sum, groups)),
                {"cpu_bytes_to_use": 1 << 20},
                rank=rank,
                ranks=ranks,
                chunk=chunk,
                events=True,
                **({"replicated_layout": True} if replicated else {}),
            )
            if ranks > 1:
                egmem_vllm._tiers.clear()  # each rank is a process
            most = max(map(len, groups))
            caches = [torch.zeros(BLOCKS, max(max(sizes) for sizes in groups), dtype=torch.int8) for _ in range(most)]
            self.caches.append(caches)
            self.workers.append(
                egmem_vllm.EgmemOffloadingSpec(offloading).get_worker(
                    base.CanonicalKVCaches(
                        [base.CanonicalKVCacheTensor(cache, cache.shape[1]) for cache in caches],
                        [[base.CanonicalKVCacheRef(n, size) for n, size in enumerate(sizes)] for sizes in groups],
                    )
                )
            )
        if ranks > 1:
            egmem_vllm._tiers.clear()
        scheduler = dataclasses.replace(offloading, parallel=dataclasses.replace(offloading.parallel, rank=0))
        self.manager = egmem_vllm.EgmemOffloadingSpec(scheduler).get_manager()
        self.groups, self.request = groups, base.ReqContext("request")

    def _join(self, name, options):
        if self.tier is None:
            self.options = options
            sizes = options["page_bytes"]
            self.tier = FakeTier(sizes if isinstance(sizes, list) else [sizes])
        elif "page_bytes" in options:
            assert options == self.options, "the first process made the tier otherwise"
        return self.tier

    def keys(self, *of_groups):
        return [self.base.make_offload_key(bytes([number]) * 32, group) for group, numbers in enumerate(of_groups) for number in numbers]

    def fill(self):
        """Gives every byte of a rank's block another value than those of other ranks, tensors and blocks nearby."""
        for rank, caches in enumerate(self.caches):
            for number, cache in enumerate(caches):
                for block in range(BLOCKS):
                    cache[block] = (rank * 50 + number * 25 + block) % 127 + 1

    def copy(self, job, pages, blocks, sizes, indices, store):
        spec = self.base.GPULoadStoreSpec(blocks, sizes, indices)
        for worker in self.workers:
            if store:
                assert worker.submit_store(job, spec, pages)
            else:
                assert worker.submit_load(job, pages, spec)
            worker.wait({job})
            (result,) = worker.get_finished()
            assert result.success and result.job_id == job

    def parts(self, group):
        """Returns what a block of each rank has for a group: (tensor, bytes)."""
        return [(cache, size) for caches in self.caches for cache, size in zip(caches, self.groups[group])]


@pytest.mark.parametrize("ranks, groups, chunk", [
    (1, ((64, 64),), 1),
    (1, ((64, 64),), 3),
    (1, ((64, 64), (64,)), 1),
    (2, ((64, 64),), 1),
    (2, ((64, 64), (64, 32)), 2),
    (4, ((64,), (64,), (48,)), 2),
])
def test_blocks_come_back_to_every_rank(monkeypatch, ranks, groups, chunk):
    machine = Machine(monkeypatch, ranks, groups, chunk)
    machine.fill()
    before = [[cache.clone() for cache in caches] for caches in machine.caches]
    keys = machine.keys(*[(10 * n + 1, 10 * n + 2) for n in range(len(groups))])
    output = machine.manager.prepare_store(keys, machine.request)
    assert output.keys_to_store == keys
    used = 2 * chunk * len(groups)
    blocks = list(range(1, used + 1))
    machine.copy(1, output.store_spec, blocks, [2 * chunk] * len(groups), [0] * len(groups), store=True)
    machine.manager.complete_store(keys, machine.request)
    assert len(machine.tier.sizes) == len({sum(sizes) for sizes in groups}) or len(machine.tier.sizes) == len(groups)
    for caches in machine.caches:
        for cache in caches:
            cache.zero_()
    # Load to other blocks, and begin in the middle of the first chunk.
    skip = chunk - 1
    spec = machine.manager.prepare_load(keys, machine.request)
    count = 2 * chunk - skip
    targets = [BLOCKS - 1 - n for n in range(count * len(groups))]
    machine.copy(2, spec, targets, [count] * len(groups), [skip] * len(groups), store=False)
    machine.manager.complete_load(keys, machine.request)
    for group in range(len(groups)):
        for rank, caches in enumerate(machine.caches):
            for cache, old, size in zip(caches, before[rank], groups[group]):
                for n in range(count):
                    here, there = targets[group * count + n], blocks[group * 2 * chunk + skip + n]
                    assert cache[here, :size].eq(old[there, :size]).all(), (group, rank, n)


def test_ranks_with_the_same_bytes_share_a_part(monkeypatch):
    from vllm.v1.kv_offload import config

    if "replicated_layout" not in {field.name for field in dataclasses.fields(config.OffloadingConfig)}:
        pytest.skip("vLLM 0.26 knows of no such ranks")
    machine = Machine(monkeypatch, ranks=2, replicated=True)
    assert machine.tier.sizes == [128]
    assert [places.at for worker in machine.workers for (places,) in worker._places] == [0, 0]


def test_a_tier_has_a_size_for_each_group(monkeypatch):
    assert Machine(monkeypatch, 2, ((64, 64), (32,)), 3).tier.sizes == [768, 192]
    assert Machine(monkeypatch, 2, ((64, 32), (32, 64)), 3).tier.sizes == [576], "one size does for both"


def test_a_store_that_failed_is_a_miss(monkeypatch):
    machine = Machine(monkeypatch)
    keys = machine.keys((1,))
    output = machine.manager.prepare_store(keys, machine.request)
    error = egmem.DriverError("the copy failed")
    machine.tier.store = lambda pages, blocks, places, *, stream: FakeJob(0, error)
    worker, spec = machine.workers[0], machine.base.GPULoadStoreSpec([3], [1], [0])
    worker.submit_store(1, spec, output.store_spec)
    (result,) = worker.get_finished()
    assert result.success, "vLLM ends with an assertion otherwise"
    machine.tier.failed.update(int(page) for page in output.store_spec.block_ids)
    machine.manager.complete_store(keys, machine.request)
    assert machine.manager.lookup(keys[0], machine.request) == machine.base.LookupResult.MISS
    machine.tier.load = lambda pages, blocks, places, *, stream: FakeJob(0, error)
    worker.submit_load(2, output.store_spec, spec)
    (result,) = worker.get_finished()
    assert not result.success, "an engine must not go on with the block's old bytes"


def test_events_tell_what_is_stored_and_removed(monkeypatch):
    machine = Machine(monkeypatch)
    keys = machine.keys((1, 2))
    machine.manager.prepare_store(keys, machine.request)
    assert not list(machine.manager.take_events())
    machine.manager.complete_store(keys, machine.request)
    (event,) = machine.manager.take_events()
    assert (event.keys, event.removed) == (keys, False)
    machine.manager._forget(keys[:1])
    (event,) = machine.manager.take_events()
    assert (event.keys, event.removed) == (keys[:1], True)


def test_keys_that_a_failed_store_evicted_are_told(monkeypatch):
    machine = Machine(monkeypatch)
    keys = machine.keys((1, 2, 3))
    machine.manager.prepare_store(keys[:2], machine.request)
    machine.manager.complete_store(keys[:2], machine.request)
    machine.manager.take_events()
    full = egmem.OutOfMemory("too few pages")
    full.evicted, full.evicted_groups = keys[:2], [0, 0]
    with monkeypatch.context() as patch:
        patch.setattr(machine.tier, "prepare_store", lambda keys, group=None: (_ for _ in ()).throw(full))
        assert machine.manager.prepare_store(keys[2:], machine.request) is None
    (event,) = machine.manager.take_events()
    assert (event.keys, event.removed) == (keys[:2], True)
    # One of them is stored again: vLLM is told of the other one.
    output = machine.manager.prepare_store([keys[2], keys[0]], machine.request)
    assert (output.keys_to_store, output.evicted_keys) == ([keys[2], keys[0]], [keys[1]])


def test_a_load_may_name_a_key_twice(monkeypatch):
    machine = Machine(monkeypatch)
    keys = machine.keys((1, 2))
    machine.manager.prepare_store(keys, machine.request)
    machine.manager.complete_store(keys, machine.request)
    for pins in (False, True):
        machine.manager._pins = pins
        for completed in ([keys[0], keys[1], keys[0]], keys):
            machine.manager.lookup(keys[0], machine.request)
            spec = machine.manager.prepare_load([keys[0], keys[1], keys[0]], machine.request)
            assert list(spec.block_ids) == [0, 1, 0]
            held = [load for batches in machine.manager._loading.values() for batch in batches for load in batch.held]
            machine.manager.complete_load(completed, machine.request)
            assert not machine.manager._loading and not any(load.pages for load in held)


def test_a_chunk_must_have_one_layout(monkeypatch):
    import egmem_vllm

    machine = Machine(monkeypatch)
    worker = machine.workers[0]
    with pytest.raises(ValueError, match="needs 128 bytes"):
        egmem_vllm._gpu_pages(
            machine.base.CanonicalKVCaches(
                [machine.base.CanonicalKVCacheTensor(cache, 64) for cache in machine.caches[0]],
                [[machine.base.CanonicalKVCacheRef(n, 64) for n in range(2)]],
            ),
            FakeTier([64]),
            worker.share,
        )
