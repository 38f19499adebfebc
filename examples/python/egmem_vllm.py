"""vLLM's KV-cache offloading into an egmem tier, for vLLM 0.26 to 0.33.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "EgmemOffloadingSpec", "spec_module_path": "egmem_vllm",
                                      "cpu_bytes_to_use": 17179869184}}'

More keys of the extra config:

- "egmem_address", "egmem_name": the tier lies in memory of `egmem serve`, and a restarted engine finds its pages. By default a service
  lets a user create names under `uid:N/` alone: "uid:1000/vllm" with the number of the engine's user. Set PYTHONHASHSEED, so that
  vLLM's hashes of blocks are the same again.
- "egmem_take_over": true says that engines of other containers which had the tier of "egmem_address" have ended. Otherwise a killed one keeps
  it. Wrong while another container has the tier: its pages would be overwritten.
- "egmem_name" alone: engines of this user on this machine that name it and serve the same model share one tier.
- "egmem_node": the host NUMA node. By default the nearest one of the GPU of the worker that makes the tier, and with "egmem_address" the service's
  choice. "egmem_verify": "never", "sample" or "always", whether loads check the contents of pages.
- "egmem_tag": any text that tells models apart where this module cannot, see `model_tag`. Engines with LoRA adapters whose tier outlives or is
  shared need one, and a new one whenever an adapter changes: vLLM's keys have an adapter's name, in 0.33 with its path, and nothing of its weights.

The tier is shared by all ranks (tensor, pipeline and context parallelism, one machine): a page has a part for each rank. With several
KV-cache groups of different sizes the tier has pages of each size. "blocks_per_chunk" works too.

A store whose pages cannot be had, or whose copies fail, is a miss later. vLLM has no way to report a load that fails: it asserts success,
so the engine ends, and does not serve with wrong bytes. It ends, too, where the tier refuses to begin a copy. A reset of the prefix cache
empties the whole tier. Engines whose weights change while they serve need tiers of their own.
"""

import contextlib
import hashlib
import json
import logging
import pathlib
import sys
import time
from functools import partial
from typing import NamedTuple

import numpy
import torch
import vllm
from vllm import envs
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
    get_offload_group_idx,
)

import egmem
import egmem.kv

_log = logging.getLogger(__name__)

_MEDIUM = base.Medium.CPU if hasattr(base, "Medium") else "CPU"  # a str in 0.26
_TELLS_FLUSHED = hasattr(OffloadingManager, "on_reset_flushed")  # from 0.33 on
_SAMPLES, _SAMPLE_BYTES = 16, 64 << 10
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors"}
_FEW = 1 << 16  # keys
_CACHE_FIELDS = ("kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode")
_DEFAULTS = (None, [], "auto", "none", -1)

# The scheduler's side and the worker's side make a spec each; in one process they share the tier.
_tiers = {}


class PageSpec(BlockIDsLoadStoreSpec):
    """Pages of the tier, whose numbers have 64 bits: vLLM's own have 32."""

    def __init__(self, pages):
        self.block_ids = numpy.array(pages, dtype=numpy.uint64)


class Share(NamedTuple):
    """The part of each page that a worker copies."""

    rank: int = 0
    copies: int = 1  # parts of a page: one for each rank, or one for all if they have the same bytes
    blocks: int = 1  # blocks of a chunk, which is a page


