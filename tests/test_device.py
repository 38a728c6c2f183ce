"""The process's own memory as a device."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm.device import NUMPY_TYPES, HostDevice, host_array


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (1 << 20,)])
def test_arrays_begin_at_a_cache_line_and_the_devices_are_zero(shape: tuple[int, ...], dtype: str) -> None:
    kept = []  # so that each lies somewhere else
    for number in range(20):
        kept += [HostDevice().zeros(shape, dtype), host_array(shape, NUMPY_TYPES[dtype]), np.empty(number, np.uint8)]
        zeros, array = kept[-3:-1]
        for one in (zeros, array):
            assert (one.shape, one.dtype, one.ctypes.data % 64) == (shape, NUMPY_TYPES[dtype], 0)
            assert one.flags.c_contiguous
            assert one.flags.writeable
        array.fill(7)
        assert not zeros.any()
