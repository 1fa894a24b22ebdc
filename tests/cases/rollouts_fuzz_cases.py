"""Values and byte edits that make rollout files invalid."""

import random

VALUES = [None, True, False, 0, 1, -1, 3, 2**31, 10**25, 0.5, -2.5, 1e39, float("nan"), float("inf"), "", "a", "\ud800"]


def damage(content: bytes, rng: random.Random) -> bytes:
    """One random edit of the bytes."""
    at, length = rng.randrange(len(content)), rng.randrange(1, 40)
    edit = rng.randrange(6)
    if edit == 0:
        return content[:at]
    if edit == 1:
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    if edit == 2:
        return content[:at] + content[at + length :]
    if edit == 3:
        return content[:at] + rng.randbytes(length) + content[at:]
    if edit == 4:
        return content[:at] + rng.randbytes(length) + content[at + length :]
    return content[:at] + content[at : at + length] * 2 + content[at + length :]
