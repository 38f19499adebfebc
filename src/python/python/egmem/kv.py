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

from typing import Any, Callable, Optional, Union

from . import connect
from ._egmem import (
    Buffer,
    Driver,
    Events,
    Gpu,
    GpuPages,
    Job,
    Load,
    Memory,
    Node,
    Offer,
    Page,
    Store,
    Subscription,
    Tier,
    TierEvent,
    default_driver,
)
from ._join import Meeting

__all__ = [
    "Events",
    "GpuPages",
    "Job",
    "Load",
    "Page",
    "Store",
    "Subscription",
    "Tier",
    "TierEvent",
    "attach",
    "join",
]


def attach(
    address: str,
    name: str,
    *,
    pages: Optional[int] = None,
    page_bytes: Union[int, str, None] = None,
    node: Union[Node, int, None] = None,
    create: bool = False,
    driver: Optional[Driver] = None,
    expect_owner: Optional[str] = None,
    probe: str = "cpu",
    **options: Any,
) -> Tier:
    """Attaches the tier in memory that ``egmem serve`` keeps under a name, so that its pages outlive this process.

    With ``create``, which needs ``pages`` and ``page_bytes``, the server is asked to create the memory on ``node`` unless this
    user has created it before. The memory must be the user's own then: ``expect_owner``, otherwise as for ``Client.fetch``, is this
    peer. ``probe`` is that of ``Client.fetch``. The other options are those of ``Tier.attach``.
    """
    nbytes = None
    if create:
        if pages is None or page_bytes is None:
            raise TypeError("create=True needs pages and page_bytes")
        nbytes = Tier.bytes_needed(pages, page_bytes)
    with connect(address, driver=driver) as client:
        if nbytes is not None:
            client.create(name, nbytes, node=node, exist_ok=True)
            # Another peer may have taken the name since.
            expect_owner = expect_owner or client.peer_name
        memory = client.fetch(name, mode="rw", expect_owner=expect_owner, probe=probe)
    return Tier.attach(memory, pages=pages, page_bytes=page_bytes, **options)


def join(
    name: str,
    *,
    pages: int,
    page_bytes: Union[int, str],
    node: Union[Node, int, None] = None,
    near_gpu: Union[Gpu, int, None] = None,
    backing: str = "auto",
    progress: Optional[Callable[[int, int], object]] = None,
    timeout: float = 600.0,
    driver: Optional[Driver] = None,
    **options: Any,
) -> Tier:
    """Returns the tier that all processes of this user on this machine have which call this with the same name and sizes.

    The first process creates the memory, as ``Buffer`` does with ``node``, ``near_gpu``, ``backing`` and ``progress``, and offers it until it
    closes its tier or ends, at a socket in ``$XDG_RUNTIME_DIR/egmem``, or without that variable in ``/tmp/egmem-UID``. The folder must
    be this user's own, with mode 0700. The others receive the memory there. They wait at most ``timeout`` seconds for
    a process that creates it. The other options are those of ``Tier.attach``, such as ``tag``.

    When the first process has closed its tier or has ended, those that have joined keep the tier, but the next one that
    calls this gets a new tier. Memory that is to outlive the process that created it belongs in ``egmem serve``: ``attach``.

    A name has 1 to 64 bytes, and no slash. Raises ``InUse`` while another process has the tier, ``Refused`` for a folder that is not
    this user's own, ``TimedOut``, and ``InvalidArgument`` for a tier of other sizes or with another tag.
    """
    driver = driver or default_driver()

    def attach(memory: Memory, offer: Optional[Offer] = None) -> Tier:
        return Tier.attach(memory, pages=pages, page_bytes=page_bytes, offer=offer, **options)

    def create(socket: str) -> Tier:
        nbytes = Tier.bytes_needed(pages, page_bytes)
        memory = Buffer(
            nbytes,
            node,
            near_gpu=near_gpu,
            shareable=True,
            label=f"egmem.kv {name}",
            backing=backing,
            progress=progress,
            driver=driver,
        )
        offer = memory.share(socket)
        try:
            return attach(memory, offer)
        except BaseException:
            offer.close()
            raise

    return Meeting(name, timeout).join(driver, attach, create)
