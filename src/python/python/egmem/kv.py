"""A KV-cache tier in pinned host memory, for serving engines.

>>> import egmem, egmem.kv
>>> driver = egmem.simulated("gh200")
>>> tier = egmem.kv.Tier(pages=100, page_bytes=4096, node=0, driver=driver)
>>> cache = egmem.Buffer(8 * 4096, device=0, driver=driver)         # the engine's blocks, on its GPU
>>> gpu_pages = egmem.kv.GpuPages([cache.address], 4096, 4096, 8, keep=cache)
>>> with tier.prepare_store([b"first", b"second"]) as store:
...     tier.store(store.pages, [3, 5], gpu_pages).wait()
...     store.commit()
>>> tier.lookup([b"first", b"second", b"third"])
2
>>> with tier.prepare_load([b"first", b"second"]) as load:
...     tier.load(load.pages, [0, 1], gpu_pages).wait()
"""

from ._egmem import GpuPages, Job, Load, Page, Store, Tier

__all__ = ["GpuPages", "Job", "Load", "Page", "Store", "Tier"]
