"""copy_pages against its twin, under the emulator's checks."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm.cuda import copy_pages
from cupyllm.cuda.emulator import guarded_copy
from cupyllm.errors import DeviceError
from cupyllm.ops.reference import ReferenceOps
from tests.cuda.kernel_case import DTYPES, CheckedLaunches, elements


def int32(*values: int) -> np.ndarray:
    return guarded_copy(np.array(values, np.int32))


@DTYPES
@pytest.mark.parametrize(("page_size", "kv_heads", "head_size"), [(16, 2, 64), (32, 1, 128), (1, 1, 8)])
def test_pages_are_copied_and_nothing_else(dtype: str, page_size: int, kv_heads: int, head_size: int) -> None:
    rng, shape = np.random.default_rng(0), (6, page_size, kv_heads, head_size)
    keys, values = elements(rng.standard_normal(shape), dtype), elements(rng.standard_normal(shape), dtype)
    expected_keys, expected_values = keys.copy(), values.copy()
    sources, copies = int32(5, 0, 5), int32(1, 4, 2)
    ReferenceOps().copy_pages(expected_keys, expected_values, sources, copies)
    checked = CheckedLaunches()
    copy_pages.launch(checked.loader, keys, values, sources, copies)
    np.testing.assert_array_equal(keys, expected_keys)
    np.testing.assert_array_equal(values, expected_values)
    least = copy_pages.least_bytes(3, page_size, kv_heads, head_size)
    (report,) = checked.reports
    assert report.argument("keys").read.bytes + report.argument("keys").written.bytes == least["keys"]


def test_a_float32_cache_is_refused() -> None:
    cache = np.zeros((2, 16, 1, 64), np.float32)
    with pytest.raises(DeviceError, match="copy_pages: keys is float32"):
        copy_pages.launch(CheckedLaunches().loader, cache, cache, int32(0), int32(1))
