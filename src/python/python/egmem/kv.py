"""A KV-cache tier in pinned host memory, for serving engines.

>>> import egmem, egmem.kv
>>> driver = egmem.simulated("gh200")
>>> tier = egmem.kv.Tier(pages=100, page_bytes=4096, node=0, driver=driver)
>>> cache = egmem.Buffer(8 * 4096, device=0, driver=driver)         # the engine's blocks, on its GPU
>>> gpu_pages = egmem.kv.GpuPages([cache.address], 4096, 4096, 8, keep=cache)
>>> stream = egmem.Stream(0, driver=driver)                         # the engine's; its tensors have a current one
>>> with tier.prepare_store([b"first", b"second"]) as store:
...     tier.store(store.pages, [3, 5], gpu_pages, stream=stream).wait()
...     store.commit()
>>> tier.lookup([b"first", b"second", b"third"])
2
>>> with tier.prepare_load([b"first", b"second"]) as load:
...     tier.load(load.pages, [0, 1], gpu_pages, stream=stream).wait()
"""

from typing import Any, Callable, Optional, Sequence, Union

from . import connect
from ._egmem import (
    Buffer,
    Driver,
    Events,
    GpuPages,
    Job,
    Load,
    Memory,
    Offer,
    Page,
    Store,
    Subscription,
    Tier,
    TierEvent,
    _size,
    default_driver,
)
from ._join import Meeting
from ._records import Gpu, Member, Node

__all__ = [
    "Events",
    "GpuPages",
    "Job",
    "Load",
    "Member",
    "Page",
    "Store",
    "Subscription",
    "Tier",
    "TierEvent",
    "attach",
    "join",
]


_Size = Union[int, str]
_PageBytes = Union[_Size, Sequence[_Size], None]


def attach(
    address: str,
    name: str,
    *,
    pages: Optional[int] = None,
    page_bytes: _PageBytes = None,
    bytes: Optional[_Size] = None,
    node: Union[Node, int, None] = None,
    create: bool = False,
    driver: Optional[Driver] = None,
    expect_owner: Optional[str] = None,
    **options: Any,
) -> Tier:
    """Attaches the tier in memory that ``egmem serve`` keeps under a name, so that its pages outlive this process. Several processes may have it.

    With ``create``, which needs the sizes of a ``Tier``, the server is asked to create the memory on ``node`` unless this user has created
    it before. The memory must be the user's own then: ``expect_owner``, otherwise as for ``Client.fetch``, is this peer.
    The other options are those of ``Tier.attach``.
    """
    nbytes = _bytes_of(pages, page_bytes, bytes) if create else None
    with connect(address, driver=driver) as client:
        if nbytes is not None:
            client.create(name, nbytes, node=node, exist_ok=True)
            # Another peer may have taken the name since.
            expect_owner = expect_owner or client.peer_name
        memory = client.fetch(name, mode="rw", expect_owner=expect_owner)
    return Tier.attach(memory, pages=pages, page_bytes=page_bytes, **options)


def join(
    name: str,
    *,
    pages: Optional[int] = None,
    page_bytes: _PageBytes = None,
    bytes: Optional[_Size] = None,
    node: Union[Node, int, None] = None,
    near_gpu: Union[Gpu, int, None] = None,
    backing: str = "auto",
    progress: Optional[Callable[[int, int], object]] = None,
    timeout: float = 600.0,
    driver: Optional[Driver] = None,
    **options: Any,
) -> Tier:
    """Returns the tier that all processes of this user on this machine have which call this with the same name and sizes.

    The first process creates all of the memory, as ``Buffer`` does with ``node``, ``near_gpu``, ``backing`` and ``progress``: such a tier does not
    grow in the background. It offers the memory until it closes its tier or ends, at a socket in ``$XDG_RUNTIME_DIR/egmem``, or without
    that variable in ``/tmp/egmem-UID``. The folder must be this user's own, with mode 0700. The others receive the memory there. They wait at most ``timeout`` seconds for
    a process that creates it. The sizes are those of ``Tier``; a process that gives none creates no memory, and waits for
    another one that does. The other options are those of ``Tier.attach``, such as ``tag`` and ``verify``.

    When the first process has closed its tier or has ended, those that have joined keep the tier, but the next one that
    calls this gets a new tier. Memory that is to outlive the process that created it belongs in ``egmem serve``: ``attach``.

    A name has 1 to 64 bytes, and no slash. Raises ``Refused`` for a folder that is not this user's own, ``TimedOut``, and ``InvalidArgument``
    for a tier of other sizes or with another tag.
    """
    driver = driver or default_driver()
    may_create = (pages, page_bytes, bytes) != (None, None, None)
    nbytes = _bytes_of(pages, page_bytes, bytes) if may_create else 0

    def attach(memory: Memory, offer: Optional[Offer] = None) -> Tier:
        return Tier.attach(memory, pages=pages, page_bytes=page_bytes, offer=offer, **options)

    def create(socket: str) -> Tier:
        label = f"egmem.kv {name}"
        memory = Buffer(
            nbytes, node, near_gpu=near_gpu, shareable=True, label=label, backing=backing, progress=progress, driver=driver
        )
        offer = memory.share(socket)
        try:
            return attach(memory, offer)
        except BaseException:
            offer.close()
            raise

    return Meeting(name, timeout).join(driver, attach, create if may_create else None)


def _bytes_of(pages: Optional[int], page_bytes: _PageBytes, nbytes: Optional[_Size]) -> int:
    """Returns the bytes of memory for a tier of these sizes."""
    if page_bytes is None or (pages is None) == (nbytes is None):
        raise TypeError("a tier that may be created needs page_bytes, and either pages or bytes")
    if nbytes is not None:
        return _size(nbytes)
    if isinstance(page_bytes, Sequence) and not isinstance(page_bytes, str):
        if len(page_bytes) != 1:
            raise TypeError("several sizes of pages share bytes=, not a number of pages")
        page_bytes = page_bytes[0]
    return Tier.bytes_needed(pages or 0, page_bytes)
