"""PyTorch beside `cargo bench --bench shapes -- --part growing --cuda --on-gpu`: growing by 2 MiB in GPU memory.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python3 benches/shapes/expandable.py [MiB] [ROUNDS]

- `segments`: one more tensor of 2 MiB at a time, which makes the expandable segment grow; the tensors are separate;
- `resize`: one tensor whose storage is made 2 MiB larger at a time, which copies it;
- `doubling`: the same with twice the storage whenever it is full.
"""

import statistics
import sys
import time

import torch

STEP = 2 << 20


def segments(size):
    tensors = []
    for _ in range(size // STEP):
        tensors.append(torch.empty(STEP, dtype=torch.uint8, device="cuda"))
    first, last = tensors[0].data_ptr(), tensors[-1].data_ptr()
    return 0, f"last tensor {(last - first) >> 20} MiB behind the first"


def grow(size, following):
    tensor = torch.empty(STEP, dtype=torch.uint8, device="cuda")
    copied, addresses = 0, {tensor.data_ptr()}
    for needed in range(STEP, size + 1, STEP):
        if needed > tensor.numel():
            copied += tensor.numel()
            tensor.resize_(following(tensor.numel()))
            addresses.add(tensor.data_ptr())
    return copied, f"{len(addresses)} addresses"


WAYS = {
    "segments": segments,
    "resize": lambda size: grow(size, lambda now: now + STEP),
    "doubling": lambda size: grow(size, lambda now: 2 * now),
}


def main():
    size = int(sys.argv[1] if len(sys.argv) > 1 else 64) << 20
    rounds = int(sys.argv[2] if len(sys.argv) > 2 else 5)
    torch.zeros(1, device="cuda")
    print(f"torch {torch.__version__}, growing to {size >> 20} MiB by 2 MiB on GPU 0")
    for name, way in WAYS.items():
        seconds = []
        for _ in range(rounds):
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            start = time.perf_counter()
            copied, seen = way(size)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        step = statistics.median(seconds) / (size // STEP)
        print(f"{name:9} {1e6 * step:10.1f} us a step {copied >> 20:8} MiB copied  {seen}")


main()