class EgmemOffloadingSpec(OffloadingSpec):
    def __init__(self, config):
        super().__init__(config)
        if getattr(config, "canonical_layout", False):
            raise ValueError("EgmemOffloadingSpec needs the worker's own layout: leave canonical_layout out of the extra config")
        # Ranks with the same bytes share a part, which vLLM then has rank 0 store.
        self.replicated_layout = getattr(config, "replicated_layout", False)
        copies = 1 if self.replicated_layout else config.parallel.world_size
        rank = 0 if self.replicated_layout else config.parallel.rank
        self.share = Share(rank, copies, self.blocks_per_chunk)
        self._engine = _callers_config()
        parallel = getattr(self._engine, "parallel_config", None)
        if getattr(parallel, "nnodes_within_dp", 1) > 1:
            raise ValueError("EgmemOffloadingSpec needs all ranks of an engine on one machine, where the tier's memory is")
        backend = getattr(parallel, "distributed_executor_backend", None)
        self._one_process = config.parallel.world_size == 1 and backend in (None, "uni")
        # No group has larger blocks. A worker knows its groups' sizes, and a scheduler in another process takes the tier as it is.
        self._page_sizes = [config.worker_kv_bytes_per_block * self.share.blocks * copies]
        self._gpu = None
        self._manager = self._worker = None

    def tier(self):
        """Returns this process's tier. The first worker makes it, with pages of each group's size."""
        tier = _tiers.get(self.config.engine_id)
        if tier is None or tier.closed:
            tier = _tiers[self.config.engine_id] = self._make_tier()
        return tier

    def _make_tier(self):
        extra, page_sizes = self.extra_config, self._page_sizes
        options = {"verify": extra["egmem_verify"]} if "egmem_verify" in extra else {}
        if page_sizes:
            options |= {"node": extra.get("egmem_node"), **_geometry(int(extra["cpu_bytes_to_use"]), page_sizes)}
            if options["node"] is None and "egmem_address" not in extra:
                options["near_gpu"] = self._gpu
        name = extra.get("egmem_name")
        if "egmem_address" in extra:
            options |= {"tag": model_tag(self.config, self._engine), "take_over": extra.get("egmem_take_over", False)}
            return egmem.kv.attach(extra["egmem_address"], name or "vllm", create=bool(page_sizes), **options)
        if name is None and self._one_process:
            # The engine starts with the first pages; the others come while it serves.
            return egmem.kv.Tier(label="vllm", background=True, **options)
        # Engines with another model have another tier.
        whose = model_tag(self.config, self._engine).hex() if name else self.config.engine_id
        digest = hashlib.sha256(f"{name} {whose}".encode()).hexdigest()[:16]  # a socket's path is short
        return _join(f"{(name or 'vllm')[:24]}-{digest}", options)

    def get_manager(self):
        if self._manager is None:
            # Another engine of the tier may evict a page between its look-up and its load, and a check may find it damaged.
            extra = self.extra_config
            pins = "egmem_name" in extra or "egmem_address" in extra or extra.get("egmem_verify", "never") != "never"
            if not self._one_process:
                self._page_sizes = ()
            self._manager = EgmemOffloadingManager(self.tier(), self.config, pins=pins)
        return self._manager

    def get_worker(self, kv_caches):
        if self._worker is None:
            self._page_sizes, self._gpu = _page_sizes(kv_caches, self.share), _gpu_of(kv_caches)
            self._worker = EgmemOffloadingWorker(self.tier(), kv_caches, self.share)
        return self._worker


def _join(name, options):
    """Joins the tier of a name, which the first process makes; without sizes, one that is there."""
    return egmem.kv.join(name, **{"pages": None, "page_bytes": None, **options})


