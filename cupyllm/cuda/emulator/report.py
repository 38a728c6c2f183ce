"""What a launch tells about itself: counts that are exact, so that tests and figures can rely on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Global memory traffic of one argument in one direction.

    `bytes` is the sum over all threads. A warp access is one load or store instruction of one warp: `sectors` counts
    the 32-byte sectors these accesses touched and `bytes_used` the distinct bytes they wanted, so a broadcast of one
    float to 32 lanes is 128 bytes, 1 sector, 4 bytes used. An atomic counts as one read and one write.
    """

    bytes: int
    warp_accesses: int
    sectors: int
    bytes_used: int

    @property
    def efficiency(self) -> float:
        """The share of the moved sectors' bytes that was wanted; 1.0 without traffic."""
        return self.bytes_used / (32 * self.sectors) if self.sectors else 1.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes + other.bytes,
            self.warp_accesses + other.warp_accesses,
            self.sectors + other.sectors,
            self.bytes_used + other.bytes_used,
        )


@dataclass(frozen=True)
class ArgumentReport:
    """Traffic of one array argument; `size` is that of the array in bytes."""

    name: str
    read: Traffic
    written: Traffic
    size: int = 0

    def bytes_from_memory(self, cache_bytes: int) -> int:
        """Bytes that the launch moves when arrays of up to `cache_bytes` are read once and then come from a cache."""
        read = min(self.read.bytes, self.size) if self.size <= cache_bytes else self.read.bytes
        return read + self.written.bytes


@dataclass(frozen=True)
class LaunchReport:
    """Counts of one launch. Only `barriers` is counted in fast mode, where the other counts are None or empty.

    `barriers`: block-wide barriers completed, summed over blocks. `shared_accesses`: warp accesses to shared memory.
    `bank_conflicts`: wavefronts beyond one per 128-byte pass of such an access.
    """

    kernel: str
    barriers: int
    shared_accesses: int | None = None
    bank_conflicts: int | None = None
    arguments: tuple[ArgumentReport, ...] = ()

    def argument(self, name: str) -> ArgumentReport:
        """The report of the array argument with this parameter name; KeyError if there is none."""
        for argument in self.arguments:
            if argument.name == name:
                return argument
        raise KeyError(name)
