"""A million small blocks of one heap: allocated by one call, written by the CPU, freed together.

EGMEM_SIM=gh200 python examples/python/million_blocks.py runs it without a GPU.
"""

import random
import time

import egmem

COUNT = 1_000_000
sizes = [random.randint(16, 256) for _ in range(COUNT)]
heap = egmem.Heap(near_gpu=0, limit="1GiB", label="blocks")
heap.reserve("512MiB")  # so that no allocation waits for the driver

begin = time.perf_counter()
blocks = heap.allocate_many(sizes, align=16)
took = time.perf_counter() - begin
blocks[0].write(b"first")
blocks[COUNT - 1].write(b"last")
assert blocks[0].read(0, 5) == b"first" and len(blocks) == COUNT
print(f"{COUNT} blocks, {sum(sizes) >> 20} MiB, in {took:.2f} s ({took / COUNT * 1e9:.0f} ns each)")
print("addresses for a kernel:", hex(blocks.addresses[0]), "to", hex(blocks.addresses[-1]))
del blocks  # frees all
assert heap.stats()["live_blocks"] == 0
