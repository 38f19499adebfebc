"""The configuration that vLLM gives to a spec, for the tests of the adapter with vLLM 0.26 to 0.33."""

import dataclasses


def given(make, **named):
    """Makes a dataclass of vLLM from the fields that its version has."""
    fields = {field.name for field in dataclasses.fields(make)}
    return make(**{name: value for name, value in named.items() if name in fields})


def offloading_config(layers, block_bytes, extra, *, rank=0, ranks=1, chunk=1, engine_id="engine", events=False, **more):
    """Returns the configuration of a rank. `layers` are the names of each group's layers, `block_bytes` those of a block of the largest group."""
    from vllm.v1.kv_offload import config

    groups = [
        given(config.OffloadingGroupConfig, tokens_per_block=16, layer_names=tuple(names), group_id=number)
        for number, names in enumerate(layers)
    ]
    parallel = dict(rank=rank, world_size=ranks, tp_size=ranks, pp_size=1, pcp_size=1, dcp_size=1)
    data_parallel = dict(data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None)
    return config.OffloadingConfig(
        groups=tuple(groups),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=events,
        extra_config=extra,
        engine_id=engine_id,
        model=given(config.OffloadingModelConfig, name="model", dtype="float16"),
        cache=config.OffloadingCacheConfig(16, chunk),
        parallel=given(config.OffloadingParallelConfig, **parallel, **data_parallel, is_parallelism_agnostic=False),
        **more,
    )
