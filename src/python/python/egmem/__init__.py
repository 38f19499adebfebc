"""Extended GPU Memory: CPU memory pinned on a chosen NUMA node, which the CPU and every GPU use without a copy.

>>> import egmem
>>> driver = egmem.simulated("gh200x4")
>>> with egmem.Buffer(1 << 20, node=0, driver=driver) as buffer:
...     buffer.write(b"hello")
...     bytes(memoryview(buffer)[:5])
b'hello'
"""

import atexit
from typing import Any

from ._egmem import (
    Block,
    Blocks,
    Buffer,
    Client,
    Driver,
    Event,
    Heap,
    Memory,
    Offer,
    Pool,
    PoolBlock,
    RemoteBuffer,
    RingSide,
    SharedBuffer,
    SharedHeap,
    Slice,
    Stream,
    Topology,
    View,
    __version__,
    _close_offers,
    _end_runs,
    connect,
    default_driver,
    deferred,
    free_deferred,
    memory_summary,
    open,
    ps,
    ps_dict,
    receive,
    ring,
    set_default_driver,
    simulated,
    topology,
)
from . import _arrays, _records, _views  # the native module calls them: not read from the disk in the middle of work
from ._captures import defer_frees
from ._doctor import Report, doctor
from ._errors import (
    Closed,
    ConnectionFailed,
    ContextLost,
    DriverError,
    Error,
    ExchangeError,
    ExportError,
    InUse,
    InvalidArgument,
    NoDeviceInterface,
    NoDriver,
    NoSuchPlace,
    NotAccessible,
    NotReady,
    NotSupported,
    OutOfMemory,
    Refused,
    TimedOut,
)
from ._ledger import Allocation, Located, allocations, locate
from ._records import Entry, Gpu, Node

__all__ = [
    "Allocation",
    "Block",
    "Blocks",
    "Buffer",
    "Client",
    "Closed",
    "ConnectionFailed",
    "ContextLost",
    "Driver",
    "DriverError",
    "Entry",
    "Error",
    "Event",
    "ExchangeError",
    "ExportError",
    "Gpu",
    "Heap",
    "InUse",
    "InvalidArgument",
    "Located",
    "Memory",
    "NoDeviceInterface",
    "NoDriver",
    "NoSuchPlace",
    "Node",
    "NotAccessible",
    "NotReady",
    "NotSupported",
    "Offer",
    "OutOfMemory",
    "Pool",
    "PoolBlock",
    "Refused",
    "RemoteBuffer",
    "Report",
    "RingSide",
    "SharedBuffer",
    "SharedHeap",
    "Slice",
    "Stream",
    "TimedOut",
    "Topology",
    "View",
    "__version__",
    "allocations",
    "connect",
    "default_driver",
    "defer_frees",
    "deferred",
    "doctor",
    "fetch",
    "free_deferred",
    "locate",
    "memory_summary",
    "open",
    "ps",
    "ps_dict",
    "receive",
    "ring",
    "set_default_driver",
    "simulated",
    "topology",
]

# They run in the opposite order.
atexit.register(_end_runs)
atexit.register(_close_offers)


def fetch(address: str, name: str, **options: Any) -> RemoteBuffer:
    """Connects to a server and fetches one name. ``mode``, ``expect_owner`` and ``probe`` are as for ``Client.fetch``; the other
    options are those of ``connect``."""
    fetching = {key: options.pop(key) for key in ("mode", "expect_owner", "probe") if key in options}
    with connect(address, **options) as client:
        return client.fetch(name, **fetching)
