"""The structures that Python and the runtime share, as ctypes.

runtime/state.h and kernel_side/export.h explain the fields.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int32, c_int64, c_uint32, c_uint64, c_void_p


class Traffic(ctypes.Structure):
    _fields_ = (("bytes", c_uint64), ("warp_accesses", c_uint64), ("sectors", c_uint64), ("bytes_used", c_uint64))


class Argument(ctypes.Structure):
    _fields_ = (
        *(("begin", c_uint64), ("end", c_uint64), ("index", c_int32), ("read_only", c_int32)),
        *(("granule", c_uint32), ("reserved", c_uint32), ("cells", c_void_p)),
        *(("read", Traffic), ("written", Traffic)),
    )


class Fault(ctypes.Structure):
    _fields_ = (
        *(("kind", c_char * 40), ("argument", c_int32), ("block", c_uint32 * 3), ("thread", c_uint32 * 3)),
        *(
            ("block_number", c_uint64),
            ("code_offset", c_uint64),
            ("other_code_offset", c_uint64),
            ("caller_code_offset", c_uint64),
            ("text", c_char * 1400),
        ),
    )


class Worker(ctypes.Structure):
    _fields_ = (
        *(("stacks", c_void_p), ("stack_stride", c_uint64)),
        *(("dynamic_shared", c_void_p), ("dynamic_capacity", c_uint64)),
        *(("signal_stack", c_void_p), ("signal_stack_size", c_uint64)),
        *(("cells", c_void_p), ("cell_count", c_uint64), ("epoch", c_uint64)),
    )


class Launch(ctypes.Structure):
    _fields_ = (
        *(("kernel", c_void_p), ("values", c_void_p), ("grid", c_uint32 * 3), ("block", c_uint32 * 3)),
        *(("dynamic_size", c_uint64), ("next_block", c_void_p), ("block_count", c_int64), ("worker", c_void_p)),
        *(("arguments", c_void_p), ("argument_count", c_int64), ("released", c_void_p)),
        *(("barriers", c_uint64), ("shared_accesses", c_uint64), ("bank_conflicts", c_uint64), ("fault", Fault)),
    )


# From `released` up to the fault's text: what a launch must find zeroed.
RESULTS_SIZE = Launch.fault.offset + Fault.text.offset - Launch.released.offset


class Part(ctypes.Structure):
    _fields_ = (("run", c_void_p), ("launch", c_void_p))


class Parameter(ctypes.Structure):
    _fields_ = (
        ("kind", c_char),
        ("size", c_int32),
        ("element_size", c_int32),
        ("exact", c_int32),
        ("read_only", c_int32),
    )


SHARED_CELL_SIZE = 24
GLOBAL_CELL_SIZE = 32


def check_layout(library: ctypes.CDLL) -> None:
    """Our own mistake if a structure differs from the C++ one."""
    sizes = (c_uint64 * 8)()
    library.emu_sizes(sizes)
    own = [ctypes.sizeof(s) for s in (Traffic, Argument, Fault, Worker, Launch, Parameter)]
    assert list(sizes) == [*own, SHARED_CELL_SIZE, GLOBAL_CELL_SIZE], "layout.py and runtime/state.h disagree"
