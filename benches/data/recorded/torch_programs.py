"""Three PyTorch programs around a small transformer: training, generation with a growing KV cache, and training that
keeps activations in pinned host memory."""

import math
import random
import threading
import weakref

import torch

from torch_model import Model

# The entries of PyTorch's history, more than any of these programs makes: older ones go.
HISTORY = 8_000_000


def record(name, log, limits, device, seed):
    """Run the program `name` until `limits`, and fill `log`."""
    log.about["torch"] = torch.__version__
    torch.manual_seed(seed)
    on_gpu = device == "cuda"
    if on_gpu:
        log.about["cuda"] = torch.version.cuda
        log.about["gpu"] = torch.cuda.get_device_name()
        # cuDNN's attention prepares a plan for each new length, which takes longer than all the rest.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if name == "offload":
        offload(log, limits, device, seed)
        return
    program = {"training": training, "generation": generation}[name]
    if not on_gpu:
        # Nothing counts the CPU's allocations: a step stands for 1000 events.
        program(lambda steps: limits.more(1000 * steps), device, seed)
        return
    log.about["sizes"] = "as requested"
    # No stack traces: they cost time and memory, and a log has none.
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=HISTORY)
    try:
        # Each block is allocated and freed.
        done = lambda: 2 * torch.cuda.memory_stats().get("allocation.all.allocated", 0)
        program(lambda _: limits.more(done()), device, seed)
    finally:
        log.add_snapshot(torch.cuda.memory._snapshot(), torch.cuda.current_device())
        stats = torch.cuda.memory_stats()
        # The caching allocator's own use of memory beside the bytes requested.
        for kind in ("requested", "allocated", "reserved"):
            log.about[f"{kind} at most"] = stats.get(f"{kind}_bytes.all.peak")


def length(chance, middle, spread, least, most):
    """Return a random number of tokens, most of them around `middle`, a few far above."""
    return min(most, max(least, round(middle * math.exp(chance.gauss(0, spread)))))


def batch(chance, device, tokens, vocabulary):
    """Return sequences of one length as one tensor, with `tokens` tokens at most."""
    longest = length(chance, 400, 0.7, 32, 2048)
    rows = max(1, tokens // longest)
    made = torch.randint(vocabulary, (rows, longest + 1))
    return made.pin_memory().to(device, non_blocking=True) if device == "cuda" else made


def training(more, device, seed):
    """Train with AdamW in mixed precision; every second layer is computed again in the backward pass."""
    chance = random.Random(seed)
    on_gpu = device == "cuda"
    width, layers, vocabulary, tokens = (768, 6, 32_000, 8192) if on_gpu else (64, 2, 500, 2048)
    model = Model(vocabulary, width, width // 64, layers, 2048).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    half = torch.bfloat16
    steps = 0
    while more(steps):
        steps += 1
        made = batch(chance, device, tokens, vocabulary)
        with torch.autocast(device, dtype=half):
            loss = model.loss(made[:, :-1], made[:, 1:], again=2)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if steps % 12 == 0:
            with torch.no_grad(), torch.autocast(device, dtype=half):
                losses = [model.loss(made[:, :-1], made[:, 1:]) for made in valid(chance, device, tokens, vocabulary)]
            torch.stack(losses).mean().item()


def valid(chance, device, tokens, vocabulary):
    """Yield the batches of one validation, smaller than those of training."""
    for _ in range(4):
        yield batch(chance, device, tokens // 2, vocabulary)


def generation(more, device, seed):
    """Serve up to eight requests at a time. Each has a cache of its own, which grows by torch.cat with each token."""
    chance = random.Random(seed)
    on_gpu = device == "cuda"
    width, layers, vocabulary, longest = (1024, 4, 32_000, 4096) if on_gpu else (128, 2, 500, 4096)
    half = torch.bfloat16 if on_gpu else torch.float32
    model = Model(vocabulary, width, width // 64, layers, 2 * longest).to(device, half).eval()
    live = []
    steps = 0
    with torch.inference_mode():
        while more(steps):
            steps += 1
            # One prompt a step at most: requests come one after another.
            if len(live) < 8 and chance.random() < 0.5:
                prompt = torch.randint(vocabulary, (1, length(chance, 700, 0.9, 16, longest))).to(device)
                cache = model.cache()
                token = model.next(prompt, [cache])
                live.append([cache, token, length(chance, 30, 0.8, 2, 256)])
            if not live:
                continue
            tokens = model.next(torch.cat([request[1] for request in live]), [request[0] for request in live])
            for request, token in zip(live, tokens.split(1)):
                # A copy, for a view would keep the whole batch's tokens.
                request[1] = token.clone()
                request[2] -= 1
            live = [request for request in live if request[2] > 0]


class Offload:
    """Keeps tensors that the backward pass needs in pinned host memory, as torch.autograd.graph.save_on_cpu does, and
    logs each such block."""

    def __init__(self, log, parameters):
        self.log = log
        self.stay = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def pack(self, tensor):
        """Copy a tensor to the host, but for weights and those under 64 KiB."""
        size = tensor.numel() * tensor.element_size()
        if size < 64 << 10 or tensor.untyped_storage().data_ptr() in self.stay:
            return tensor, None
        pinned = tensor.device.type == "cuda"
        kept = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned)
        pointer = kept.data_ptr()
        self.log.add("allocate", pointer, size, threading.get_ident())
        # Runs before the tensor's memory goes back, in the thread that drops it.
        weakref.finalize(kept, self.dropped, pointer, size)
        kept.copy_(tensor, non_blocking=pinned)
        return kept, tensor.device

    def unpack(self, packed):
        """Copy it back."""
        kept, device = packed
        return kept if device is None else kept.to(device, non_blocking=True)

    def dropped(self, pointer, size):
        """Log the free."""
        self.log.add("free", pointer, size, threading.get_ident())


def offload(log, limits, device, seed):
    """Train with activations in pinned host memory. The log has those blocks, not the GPU's."""
    log.about["memory"] = "pinned host memory of activations"
    log.about["sizes"] = "as requested; freed when the program drops them"
    chance = random.Random(seed)
    on_gpu = device == "cuda"
    width, layers, vocabulary, tokens = (512, 8, 8000, 6144) if on_gpu else (64, 2, 500, 4096)
    half = torch.bfloat16
    model = Model(vocabulary, width, width // 64, layers, 2048).to(device, half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    keeper = Offload(log, list(model.parameters()))
    while limits.more(len(log.lines)):
        made = batch(chance, device, tokens, vocabulary)
        with torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack):
            loss = model.loss(made[:, :-1], made[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del loss
    if on_gpu:
        # Its pinned allocator gives nothing back. Its count of the blocks in use is no peak.
        log.about["pinned allocated at most"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
