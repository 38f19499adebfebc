"""Where the processes of a user meet that have one tier by a name."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from typing import Callable, Iterator, Optional

from ._egmem import Driver, SharedBuffer, Tier, _receive_offered
from ._errors import ConnectionFailed, InvalidArgument, Refused, TimedOut

# Of a Unix socket's path, without the zero byte at its end (unix(7)).
_LONGEST_PATH = 107
_LONGEST_NAME = 64
# How long a process waits before it asks for a lock again.
_PAUSE = 0.02


class Meeting:
    """A name's lock file and socket, in a folder of this user's own."""

    def __init__(self, name: str, timeout: float) -> None:
        encoded = os.fsencode(name)
        if not encoded or len(encoded) > _LONGEST_NAME or b"/" in encoded or b"\0" in encoded:
            raise InvalidArgument(f"name is {name!r}; valid: 1 to {_LONGEST_NAME} bytes without a slash and a zero byte")
        self._name = name
        self._timeout = timeout
        self._until = time.monotonic() + timeout
        path = os.path.join(_folder(), name)
        self._lock, self._socket = path + ".join", path + ".tier"
        if len(os.fsencode(self._socket)) > _LONGEST_PATH:
            raise InvalidArgument(
                f"the socket's path {self._socket} has more than {_LONGEST_PATH} bytes",
                "choose a shorter name, or a shorter XDG_RUNTIME_DIR",
            )

    def join(
        self, driver: Driver, attach: Callable[[SharedBuffer], Tier], create: Optional[Callable[[str], Tier]]
    ) -> Tier:
        """Attaches the memory that a process offers at the socket. If none does, ``create`` makes memory and offers it there; without
        ``create`` this waits for such a process."""
        while True:
            with self._locked(fcntl.LOCK_SH):
                with contextlib.suppress(ConnectionFailed):  # its process ends
                    memory = self._receive(driver)
                    if memory is not None:
                        return attach(memory)
            if create is not None:
                with self._locked(fcntl.LOCK_EX):
                    try:
                        memory = self._receive(driver)  # another process may have created it meanwhile
                    except ConnectionFailed:
                        pass  # its process ends
                    else:
                        return create(self._socket) if memory is None else attach(memory)
            self._pause("pass its sizes, or start the process that makes it")

    def _receive(self, driver: Driver) -> Optional[SharedBuffer]:
        # A process that has just created the memory has used the time.
        left = max(self._until - time.monotonic(), 1.0)
        return _receive_offered(self._socket, driver, left)

    def _pause(self, remedy: str) -> None:
        if time.monotonic() >= self._until:
            raise TimedOut(f"another process has not made the tier {self._name!r} within {self._timeout} s", remedy) from None
        time.sleep(_PAUSE)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """Holds the lock: shared to receive the memory, exclusive to create it."""
        file = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(file, how | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._pause("pass a longer timeout=, or end the process that makes it")
            try:
                yield
            finally:
                # A child that was forked meanwhile has the file open too.
                fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            os.close(file)


def _folder() -> str:
    """Returns the folder of this user's sockets, which ``egmem ps`` uses too, and creates it."""
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = os.path.join(runtime, "egmem") if os.path.isabs(runtime) else f"/tmp/egmem-{user}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        why = "it is no folder"
    elif found.st_uid != user:
        why = f"it belongs to user {found.st_uid}"
    elif found.st_mode & 0o077:
        why = f"other users have access to it (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return folder
    raise Refused(
        f"the folder {folder} is not this user's own: {why}",
        "remove it, give it the mode 0700, or set XDG_RUNTIME_DIR to a folder of this user",
    )
