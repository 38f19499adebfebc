"""A cache of feature rows in pinned CPU memory, which the CPU fills and every GPU reads at the same address.

EGMEM_SIM=gh200 python examples/python/feature_cache.py runs it without a GPU.
"""

import collections

import numpy

import egmem
import egmem.numpy


class FeatureCache:
    """Keeps the most recently used rows, at most `capacity` of them."""

    def __init__(self, capacity, width, compute):
        self.memory = egmem.Buffer(capacity * width * 4, near_gpu=0, label="features")
        self.rows = egmem.numpy.asarray(self.memory, "float32", (capacity, width))
        self.row_of = collections.OrderedDict()  # key → row, the least recently used first
        self.compute, self.misses = compute, 0

    def get(self, key):
        row = self.row_of.pop(key, None)
        if row is None:
            self.misses += 1
            is_full = len(self.row_of) == len(self.rows)
            row = next(iter(self.row_of.values())) if is_full else len(self.row_of)
            self.rows[row] = self.compute(key)  # if this raises, every other key keeps its row
            if is_full:
                self.row_of.popitem(last=False)
        self.row_of[key] = row
        return self.rows[row]


cache = FeatureCache(capacity=1000, width=128, compute=lambda user: numpy.full(128, user, "float32"))
users = numpy.random.default_rng(7).zipf(1.5, 20_000) % 5000
assert all(cache.get(user)[0] == user for user in users)
found = egmem.locate(cache.rows)
print(f"{len(users)} lookups, {cache.misses} misses; the rows are on {found.location}")
if not egmem.default_driver().is_simulated:  # PyTorch's kernels read the same bytes
    import torch

    rows = torch.from_dlpack(cache.memory.view("float32", cache.rows.shape, device="cuda:0"))
    print("mean of all rows, by GPU 0:", rows.mean().item())
