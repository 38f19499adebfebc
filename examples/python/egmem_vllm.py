"""vLLM's KV-cache offloading into an egmem tier.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "EgmemOffloadingSpec", "spec_module_path": "egmem_vllm",
                                      "cpu_bytes_to_use": 17179869184}}'

With "egmem_address" and "egmem_name" in the extra config the tier lies in memory of `egmem serve`, and a restarted engine finds
its pages: set PYTHONHASHSEED, so that vLLM's hashes of blocks are the same again. "egmem_node" is the host NUMA node.

For one worker (no tensor or pipeline parallelism), one KV-cache group and one block per chunk: others raise ValueError.
Tested with the classes of vLLM 0.33.0 on the simulator (test_adapters.py); not in an engine that serves.
"""

import contextlib
import hashlib
import logging
import time
from functools import partial

import numpy
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import egmem
import egmem.kv

_log = logging.getLogger(__name__)

# The scheduler's side and the worker's side make a spec each, in one process.
_tiers = {}


class PageSpec(BlockIDsLoadStoreSpec):
    """Pages of the tier, whose numbers have 64 bits: vLLM's own have 32."""

    def __init__(self, pages):
        self.block_ids = numpy.array(pages, dtype=numpy.uint64)


class EgmemOffloadingSpec(OffloadingSpec):
    def __init__(self, config):
        super().__init__(config)
        if config.parallel.world_size != 1 or len(config.groups) != 1 or self.blocks_per_chunk != 1:
            raise ValueError("EgmemOffloadingSpec needs one worker, one KV-cache group and one block per chunk")
        self._manager = self._worker = None

    def tier(self):
        """Returns the tier that both sides share."""
        tier = _tiers.get(self.config.engine_id)
        if tier is None or tier.closed:
            tier = _tiers[self.config.engine_id] = self._make_tier()
        return tier

    def _make_tier(self):
        extra, page_bytes = self.extra_config, self.config.worker_kv_bytes_per_block
        pages = int(extra["cpu_bytes_to_use"]) // page_bytes
        node = extra.get("egmem_node")
        if "egmem_address" not in extra:
            # The engine starts with the first pages; the others come while it serves.
            return egmem.kv.Tier(pages, page_bytes, node=node, label="vllm", background=True)
        meaning = (self.config.model, self.tokens_per_block, page_bytes, self.config.kv_cache_layout)
        tag = hashlib.sha256(repr(meaning).encode()).digest()
        name = extra.get("egmem_name", "vllm")
        return egmem.kv.attach(
            extra["egmem_address"], name, pages=pages, page_bytes=page_bytes, node=node, create=True, tag=tag
        )

    def get_manager(self):
        if self._manager is None:
            self._manager = EgmemOffloadingManager(self.tier())
        return self._manager

    def get_worker(self, kv_caches):
        if self._worker is None:
            self._worker = EgmemOffloadingWorker(self.tier(), kv_caches)
        return self._worker


