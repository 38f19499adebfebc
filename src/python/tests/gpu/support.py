"""Functions for the tests on a GPU. With EGMEM_REQUIRE_CUDA=1 a missing GPU, and a missing library that is not in OPTIONAL, is a
failure."""

import importlib
import os
import subprocess
import sys
import unittest

REQUIRED = os.environ.get("EGMEM_REQUIRE_CUDA") == "1"
OPTIONAL = ("cuda.core", "jax", "numba.cuda")


class GpuTest(unittest.TestCase):
    """Tests on the GPU `self.gpu`, which is current for PyTorch and CuPy. `needs` has them run on the machine's last GPU too."""

    gpu = 0
    needed = ()

    def setUp(self):
        if "torch" in self.needed:
            import torch

            torch.cuda.set_device(self.gpu)
        if "cupy" in self.needed:
            import cupy

            cupy.cuda.Device(self.gpu).use()

    def child(self, code, **options):
        """As `child`, for code that has the GPU as `GPU`."""
        return child(f"GPU = {self.gpu}\n{code}", **options)


def needs(*modules):
    """Returns a decorator that skips a class where a library or the GPU is missing. It runs a `GpuTest` on the last GPU too."""
    missing = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing[name] = f"{name}: {error}"
    required = [reason for name, reason in missing.items() if name not in OPTIONAL]
    last = 0
    if not missing:
        import egmem

        try:
            last = egmem.open().gpu_count - 1
        except egmem.Error as error:
            missing["egmem"] = str(error)
            required.append(str(error))
    if REQUIRED and required:
        raise AssertionError(f"EGMEM_REQUIRE_CUDA=1, but {required}")
    skip = unittest.skipIf(bool(missing), "; ".join(missing.values()))

    def decorate(case):
        if issubclass(case, GpuTest):
            case.needed = modules
            if last > 0:
                name = f"{case.__name__}OnGpu{last}"
                body = {"gpu": last, "__module__": case.__module__, "__doc__": case.__doc__}
                setattr(sys.modules[case.__module__], name, skip(type(name, (case,), body)))
        return skip(case)

    return decorate


def child(code, *, environment=None, timeout=300):
    """Runs Python code in a process of its own; returns its output. The process must end with status 0."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(environment or {})},
    )
    if ended.returncode != 0:
        raise AssertionError(f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout
