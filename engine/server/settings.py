"""How a server serves: names, limits, keys."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

MIB = 1 << 20
KEYS_VARIABLE = "PAGEDSERVE_API_KEYS"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


class ApiKeys:
    """The keys that open the server; kept as digests, so that none shows in a log or a traceback."""

    __slots__ = ("_digests",)

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple({sha256(key.encode()).digest(): None for key in keys})

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self)} keys)"

    def opens(self, given: bytes) -> bool:
        """Whether it is one of the keys, in a time that tells neither which nor how much of it is right."""
        digest, found = sha256(given).digest(), False
        for each in self._digests:
            found |= hmac.compare_digest(each, digest)
        return found

    @classmethod
    def read(cls, file: Path | None, variable: str) -> ApiKeys:
        """Keys of a file, one a line (``#`` begins a comment), and of a variable's text, split at commas.

        Raises OSError or ValueError for a file that cannot be read or has no key.
        """
        lines = [] if file is None else file.read_text(encoding="utf-8").splitlines()
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if file is not None and not keys:
            raise ValueError(f"{file}: no key in it; write one a line")
        return cls([*keys, *(key.strip() for key in variable.split(",") if key.strip())])


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits of the front end. Times in seconds; None: no limit.

    ``max_num_queued_reqs`` and ``max_num_queued_tokens`` bound the sequences, and their prompt tokens, that
    were accepted and have no token yet; beyond them requests get 503. ``request_timeout_s`` bounds a request
    from its arrival to its end, ``send_timeout_s`` how long a reader may take nothing of what is sent to it,
    ``receive_timeout_s`` how long a request may take to arrive. Pages of ``allowed_origins`` may use the server
    from a browser ("*": all may), which without any no other site's page can.
    """

    model_names: tuple[str, ...]
    api_keys: ApiKeys = field(default_factory=lambda: ApiKeys(()))
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int | None = 1 << 20
    request_timeout_s: float | None = None
    send_timeout_s: float = 60.0
    receive_timeout_s: float = 60.0
    shutdown_timeout_s: float = 30.0
    max_body_bytes: int = 4 * MIB
    max_samples: int = 128
    max_logprobs: int = 20
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError("model_names has no name, or an empty one; clients ask for a model by its name")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens", "max_body_bytes", "max_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("request_timeout_s", "send_timeout_s", "receive_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if not self.shutdown_timeout_s >= 0:
            raise ValueError(f"shutdown_timeout_s is {self.shutdown_timeout_s}; it must be 0 or more")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins has {origin!r}; give a scheme and a host, as http://localhost:3000, or *"
                )
