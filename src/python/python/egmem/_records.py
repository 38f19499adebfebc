"""What the native module tells of GPUs, nodes, names and tiers, as it was when it was asked for."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple, Union


@dataclass(frozen=True, repr=False, eq=False)
class Gpu:
    """A GPU of the machine."""

    ordinal: int
    """The CUDA ordinal."""
    name: str
    """The product name."""
    pci_bus_id: str
    """The PCI address, as the driver writes it."""
    uuid: Optional[str]
    """The UUID, as nvidia-smi writes it."""
    memory: int
    """The GPU's own memory in bytes."""
    compute_capability: Optional[Tuple[int, int]]
    """Major and minor compute capability."""
    link: str
    """The link to the CPU: ``"NVLink-C2C"``, ``"PCIe"`` or ``"unknown link"``."""
    coherent: bool
    """Whether GPU and CPU access each other's memory coherently."""
    peers: List[int]
    """The ordinals of the GPUs whose memory this one can map."""
    _host_node: Union[int, Exception]

    @property
    def host_node(self) -> int:
        """The nearest host NUMA node. Raises ``NoSuchPlace`` if it is unknown."""
        if isinstance(self._host_node, Exception):
            # Another one each time: an exception keeps the frames that it passes.
            raise copy.copy(self._host_node)
        return self._host_node

    def __repr__(self) -> str:
        return f"<egmem.Gpu {self.ordinal}: {self.name}, {self.link}>"


@dataclass(frozen=True, repr=False, eq=False)
class Node:
    """A host NUMA node."""

    id: int
    """The operating system's id."""
    cpus: List[int]
    """The node's CPUs."""
    memory_total: int
    """The node's memory in bytes; 0 if unknown."""
    memory_free: Optional[int]
    """The bytes that an allocation could get when the topology was read; ``None`` if unknown."""
    gpus: List[int]
    """The ordinals of the GPUs for which this node is the nearest."""
    distances: Dict[int, int]
    """The distance to each host node: 10 is local."""

    def __repr__(self) -> str:
        return f"<egmem.Node {self.id}: {self.memory_total} bytes, GPUs {self.gpus}>"


@dataclass(frozen=True, repr=False, eq=False)
class Entry:
    """A name that a server shows."""

    name: str
    """The name."""
    nbytes: int
    """The memory's size in bytes."""
    leases: int
    """The number of leases on it."""
    owner: str
    """The peer that created it, or the server."""

    def __repr__(self) -> str:
        return f"<egmem.Entry {self.name!r}: {self.nbytes} bytes, {self.leases} lease(s)>"


@dataclass(frozen=True, repr=False, eq=False)
class Member:
    """An open tier on one memory, in this process or another."""

    pid: int
    """The process."""
    is_self: bool
    """Whether it is the open tier that was asked."""

    def __repr__(self) -> str:
        return f"<egmem.kv.Member: process {self.pid}{', this one' if self.is_self else ''}>"
