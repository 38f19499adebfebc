"""A GPU of tensors of the CPU: its streams only keep order, and its copies are checked against it. Needs PyTorch."""

import contextlib

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class OnGpu(torch.Tensor):
    """A tensor that says it is a GPU's."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # tensors made from it are plain ones


def on_gpu(tensor):
    return tensor.as_subclass(OnGpu)


class Event:
    def __init__(self, seen):
        self.seen = seen


class Stream:
    """Knows how much work of each stream is done before the work that is submitted to it next."""

    def __init__(self, device=None):
        self.seen = {self: 0}

    def work(self):
        self.seen[self] += 1
        return self, self.seen[self]

    def record_event(self):
        return Event(dict(self.seen))

    def wait_event(self, event):
        for stream, done in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), done)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def is_after(self, work):
        stream, nth = work
        return self.seen.get(stream, 0) >= nth


class Block:
    def __init__(self, block, gpu):
        self.block, self.gpu = block, gpu
        self.address, self.nbytes = block.address, block.nbytes

    def on(self, device):
        return self.block.on(device)

    def free_after(self, stream):
        early = [work for work in self.gpu.copies_of(self.address, self.nbytes) if not stream.is_after(work)]
        assert not early, "freed before its copies"
        self.block.close()  # refused while a tensor has it
        self.gpu.freed.append(self.address)


class Gpu:
    """Stands for ``torch.cuda``, and for a heap."""

    Stream = Stream
    OutOfMemoryError = torch.cuda.OutOfMemoryError

    def __init__(self, heap):
        self.heap = heap
        self.current = Stream()
        self.capturing = False
        self.copies = []  # address written, address read, storage written, work
        self.used_on = []  # address, stream
        self.freed = []
        self.bytes_out = 0

    def current_stream(self, device=None):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def is_current_stream_capturing(self):
        return self.capturing

    def allocate(self, nbytes):
        self.bytes_out += nbytes
        return Block(self.heap.allocate(nbytes), self)

    def copy(self, to, source):
        to.copy_(source)
        self.copies.append((to.data_ptr(), source.data_ptr(), StorageWeakRef(to.untyped_storage()), self.current.work()))

    def use(self, tensor, stream):
        self.used_on.append((tensor.untyped_storage().data_ptr(), stream))

    def copies_of(self, address, nbytes):
        inside = range(address, address + nbytes)
        return [work for to, source, _, work in self.copies if to in inside or source in inside]

    def expect_ready(self, tensor):
        storage = StorageWeakRef(tensor.untyped_storage())
        work = [work for *_, written, work in self.copies if written == storage]
        assert work and all(map(self.current.is_after, work)), "the current stream does not wait for the copies"
