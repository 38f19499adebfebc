"""Whose memory is it: this process's allocations with their lines, one array's, and all processes'.

EGMEM_SIM=gh200 python examples/python/who_uses_memory.py runs it without a GPU.
"""

import egmem
import egmem.numpy

weights = egmem.Buffer("256MiB", near_gpu=0, label="weights")
cache = egmem.numpy.zeros((1000, 1000))
print(egmem.memory_summary())
print("the array is in:", egmem.locate(cache))
print(egmem.ps())  # the command `egmem ps` shows the same
