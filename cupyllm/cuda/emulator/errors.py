"""What can go wrong in the emulator, each as a `DeviceError` with a one-line message."""

from __future__ import annotations

from cupyllm.errors import DeviceError


class KernelBuildError(DeviceError):
    """A kernel source does not compile for the CPU. `log` is all that the compiler printed."""

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class LaunchError(DeviceError):
    """A launch was refused before anything ran: wrong arguments, geometry or shared memory size."""


class KernelFault(DeviceError):  # noqa: N818 - the word for it everywhere
    """A kernel did something wrong while it ran. The process stays usable; array contents are undefined.

    `kind` is one of the kinds listed in this folder's README.md. `frames` are source positions "file:line", the
    innermost first (a helper, then the place in the kernel that called it); it is empty if no position is known.
    For a race, `other_frames` is where the other access was.
    """

    def __init__(
        self,
        kind: str,
        detail: str,
        *,
        kernel: str,
        block: tuple[int, int, int],
        thread: tuple[int, int, int],
        argument: int | None,
        argument_name: str | None,
        frames: tuple[str, ...],
        other_frames: tuple[str, ...],
    ) -> None:
        subject = "" if argument is None else f" at argument {argument} ({argument_name})"
        place = " called from ".join(frames) or "an unknown line"
        if other_frames:
            place += f"; the other access: {' called from '.join(other_frames)}"
        super().__init__(f"{kernel}: {kind}{subject}: {detail}; block {block}, thread {thread}, {place}")
        self.kind = kind
        self.detail = detail
        self.kernel = kernel
        self.block = block
        self.thread = thread
        self.argument = argument
        self.argument_name = argument_name
        self.frames = frames
        self.other_frames = other_frames
