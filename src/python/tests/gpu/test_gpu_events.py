"""Events between processes on a GPU, egmem's and PyTorch's."""

import pickle
import subprocess
import sys
import textwrap
import unittest

from support import GpuTest, needs

import egmem

NBYTES = 64 << 20


def other(code):
    code = "import egmem, pickle, sys, torch\n" + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@needs("torch")
class Events(GpuTest):
    """The other process uses PyTorch's streams and events alone."""

    def ask(self, child, line):
        child.stdin.write(line + "\n")
        child.stdin.flush()
        return child.stdout.readline().strip()

    def test_a_stream_of_pytorch_waits_for_our_event(self):
        buffer = egmem.Buffer(NBYTES, near_gpu=self.gpu, shareable=True)
        source = egmem.Buffer(NBYTES, near_gpu=self.gpu)
        event, stream = egmem.Event(self.gpu, interprocess=True), egmem.Stream(self.gpu)
        code = f"""
            torch.cuda.set_device({self.gpu})
            buffer, handle = pickle.loads(bytes.fromhex(sys.stdin.readline()))
            event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", {self.gpu}), handle)
            tensor = torch.frombuffer(buffer, dtype=torch.uint8)
            stream = torch.cuda.Stream()
            print("opened", flush=True)
            for turn in range(5):
                sys.stdin.readline()
                stream.wait_event(event)
                with torch.cuda.stream(stream):
                    last = tensor[-1:].to("cuda", non_blocking=True)
                print(last.item(), flush=True)
        """
        with other(code) as child:
            self.assertEqual(self.ask(child, pickle.dumps((buffer, event.ipc_handle())).hex()), "opened")
            for turn in range(5):
                source.fill(turn)
                for _ in range(20):
                    source.copy_to(buffer, stream)
                event.record(stream)
                self.assertEqual(self.ask(child, "recorded"), str(turn))
            stream.synchronize()
            child.stdin.close()
            self.assertEqual(child.wait(60), 0)

    def test_our_stream_waits_for_an_event_of_pytorch(self):
        code = f"""
            torch.cuda.set_device({self.gpu})
            event = torch.cuda.Event(interprocess=True)
            buffer = pickle.loads(bytes.fromhex(sys.stdin.readline()))
            tensor = torch.frombuffer(buffer, dtype=torch.uint8)
            print(event.ipc_handle().hex(), flush=True)
            for turn in range(5):
                sys.stdin.readline()
                for _ in range(20):
                    tensor.copy_(torch.full((tensor.numel(),), turn, dtype=torch.uint8, device="cuda"), non_blocking=True)
                event.record()
                print("recorded", flush=True)
            sys.stdin.readline()
        """
        buffer = egmem.Buffer(NBYTES, near_gpu=self.gpu, shareable=True)
        seen, stream = egmem.Buffer(NBYTES, near_gpu=self.gpu), egmem.Stream(self.gpu)
        with other(code) as child:
            handle = bytes.fromhex(self.ask(child, pickle.dumps(buffer).hex()))
            event = egmem.Event.from_ipc_handle(self.gpu, handle)
            for turn in range(5):
                self.assertEqual(self.ask(child, "go"), "recorded")
                stream.wait(event)
                buffer.copy_to(seen, stream)
                stream.synchronize()
                self.assertEqual(seen.read(NBYTES - 1, 1), bytes([turn]))
            del event  # before the other process ends
            self.ask(child, "end")
            self.assertEqual(child.wait(60), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