class EgmemOffloadingManager(OffloadingManager):
    """Decides what is stored where; the tier has the order of use, and evicts."""

    def __init__(self, tier):
        self.tier = tier
        self._storing = {}  # vLLM's key: the store of its page
        self._loading = {}  # vLLM's key: the loads that pin its page
        self._known = set()  # the keys that this engine has stored
        self._flushing = []  # stores and loads of before a reset, whose jobs the worker may still have or get
        self._outdated = set()  # keys of before a reset that could not be removed yet

    def lookup(self, key, req_context):
        if key not in self._outdated and self.tier.lookup([key]):
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self._storing else LookupResult.MISS

    def get_load_source(self, key, req_context):
        return CacheHitSource.HOST

    def touch(self, keys, req_context):
        self.tier.touch(keys)

    def prepare_load(self, keys, req_context):
        pages = []
        for key in keys:
            load = self.tier.prepare_load([key])
            self._loading.setdefault(key, []).append(load)
            pages += load.pages
        return PageSpec(pages)

    def complete_load(self, keys, req_context):
        for key in keys:
            loads = self._loading[key]
            loads.pop().release()
            if not loads:
                del self._loading[key]

    def prepare_store(self, keys, req_context):
        keys = list(dict.fromkeys(keys))
        # Pages that are there already must stay until the new pages are found.
        ready = [key for key in keys if self.tier.lookup([key])]
        stores, evicted = {}, []
        with self.tier.prepare_load(ready):
            for key in keys:
                try:
                    store = self.tier.prepare_store([key])
                except egmem.OutOfMemory:
                    for store in stores.values():
                        store.close()
                    # Their contents are gone, although nothing is stored.
                    self._forget(evicted)
                    return None
                if store.keys:
                    stores[key] = store
                    evicted += store.evicted
        self._storing.update(stores)
        self._known.update(stores)
        pages = [page for store in stores.values() for page in store.pages]
        return PrepareStoreOutput(list(stores), PageSpec(pages), self._forget(evicted))

    def _forget(self, evicted):
        """Returns the keys of evicted pages that this engine has stored: vLLM knows of no others."""
        known = [key for key in evicted if key in self._known]
        self._known.difference_update(known)
        return known

    def complete_store(self, keys, req_context, success=True):
        for key in keys:
            store = self._storing.pop(key, None)
            if store is None:
                continue
            try:
                if success:
                    store.commit()
            except egmem.Error as error:
                _log.warning("a page is not stored: %s", error)
            finally:
                store.close()

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def reset_cache(self):
        # vLLM completes none of these, but the worker copies from and to their pages, also for jobs that it is given
        # in the next step.
        self._flushing += self._storing.values()
        self._flushing += [load for loads in self._loading.values() for load in loads]
        self._clear()
        self.tier.remove([name for name, _ in self.tier.keys()])
        self._outdated.update(name for name, _ in self.tier.keys())

    def on_reset_flushed(self):
        self._end_flushing()
        self.tier.remove(list(self._outdated))
        self._outdated &= {name for name, _ in self.tier.keys()}

    def _clear(self):
        self._storing.clear()
        self._loading.clear()
        self._known.clear()

    def _end_flushing(self):
        for held in self._flushing:
            held.close() if isinstance(held, egmem.kv.Store) else held.release()
        self._flushing.clear()

    def shutdown(self):
        self._clear()
        self._end_flushing()
        self.tier.close()


class EgmemOffloadingWorker(OffloadingWorker):
    """Copies blocks, on a stream for each direction."""

    def __init__(self, tier, kv_caches):
        self.tier = tier
        self.gpu_pages = _gpu_pages(kv_caches)
        self._on_gpu = kv_caches.tensors[0].tensor.is_cuda
        # The tests have tensors of the CPU, on the simulator.
        new = torch.cuda.Stream if self._on_gpu else partial(egmem.Stream, driver=tier.driver)
        self._streams = new(), new()
        self._jobs = {}

    def _start(self, job_id, copy, stream, pages, blocks):
        if self._on_gpu:
            stream.wait_stream(torch.cuda.current_stream())  # the model writes the blocks there
        job = copy(pages.block_ids, blocks.block_ids, self.gpu_pages, stream=stream)
        self._jobs[job_id] = (job, time.perf_counter())
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._start(job_id, self.tier.store, self._streams[0], dst_spec, src_spec)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        return self._start(job_id, self.tier.load, self._streams[1], src_spec, dst_spec)

    def get_finished(self):
        finished = []
        for job_id, (job, began) in list(self._jobs.items()):
            try:
                if not job.is_done():
                    continue
                success = True
            except egmem.Error:
                success = False
            del self._jobs[job_id]
            finished.append(TransferResult(job_id, success, job.nbytes, time.perf_counter() - began))
        return finished

    def wait(self, job_ids):
        for job_id in job_ids & self._jobs.keys():
            with contextlib.suppress(egmem.Error):  # `get_finished` tells that it has failed
                self._jobs[job_id][0].wait()

    def shutdown(self):
        self._jobs.clear()  # the end of a job waits for its copies


def _gpu_pages(kv_caches):
    """Describes vLLM's tensors: each is a part of every block."""
    (refs,) = kv_caches.group_data_refs
    tensors = [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
    strides = [tensor.stride(0) * tensor.element_size() for tensor in tensors]
    sizes = [ref.page_size_bytes for ref in refs]
    counts = {tensor.shape[0] for tensor in tensors}
    if len(counts) != 1:
        raise ValueError("EgmemOffloadingSpec needs layers with as many blocks as each other")
    bases = [tensor.data_ptr() for tensor in tensors]
    return egmem.kv.GpuPages(bases, strides, sizes, counts.pop(), keep=tensors)
