"""XXH3 (64 bits) of up to 16 bytes in plain Python, written from its specification, as an oracle for tests."""

from __future__ import annotations

_ALL = 2**64 - 1
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c3c2852bb91c300cb"
)


def _word(data: bytes, start: int, size: int = 8) -> int:
    return int.from_bytes(data[start : start + size], "little")


def _secret(start: int) -> int:
    return _word(_SECRET, start) ^ _word(_SECRET, start + 8)


def _turned(value: int, bits: int) -> int:
    return (value << bits | value >> 64 - bits) & _ALL


def _swapped(value: int, size: int) -> int:
    return int.from_bytes(value.to_bytes(size, "little"), "big")


def _finished(value: int, shifts: tuple[int, int, int], primes: tuple[int, ...]) -> int:
    for shift, prime in zip(shifts, (*primes, 1), strict=False):
        value = (value ^ value >> shift) * prime & _ALL
    return value


def _finished_64(value: int) -> int:
    return _finished(value, (33, 29, 32), (0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))


def xxh3(data: bytes, seed: int = 0) -> int:
    """Returns the hash of at most 16 bytes."""
    size = len(data)
    if size == 0:
        return _finished_64(seed ^ _secret(56))
    if size <= 3:
        mixed = data[0] << 16 | data[size >> 1] << 24 | data[-1] | size << 8
        return _finished_64(mixed ^ ((_word(_SECRET, 0, 4) ^ _word(_SECRET, 4, 4)) + seed & _ALL))
    if size <= 8:
        seed ^= _swapped(seed & 2**32 - 1, 4) << 32
        value = _word(data, size - 4, 4) + (_word(data, 0, 4) << 32) ^ (_secret(8) - seed & _ALL)
        value ^= _turned(value, 49) ^ _turned(value, 24)
        value = value * 0x9FB21C651E98DF25 & _ALL
        value = (value ^ (value >> 35) + size) * 0x9FB21C651E98DF25 & _ALL
        return value ^ value >> 28
    assert size <= 16
    low = _word(data, 0) ^ (_secret(24) + seed & _ALL)
    high = _word(data, size - 8) ^ (_secret(40) - seed & _ALL)
    product = low * high
    value = size + _swapped(low, 8) + high + (product & _ALL ^ product >> 64) & _ALL
    return _finished(value, (37, 32, 0), (0x165667919E3779F9,))