def _geometry(nbytes, page_sizes):
    if len(set(page_sizes)) == 1:
        return {"pages": nbytes // page_sizes[0], "page_bytes": page_sizes[0]}
    return {"bytes": nbytes, "page_bytes": list(page_sizes)}


def _page_sizes(kv_caches, share):
    """Returns the bytes of a page of each group: of the largest part that a rank has, for each part."""
    sizes = [sum(ref.page_size_bytes for ref in refs) * share.blocks for refs in kv_caches.group_data_refs]
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        from vllm.distributed import parallel_state

        try:
            group = parallel_state.get_inner_dp_world_group()
        except AssertionError:  # without data parallelism
            group = parallel_state.get_world_group()
        everywhere = [None] * group.world_size
        torch.distributed.all_gather_object(everywhere, sizes, group=group.cpu_group)
        sizes = [max(of_ranks) for of_ranks in zip(*everywhere, strict=True)]
    return [size * share.copies for size in sizes]


def _gpu_of(kv_caches):
    """Returns the GPU of a worker, or None for tensors of the CPU."""
    tensor = kv_caches.tensors[0].tensor
    return tensor.device.index if tensor.is_cuda else None


def _callers_config():
    """Returns vLLM's configuration, or None. A spec is shown only a part of it, without the model's revision; the connector that
    makes the spec has it all."""
    frame = sys._getframe(1)
    while frame is not None:
        for value in frame.f_locals.values():
            if type(value).__name__ == "VllmConfig":
                return value
        frame = frame.f_back
    return None


def model_tag(config, engine=None):
    """Returns what the bytes of pages depend on, as a hash: the model with its revision and its weights' files, types, layout, model
    runner, parallel sizes, the longest context that was asked for, the version of vLLM, and "egmem_tag".

    Of each file of the weights its name and size count, and 16 samples of 64 KiB, first and last bytes among them; in Hugging Face's cache
    the hash of the whole file. Weights that come from elsewhere (an object store, dummy weights, an update while the engine serves)
    need an "egmem_tag" of their own. So do LoRA adapters, which come and go while the engine serves.
    """
    extra_tag = config.extra_config.get("egmem_tag")
    if engine is None and extra_tag is None:
        raise ValueError("EgmemOffloadingSpec found no VllmConfig to tell models apart: set egmem_tag in the extra config")
    if getattr(engine, "lora_config", None) is not None and extra_tag is None:
        raise ValueError(
            "vLLM's keys have nothing of a LoRA adapter's weights: set egmem_tag in the extra config, and a new one whenever an adapter changes"
        )
    parallel = config.parallel
    meaning = {
        "vllm": vllm.__version__,
        "tag": extra_tag,
        "model": [config.model.name, config.model.dtype],
        "groups": config_groups(config),
        "blocks": config.cache.blocks_per_chunk,
        "layout": getattr(config, "kv_cache_layout", None) or envs.VLLM_KV_CACHE_LAYOUT or "HND",
        "parallel": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        # Of model runner 1 in 0.26, which stores the layers of a block side by side.
        "agnostic": parallel.is_parallelism_agnostic,
    }
    if engine is not None:
        model, cache = engine.model_config, engine.cache_config
        if getattr(cache, "calculate_kv_scales", False):
            raise ValueError("with calculate_kv_scales each process scales keys and values by its own first batch: a tier cannot outlive or be shared")
        meaning["engine"] = {
            "runner": bool(getattr(engine, "use_v2_model_runner", envs.VLLM_USE_V2_MODEL_RUNNER)),
            "dtype": [str(model.dtype), str(cache.cache_dtype), str(model.quantization)],
            "config": model.hf_config.to_dict() if hasattr(model.hf_config, "to_dict") else str(model.hf_config),
            "load": [str(engine.load_config.load_format), model.seed if engine.load_config.load_format == "dummy" else None],
            "revision": model.revision,
            "weights": weights_digest(model.model, model.revision, engine.load_config.download_dir),
        }
        fields = {name: getattr(cache, name, None) for name in _CACHE_FIELDS}
        fields["indexer_kv_dtype"] = getattr(getattr(engine, "attention_config", None), "indexer_kv_dtype", None)
        # Some models choose factors of positions or temperatures by it (LongRoPE, Llama 4), before vLLM fits it to the GPU's memory.
        fields["original_max_model_len"] = getattr(model, "original_max_model_len", None)
        meaning["engine"] |= {name: value for name, value in fields.items() if value not in _DEFAULTS}
    return hashlib.sha256(json.dumps(meaning, sort_keys=True, default=str).encode()).digest()


def config_groups(config):
    # Not the layers' names: with pipeline parallelism a process knows only its own.
    return [[_group_id(config, n), group.tokens_per_block] for n, group in enumerate(config.groups)]


def _group_id(config, position):
    """Returns the number that vLLM's keys have for a group: up to 0.29 its position."""
    return getattr(config.groups[position], "group_id", position)


def weights_digest(model, revision=None, cache_dir=None):
    """Returns a hash of the files of a model's weights, or None if they are not on this machine.

    Of a link its target's name counts too: in Hugging Face's cache that is the hash of the whole file.
    """
    folder = pathlib.Path(model)
    if not folder.exists():
        try:
            from huggingface_hub import snapshot_download

            folder = pathlib.Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
        except Exception as error:
            _log.warning("the tag has the name and revision of %s, not its weights: %s", model, error)
            return None
    files = [folder]
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.suffix in {*_WEIGHTS, ".json"} and path.is_file())
        if not any(path.suffix in _WEIGHTS for path in files):
            _log.warning("the tag has the name and revision of %s, not its weights: %s has none", model, folder)
            return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        target = path.resolve().name if path.is_symlink() else ""
        digest.update(f"{path.relative_to(folder)} {size}{target}\n".encode())
        last = max(0, size - _SAMPLE_BYTES)
        with path.open("rb") as file:
            for n in range(_SAMPLES):
                file.seek(last * n // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


class _Batch:
    """A store or a load of several keys, which vLLM completes key by key."""

    def __init__(self, held, count):
        self.held, self._left = held, count
        self.keys, self.has_failed = [], False

    def end_one(self):
        """Returns whether that was the last key."""
        self._left -= 1
        return self._left == 0


class _Loads(list):
    """What pins the pages of a sequence, in the order of its keys."""

    def release(self):
        # The first key becomes the most recently used one: the rest of a sequence is useless without it.
        for load in reversed(self):
            load.release()


class EgmemOffloadingManager(OffloadingManager):
    """Decides what is stored where; the tier has the order of use, and evicts."""

    def __init__(self, tier, config=None, pins=False):
        self.tier = tier
        self._many = _groups(tier) > 1
        self._positions = {_group_id(config, n): n for n in range(len(config.groups))} if self._many else {}
        self._pins = pins  # pages that a look-up has found, until the end of the step
        self._storing = {}  # vLLM's key: the store that has its page
        self._loading = {}  # vLLM's key: the loads that pin its page
        self._found = {}  # vLLM's key: what pins its page until the end of the step
        self._known = set()  # the keys that this engine has stored, as far as it knows
        self._evicted = []  # those of them that a store has evicted which failed
        self._most_known = _FEW
        self._events = [] if config is not None and config.enable_kv_cache_events else None
        self._flushing = []  # stores and loads of before a reset, whose jobs the worker may still have or get
        self._outdated = set()  # keys of before a reset that could not be removed yet
        self._steps = 0  # since a reset
        self._is_flushed = False  # the worker has no job of before it

    def _in_groups(self, keys):
        """Returns the arguments that name keys in a tier of one group or several."""
        if not self._many:
            return {"keys": keys}
        return {"keys": keys, "group": [self._positions[get_offload_group_idx(key)] for key in keys]}

    def _all_keys(self):
        return [entry[-2] for entry in (self.tier.keys(groups=True) if self._many else self.tier.keys())]

    def lookup(self, key, req_context):
        if key in self._found:
            return LookupResult.HIT
        if key not in self._outdated and self.tier.lookup(**self._in_groups([key])) and self._keep(key):
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self._storing else LookupResult.MISS

    def _keep(self, key):
        """Pins a page until the end of the step, if it may go before."""
        if self._pins:
            try:
                self._found[key] = self.tier.prepare_load(**self._in_groups([key]))
            except egmem.Error:  # gone, damaged, or the tier is stuck: vLLM computes the block
                return False
        return True

    def get_load_source(self, key, req_context):  # from 0.32 on
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return CacheHitSource.HOST

    def touch(self, keys, req_context):
        self.tier.touch(**self._in_groups(list(keys)))

    def prepare_load(self, keys, req_context):
        keys = list(keys)
        pages, loads = dict.fromkeys(keys), _Loads()
        others = [key for key in pages if key not in self._found]
        others_load = self.tier.prepare_load(**self._in_groups(others)) if others else None
        for key in pages:
            if key in self._found:  # pinned and checked by the look-up
                loads.append(self._found.pop(key))
                pages[key] = loads[-1].pages[0]
        if others_load is not None:
            loads.append(others_load)
            pages.update(zip(others, others_load.pages))
        batch = _Batch(loads, len(pages))
        for key in pages:
            self._loading.setdefault(key, []).append(batch)
        return PageSpec([pages[key] for key in keys])

    def complete_load(self, keys, req_context):
        for key in dict.fromkeys(keys):
            batches = self._loading[key]
            batch = batches.pop()
            if batch.end_one():
                batch.held.release()
            if not batches:
                del self._loading[key]

    def prepare_store(self, keys, req_context):
        keys = list(dict.fromkeys(keys))
        try:
            store = self.tier.prepare_store(**self._in_groups(keys))
        except egmem.Error as error:  # full, or the tier is stuck: the blocks are not stored
            if isinstance(error, egmem.OutOfMemory):
                self._evicted += self._forget(error.evicted)
            else:
                _log.warning("blocks are not stored: %s", error)
            return None
        stored = [keys[index] for index in store.indices]
        self._outdated.difference_update(stored)  # these pages are new
        evicted = [key for key in self._evicted if key not in stored] + self._forget(store.evicted)
        self._evicted.clear()
        batch = _Batch(store, len(stored))
        self._storing.update(dict.fromkeys(stored, batch))
        self._know(stored)
        return PrepareStoreOutput(stored, PageSpec(store.pages), evicted)

    def _know(self, keys):
        self._known.update(keys)
        if len(self._known) > self._most_known:
            # Other engines evict pages too.
            self._forget(self._known.difference(self._all_keys(), self._storing))
            self._most_known = max(_FEW, 2 * len(self._known))

    def _forget(self, evicted):
        """Returns the keys of evicted pages that this engine has stored: vLLM knows of no others."""
        known = [key for key in evicted if key in self._known]
        self._known.difference_update(known)
        self._tell(known, removed=True)
        return known

    def _tell(self, keys, removed):
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys=list(keys), medium=_MEDIUM, removed=removed))

    def take_events(self):
        events = self._events or []
        if events:
            self._events = []
        return events

    def complete_store(self, keys, req_context, success=True):
        for key in keys:
            batch = self._storing.pop(key, None)
            if batch is None:
                continue
            batch.keys.append(key)
            batch.has_failed |= not success
            if not batch.end_one():
                continue
            try:
                if not batch.has_failed:
                    batch.held.commit()
                    self._tell(batch.keys, removed=False)
            except egmem.Error as error:
                _log.warning("pages are not stored: %s", error)
            finally:
                batch.held.close()

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def reset_cache(self):
        # vLLM completes none of these, but the worker copies from and to their pages, also for jobs that it is given
        # in the next step.
        batches = [*self._storing.values(), *(batch for batches in self._loading.values() for batch in batches)]
        self._flushing += {id(batch): batch.held for batch in batches}.values()
        self._tell(self._known, removed=True)
        self._clear()
        self.tier.remove(**self._in_groups(self._all_keys()))
        self._outdated.update(self._all_keys())
        self._steps, self._is_flushed = 0, False

    def on_schedule_end(self, context):
        self._release_found()
        if not (self._flushing or self._outdated):
            return
        # Before 0.33 there is no on_reset_flushed. The first step after a reset makes the worker wait for the jobs of before; with
        # asynchronous scheduling the step after it may be scheduled meanwhile, the third one not.
        self._steps += 1
        if self._is_flushed or (not _TELLS_FLUSHED and self._steps > 3):
            self.on_reset_flushed()  # again: another engine may have released pages since

    def on_reset_flushed(self):
        self._is_flushed = True
        self._end_flushing()
        self.tier.remove(**self._in_groups(list(self._outdated)))
        self._outdated.intersection_update(self._all_keys())

    def _release_found(self):
        _Loads(self._found.values()).release()
        self._found.clear()

    def _clear(self):
        self._release_found()
        self._storing.clear()
        self._loading.clear()
        self._known.clear()
        self._evicted.clear()

    def _end_flushing(self):
        for held in self._flushing:
            held.close() if isinstance(held, egmem.kv.Store) else held.release()
        self._flushing.clear()

    def shutdown(self):
        self._clear()
        self._end_flushing()
        self.tier.close()


