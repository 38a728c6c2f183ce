"""Captured graphs for the emulator: launches are written down instead of run, and run again at every replay.

A replay sees of the arrays what a GPU would see, so that a wrong capture shows on any CPU:

- an array whose memory was let go since the capture is an error (a GPU would write into somebody else's memory);
- the arena, what was allocated during captures, is filled with ones before every replay, which reads as NaN or -1:
  nothing in it may be expected to last (on a GPU another graph has used the same memory meanwhile);
- scalars and shapes are those of the capture, so a length that was baked in gives wrong answers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyllm.device import Array
from cupyllm.errors import DeviceError

Run = Callable[..., Any]


@dataclass(frozen=True)
class _ArrayArgument:
    """Where an array lies: in whose memory, which does not keep that memory alive."""

    owner: weakref.ref[np.ndarray]
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def array(self) -> np.ndarray | None:
        owner = self.owner()
        if owner is None:
            return None
        array: np.ndarray = np.ndarray(
            self.shape, self.dtype, buffer=owner.reshape(-1).view(np.uint8), offset=self.offset
        )
        return array


@dataclass(frozen=True)
class RecordedCall:
    """One launch of a capture."""

    name: str
    run: Run
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_mem: int
    args: tuple[Any, ...]

    def replay(self) -> None:
        """Launch with the arrays' present contents. Raises DeviceError when the memory of one is gone."""
        args = list(self.args)
        for place, arg in enumerate(args):
            if isinstance(arg, _ArrayArgument):
                args[place] = arg.array()
                if args[place] is None:
                    raise DeviceError(f"graph: argument {place} of {self.name} was let go after the capture")
        self.run(self.grid, self.block, args, shared_mem=self.shared_mem)


class GraphRecorder:
    """Between the loader and the emulated kernels: passes launches on, or writes them down during a capture."""

    def __init__(self) -> None:
        self._calls: list[RecordedCall] | None = None  # of the capture under way
        self._arena: list[np.ndarray] = []  # of all captures: lives as long as the recorder

    @property
    def is_capturing(self) -> bool:
        return self._calls is not None

    @property
    def num_bytes(self) -> int:
        """Size of the arena."""
        return sum(array.nbytes for array in self._arena)

    def keep(self, array: Array) -> Array:
        """Take an array that was allocated during a capture into the arena."""
        self._arena.append(_owner(array))
        return array

    def launch(
        self, name: str, run: Run, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int
    ) -> Any:
        """Launch, or write the launch down."""
        if self._calls is None:
            return run(grid, block, args, shared_mem=shared_mem)
        kept = tuple(_reference(arg) if isinstance(arg, np.ndarray) else arg for arg in args)
        self._calls.append(RecordedCall(name, run, grid, block, shared_mem, kept))
        return None

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """What replays the launches that `run` makes; none of them runs now."""
        assert self._calls is None, "a capture within a capture"
        calls: list[RecordedCall] = []
        self._calls = calls
        try:
            run()
        finally:
            self._calls = None

        def replay() -> None:
            for array in self._arena:
                array.reshape(-1).view(np.uint8)[:] = 0xFF
            for call in calls:
                call.replay()

        return replay


def _owner(array: np.ndarray) -> np.ndarray:
    """The array whose memory it is."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _reference(array: np.ndarray) -> _ArrayArgument:
    owner = _owner(array)
    offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return _ArrayArgument(weakref.ref(owner), offset, array.shape, array.dtype)
