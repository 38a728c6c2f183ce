"""The generator against its published vectors, and the properties that sampling relies on."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm.philox import philox4x32, token_uniforms

# Known answers of philox4x32-10 from Random123's kat_vectors (Salmon et al.).
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
VECTORS = [
    ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (PI, (0xA4093822, 0x299F31D0), [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: list[int], key: tuple[int, int], expected: list[int]) -> None:
    words = philox4x32(np.array([counter, counter], np.uint32), key)
    assert words.tolist() == [expected, expected]


def test_a_uniform_depends_on_its_own_token_only() -> None:
    everything = token_uniforms(5, 17, np.arange(1000))
    some = np.array([999, 3, 4, 7, 500])
    np.testing.assert_array_equal(token_uniforms(5, 17, some), everything[some])


def test_seed_position_and_token_all_matter() -> None:
    ids = np.arange(64)
    base = token_uniforms(1, 1, ids)
    assert len(np.unique(base)) == 64
    for other in (token_uniforms(2, 1, ids), token_uniforms(1 + 2**32, 1, ids), token_uniforms(1, 2, ids)):
        assert not np.any(base == other)


def test_uniforms_are_uniform_and_never_0_or_1() -> None:
    values = token_uniforms(2**64 - 1, 2**31 - 1, np.arange(100_000))
    assert values.dtype == np.float32
    assert values.min() > 0
    assert values.max() < 1
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert np.all(np.abs(counts - 10_000) < 500)