def _groups(tier):
    return getattr(tier, "groups", 1)


class EgmemOffloadingWorker(OffloadingWorker):
    """Copies this rank's part of each page, on a stream for each direction."""

    def __init__(self, tier, kv_caches, share=None):
        if share is None and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError("EgmemOffloadingWorker needs its rank's share: pass the spec's")
        self.tier, self.share = tier, share or Share()
        self._places = _gpu_pages(kv_caches, tier, self.share)
        on_gpu = kv_caches.tensors[0].tensor.is_cuda
        self._streams = (torch.cuda.Stream(), torch.cuda.Stream()) if on_gpu else (None, None)
        # The tests have tensors of the CPU, on the simulator.
        self._simulated = None if on_gpu else egmem.Stream(driver=tier.driver)
        self._jobs = {}  # job of vLLM: the tier's jobs, when it began, events around it on the stream, whether it stores

    def _start(self, job_id, copy, stream, pages, blocks):
        events = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())  # the model writes the blocks there
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record(stream)
        copies, began = [], time.perf_counter()
        stores = copy == self.tier.store
        # What was started is waited for also if a later one is refused.
        self._jobs[job_id] = (copies, began, events, stores)
        for place, numbers, ids in self._plan(pages, blocks):
            copies.append(copy(numbers, ids, place, stream=stream or self._simulated))
        if events:
            events[1].record(stream)
        return True

    def _plan(self, pages, blocks):
        """Yields where in pages, which pages, and which blocks: for each group and each place of a block in its chunk."""
        first_page = first_block = 0
        of_chunk = self.share.blocks
        for places, count, index in zip(self._places, blocks.group_sizes, blocks.block_indices, strict=True):
            if not count:
                continue
            # The first chunk may begin before the first block.
            numbers = numpy.arange(index % of_chunk, index % of_chunk + count)
            pages_of_blocks = pages.block_ids[first_page + numbers // of_chunk]
            ids = blocks.block_ids[first_block : first_block + count]
            for n, place in enumerate(places):
                here = numbers % of_chunk == n
                if here.any():
                    yield place, pages_of_blocks[here], ids[here]
            first_page += int(numbers[-1]) // of_chunk + 1
            first_block += count

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._start(job_id, self.tier.store, self._streams[0], dst_spec, src_spec)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        return self._start(job_id, self.tier.load, self._streams[1], src_spec, dst_spec)

    def get_finished(self):
        finished = []
        for job_id, (copies, began, events, stores) in list(self._jobs.items()):
            success = True
            try:
                if not all(copy.is_done() for copy in copies):
                    continue
            except egmem.Error as error:
                _log.error("a %s of KV-cache blocks failed: %s", "store" if stores else "load", error)
                # The manager cannot commit these pages, so they are misses. vLLM asserts success.
                success = stores
            del self._jobs[job_id]
            seconds = time.perf_counter() - began
            if success and events:
                events[1].synchronize()  # it comes right after the copies
                seconds = events[0].elapsed_time(events[1]) / 1e3
            finished.append(TransferResult(job_id, success, sum(copy.nbytes for copy in copies), seconds))
        return finished

    def wait(self, job_ids):
        for job_id in job_ids & self._jobs.keys():
            for copy in self._jobs[job_id][0]:
                with contextlib.suppress(egmem.Error):  # `get_finished` tells that it has failed
                    copy.wait()

    def shutdown(self):
        self._jobs.clear()  # the end of a job waits for its copies


def _gpu_pages(kv_caches, tier, share):
    """Describes vLLM's tensors, each a part of every block: for each group, for each place of a block in a chunk."""
    counts = {tensor.tensor.shape[0] for tensor in kv_caches.tensors}
    if len(counts) != 1:
        raise ValueError("EgmemOffloadingSpec needs layers with as many blocks as each other")
    (count,) = counts
    places = []
    for group, refs in enumerate(kv_caches.group_data_refs):
        page_bytes = tier.page_bytes_of(group) if _groups(tier) > 1 else tier.page_bytes
        tensors = [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
        sizes = [ref.page_size_bytes for ref in refs]
        part_bytes = page_bytes // share.copies
        if sum(sizes) * share.blocks > part_bytes:
            needed = sum(sizes) * share.blocks
            raise ValueError(f"group {group} needs {needed} bytes of a page, the tier's pages have {part_bytes} for a rank")
        bases = [tensor.data_ptr() for tensor in tensors]
        strides = [tensor.stride(0) * tensor.element_size() for tensor in tensors]
        make = partial(egmem.kv.GpuPages, bases, strides, sizes, count, keep=tensors)
        first = share.rank * part_bytes
        places.append([_at(make, first + n * sum(sizes), page_bytes - sum(sizes)) for n in range(share.blocks)])
    return places


def _at(make, offset, rest):
    return make(at=offset) if rest else make()
