"""Prefix keys of KV blocks: a chain of SHA-256 digests, so that equal keys mean equal tokens from the start.

key(block i) = sha256(key(block i - 1) || tokens of block i); the chain starts at sha256(salt). A collision
would serve one request the KV of another, so the function is a cryptographic one (as vLLM's default since
0.10.2), and a weak replacement is refused.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np

KeyFunction = Callable[[bytes, bytes], bytes]


def sha256_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block: 32 bytes."""
    return sha256(parent + tokens).digest()


class PrefixKeys:
    """Makes keys at one block size."""

    def __init__(self, block_size: int, function: KeyFunction = sha256_key) -> None:
        """Raises ``ValueError`` for a function that does not tell different blocks or parents apart."""
        self.block_size = block_size
        self._function = function
        probes = {function(parent, tokens) for parent in (b"a", b"b") for tokens in (b"a", b"b", b"ab")}
        if len(probes) < 6 or min(len(key) for key in probes) < 16:
            raise ValueError(
                f"key function {getattr(function, '__name__', function)!r} gave {len(probes)} different keys for "
                "6 different blocks, or keys below 16 bytes: cached content could be served wrongly; use sha256_key"
            )

    def root(self, salt: str | None) -> bytes:
        """The parent of a first block; requests with different salts share nothing."""
        return b"" if salt is None else sha256(salt.encode()).digest()

    def extend(self, keys: list[bytes], root: bytes, tokens: Sequence[int], num_blocks: int) -> None:
        """Append the keys of further full blocks until there are ``num_blocks``."""
        size = self.block_size
        for index in range(len(keys), num_blocks):
            block = np.asarray(tokens[index * size : (index + 1) * size], dtype=np.int64).tobytes()
            keys.append(self._function(keys[-1] if keys else root, block))
