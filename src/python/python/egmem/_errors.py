"""The exceptions of egmem. Each says what failed, and ``remedy`` says what to do."""

from __future__ import annotations

from typing import Optional, Sequence


class Error(Exception):
    """The base of egmem's exceptions.

    ``message`` is what failed, and ``code`` the driver's result if a driver call failed. ``remedy`` is what to do about it, or empty
    where the message says what is valid.
    """

    message: str
    remedy: str
    code: Optional[int]

    def __init__(self, message: str, remedy: str = "", code: Optional[int] = None) -> None:
        super().__init__(message, remedy, code)
        self.message = message
        self.remedy = remedy
        self.code = code
        if isinstance(self, OSError):
            for field in ("errno", "strerror", "filename"):  # it takes the arguments for them
                setattr(self, field, None)

    def __str__(self) -> str:
        return f"{self.message}; what to do: {self.remedy}" if self.remedy else self.message


class NoDriver(Error):
    """There is no usable CUDA driver, or no GPU."""


class DriverError(Error):
    """A driver call failed; ``code`` is its result."""


class OutOfMemory(Error, MemoryError):
    """The node, the heap or the address space has no room.

    ``evicted`` are the keys that ``egmem.kv.Tier.prepare_store`` has evicted all the same, each with its group in ``evicted_groups``. There
    are some only of a tier of several groups.
    """

    evicted: Sequence[bytes] = ()
    evicted_groups: Sequence[int] = ()


class NotSupported(Error):
    """The machine, its driver or this memory does not support the request."""


class ExportError(NotSupported, BufferError):
    """The memory cannot be exported as it was asked for."""


class NoDeviceInterface(ExportError, AttributeError):
    """The memory has no address for a GPU: it is simulated, or a view of the CPU."""


class InvalidArgument(Error, ValueError):
    """An argument is invalid."""


class NoSuchPlace(InvalidArgument):
    """There is no such node or GPU, or a GPU's node is unknown."""


class Closed(InvalidArgument):
    """The object was closed."""


class NotAccessible(Error):
    """The CPU or a GPU has no access to the memory."""


class InUse(Error, BufferError):
    """The memory has views or holders that live."""


class NotReady(Error, KeyError):
    """A key has no ready page in a tier."""


class ContextLost(Error):
    """A GPU's context is lost to an earlier fault; only a new process gets a new one."""


class ExchangeError(Error):
    """A server of memory by name failed or refused."""


class Refused(ExchangeError):
    """The server, or this process, refused: rights, trust or state."""


class ConnectionFailed(ExchangeError, ConnectionError):
    """A connection could not be made, or was lost."""


class TimedOut(ExchangeError, TimeoutError):
    """An answer did not come in time."""


# Their names are those of the package, in tracebacks too.
for _class in list(globals().values()):
    if isinstance(_class, type) and issubclass(_class, Error):
        _class.__module__ = "egmem"
del _class
