"""What processes are called on the wire: `role.index.incarnation`, and the proof that a name is the sender's own.

The supervisor makes a key for the names of its run, which stands in no file. Each process that it starts is given its
own name, which ends with a MAC of what comes before. Those that receive are given the key as well; environment servers,
which run what others wrote, are not. So neither the CURVE key nor somebody's name is enough to speak as another.

    names = Names.made()                              # the supervisor
    environment = names.environment("learner", 0, 2)  # of a process that it starts
    Names.given()                                     # there
    names.of("learner", 0, 2)                         # the identity of its sockets
    names.sender(peer, "learner", 1) == (0, 2)        # for who receives

Without a supervisor, in tests and benchmarks, names are plain and believed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from hmac import compare_digest

from rl.wire.codec import ProtocolError

_NAME, _KEY = "FRESCO_NAME", "FRESCO_NAMES_KEY"
_UNTRUSTED = "env_server"
_REMEMBERED = 4096  # names; a stranger may say many


class Names:
    """`own`: the name of this process; `key`: of all names. Either may be empty."""

    def __init__(self, own: bytes = b"", key: bytes = b"") -> None:
        self._own = own
        self._key = key
        self._proven: dict[bytes, bytes] = {}  # by the plain name

    @classmethod
    def made(cls) -> Names:
        return cls(key=secrets.token_bytes(32))

    @classmethod
    def given(cls) -> Names:
        """Of this process. What it starts inherits them, but nothing that an environment server starts."""
        take = os.environ.pop if os.environ.get(_NAME, "").startswith(_UNTRUSTED) else os.environ.get
        return cls((take(_NAME, "") or "").encode(), bytes.fromhex(take(_KEY, "") or ""))

    @property
    def key(self) -> bytes:
        """Of all names; empty where this process does not have it."""
        return self._key

    def environment(self, role: str, index: int, incarnation: int) -> dict[str, str]:
        """What a process is given to know its name by."""
        if not self._key:
            return {}
        given = {_NAME: self.of(role, index, incarnation).decode()}
        return given if role == _UNTRUSTED else given | {_KEY: self._key.hex()}

    def of(self, role: str, index: int, incarnation: int = 0) -> bytes:
        """The name of this process, or (with the key) of any."""
        return self.proven(b"%s.%d.%d" % (role.encode(), index, incarnation))

    def sender(self, peer: bytes, role: str, count: int = 1) -> tuple[int, int]:
        """(index, incarnation) of who is called `peer`.

        Raises ProtocolError unless it is one of `count` of this role.
        """
        match self.plain(peer).split(b"."):
            case [name, index, incarnation] if name == role.encode() and index.isdigit() and incarnation.isdigit():
                if int(index) < count:
                    return int(index), int(incarnation)
        raise ProtocolError(f"stranger {peer!r} where {count} {role}s are known")

    def plain(self, peer: bytes) -> bytes:
        """The name without its proof. Raises ProtocolError if that is none."""
        if not self._key:
            return peer
        name, _, _ = peer.rpartition(b".")
        if not compare_digest(peer, self.proven(name)):
            raise ProtocolError(f"stranger {peer!r}, whose name is not proven")
        return name

    def proven(self, name: bytes) -> bytes:
        """The name with its proof, as far as this process can give one."""
        if not self._key:
            return self._own if self._own.startswith(name + b".") else name
        if name not in self._proven:
            if len(self._proven) > _REMEMBERED:
                self._proven.clear()
            mac = hashlib.blake2b(name, key=self._key, digest_size=16, person=b"name").hexdigest()
            self._proven[name] = b"%s.%s" % (name, mac.encode())
        return self._proven[name]
