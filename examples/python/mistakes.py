"""What an error says: its class, what failed, and what to do.

EGMEM_SIM=gh200 python examples/python/mistakes.py runs it without a GPU.
"""

import egmem

heap = egmem.Heap(near_gpu=0, limit="64MiB")
buffer = egmem.Buffer("2MiB", near_gpu=0)
view = memoryview(buffer)
for mistake in (
    lambda: egmem.Buffer("1MiB", node=99),
    lambda: egmem.Buffer(-1),
    lambda: heap.allocate("65MiB"),
    lambda: buffer.write(bytes(4 << 20)),
    lambda: buffer.close(),  # a view is alive
):
    try:
        mistake()
    except egmem.Error as error:  # OutOfMemory is a MemoryError too, InvalidArgument a ValueError
        print(f"{type(error).__name__}: {error}")  # with error.remedy, where the message does not say it
view.release()
buffer.close()
