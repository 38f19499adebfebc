"""Where memory lies, which processor reaches it, and whether allocations of two GPUs overlap.

EGMEM_SIM=gh200x4 python examples/python/questions.py runs it without a GPU. docs/questions.md has more.
"""

import egmem

topology = egmem.topology()
first, last = topology.gpus[0], topology.gpus[-1]
print(f"GPU {first.ordinal} is nearest to node {first.host_node}, GPU {last.ordinal} to node {last.host_node}")

one = egmem.Buffer("64MiB", near_gpu=first, label="one")
two = egmem.Buffer("64MiB", near_gpu=last, label="two")
ends_before = one.address + one.nbytes <= two.address or two.address + two.nbytes <= one.address
print(f"one at {one.address:#x}, two at {two.address:#x}; they overlap: {not ends_before}")
for buffer in (one, two):
    access = {gpu.ordinal: buffer.access(gpu=gpu.ordinal) for gpu in topology.gpus}
    print(f"{buffer.location}: CPU {buffer.access()}, GPUs {access}")

one.write(b"the same bytes for every processor")
one.copy_to(two)
print(two.read(0, 34).decode())
print("address + 4096 is in:", egmem.locate(one.address + 4096).allocation)
