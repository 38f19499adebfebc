"""egmem.torch.offload on a GPU."""

import contextlib
import gc
import unittest

from support import GpuTest, needs

import egmem

MIB = 1 << 20


def keeper(views):
    """Returns an autograd function that saves views of its argument, and keeps what it has of them in the backward pass."""
    import torch

    class Keep(torch.autograd.Function):
        seen = []

        @staticmethod
        def forward(ctx, source):
            ctx.save_for_backward(*views(source.detach()))
            return source.sum()

        @staticmethod
        def backward(ctx, gradient):
            Keep.seen = list(ctx.saved_tensors)
            return None

    return Keep


@needs("torch")
class Offload(GpuTest):
    def test_gradients_are_the_same(self):
        import torch

        import egmem.torch as et

        torch.manual_seed(1)
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)], torch.nn.GELU()).cuda()
        batch = torch.randn(2048, 512, device="cuda")

        def gradients(context):
            model.zero_grad()
            with context:
                loss = model(batch).pow(2).mean()
            loss.backward()
            return [parameter.grad.clone() for parameter in model.parameters()]

        plain = gradients(contextlib.nullcontext())
        heap = egmem.Heap(near_gpu=self.gpu, driver=egmem.open())
        for _ in range(3):
            offloaded = gradients(et.offload(heap=heap, min_bytes=1 << 16))
            for one, other in zip(plain, offloaded):
                self.assertTrue(torch.equal(one, other))
        torch.cuda.synchronize()
        gc.collect()
        heap.collect(wait=True)
        self.assertGreater(heap.stats()["allocated_blocks"], 0)
        self.assertEqual(heap.stats()["live_blocks"], 0)

    def test_the_gpu_needs_less_memory(self):
        import torch

        import egmem.torch as et

        layers = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(12)])
        layers = layers.cuda()
        batch = torch.randn(16384, 1024, device="cuda")

        def peak(offloaded):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            if offloaded:
                with et.offload():
                    loss = layers(batch).sum()
                    torch.cuda.synchronize()
            else:
                loss = layers(batch).sum()
            used = torch.cuda.memory_allocated()
            loss.backward()
            return used

        without = peak(False)
        with_offload = peak(True)
        print(f"\nallocated after the forward pass: {without >> 20} MiB, offloaded {with_offload >> 20} MiB")
        self.assertLess(with_offload, without / 2)

    def saved(self, source, views):
        """Returns what the backward pass has of views of `source`, the bytes copied out, and those that the GPU needs for it."""
        import torch

        import egmem.torch as et

        heap = egmem.Heap(near_gpu=self.gpu, chunk=2 * MIB, driver=egmem.open())
        keep = keeper(views)
        source = source.requires_grad_() * 1  # the leaf's own memory would stay
        with et.offload(heap=heap, min_bytes=1 << 10):
            total = keep.apply(source)
        copied = heap.stats()["used"]
        self.assertGreater(copied, 0)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        total.backward()
        return keep.seen, copied, torch.cuda.max_memory_allocated() - before

    def test_tensors_have_their_strides(self):
        import torch

        image = torch.randn(8, 16, 64, 64, device="cuda").to(memory_format=torch.channels_last)
        for view in (lambda x: x, lambda x: x[:, 3:9], lambda x: x.permute(3, 0, 2, 1), lambda x: x[..., ::2]):
            (seen,), _, _ = self.saved(image, lambda x, view=view: [view(x)])
            wanted = view(image.detach())
            self.assertEqual((seen.size(), seen.stride()), (wanted.size(), wanted.stride()))
            self.assertTrue(torch.equal(seen, wanted))

    def test_an_expanded_tensor_is_not_written_out_in_full(self):
        import torch

        row = torch.randn(1, MIB, device="cuda")
        (seen,), copied, needed = self.saved(row, lambda x: [x.expand(512, MIB)])
        self.assertEqual(seen.stride(), (0, 1))
        self.assertTrue(torch.equal(seen[511], row.detach()[0]))
        self.assertLess(copied, 5 * MIB)
        self.assertLess(needed, 5 * MIB)

    def test_views_of_one_storage_share_it(self):
        import torch

        base = torch.randn(2048, 3 * 1024, device="cuda")
        views = lambda x: [*x.chunk(3, dim=1), *x.chunk(3, dim=1), x.t()[:1024]]  # noqa: E731
        seen, copied, needed = self.saved(base, views)
        self.assertEqual(len({each.untyped_storage().data_ptr() for each in seen}), 1)
        for one, other in zip(seen, views(base.detach())):
            self.assertTrue(torch.equal(one, other) and one.stride() == other.stride())
        self.assertLess(copied, 25 * MIB)
        self.assertLess(needed, 49 * MIB)

    def test_two_streams_ask_for_one_tensor(self):
        import torch

        import egmem.torch as et

        heap = egmem.Heap(near_gpu=self.gpu, limit=64 * MIB, wait_for_gpu=True, driver=egmem.open())
        source = torch.full((12 * MIB,), 3.0, device="cuda", requires_grad=True)
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        with et.offload(heap=heap):
            result = (source * 1).pow(2)  # the product is saved
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            torch.cuda._sleep(1_000_000_000)
            slow = result.grad_fn._saved_self + 0
        with torch.cuda.stream(other):
            fast = result.grad_fn._saved_self + 0
        del result
        gc.collect()
        block = heap.allocate(48 * MIB)  # there is room for it only where the saved tensor was
        block.fill(99)
        torch.cuda.synchronize()
        for tensor in (slow, fast):
            self.assertTrue(bool((tensor == 3.0).all()))

    def test_tensors_are_fetched_ahead_without_a_change_of_results(self):
        import torch

        import egmem.torch as et

        torch.manual_seed(2)
        model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(8)]).cuda()
        batch = torch.randn(4096, 1024, device="cuda")

        def gradients(context):
            model.zero_grad()
            with context:
                loss = model(batch).pow(2).mean()
            loss.backward()
            return [parameter.grad.clone() for parameter in model.parameters()]

        plain = gradients(contextlib.nullcontext())
        for ahead in (0, 1, 2, 5):
            for _ in range(3):
                for one, other in zip(plain, gradients(et.offload(ahead=ahead))):
                    self.assertTrue(torch.equal(one, other))


if __name__ == "__main__":
    unittest.main(verbosity=2)
