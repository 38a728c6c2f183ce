"""Threads that share the work of a kernel.

A kernel cuts its work into chunks and calls `share_out(team, function, count, arguments, ...)`, which runs
`function(chunk, *arguments, ...)` for every chunk from 0 to count - 1. The calling thread takes chunks itself, and the
team's other threads take chunks as long as they find some. Nobody waits for a thread that does not come: on a machine
that is busy with other things the caller does more of the work, and only chunks that are being computed hold it up.

Each thread has a span of neighbouring chunks, and goes through it in order, so that it reads memory in one direction;
a thread that has finished its own takes chunks of the others' spans.

All they share is a few whole numbers in memory. A span's ticket holds the number of the job in its upper and the count
of its chunks that nobody has taken in its lower 32 bits; to take a chunk is to make the count one less by compare and
swap. It can only succeed while the job that was read is the one that runs, so what describes the job (written before
the ticket, read after it) fits.

An idle thread looks for work without sleeping for about a millisecond, so that one kernel after another finds it ready;
then it goes to sleep until the next kernel wakes it.
"""

from __future__ import annotations

import platform
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from cupyllm.ops.cpu.compile import instruction, kernel, part
from cupyllm.ops.cpu.vectors import I32, I64, Builder, Value, data_pointer, number

# Places in a team's memory: 8 numbers are a cache line, so that waiting for one does not slow writing another.
DONE, FUNCTION, ARGUMENTS, COUNT, SPAN, THREADS, STOP, TICKETS = 0, 8, 9, 10, 11, 12, 16, 24
_TICKET = 8  # from one thread's ticket to the next
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_SPINS = 2000  # looks at the ticket before an idle thread lets others run between them
_YIELDS = 2000  # and then before it goes to sleep


class Team:
    """`threads` threads: the caller's own, and the others, which end when the team is no longer referred to."""

    def __init__(self, threads: int) -> None:
        self._memory = np.zeros(TICKETS + _TICKET * threads, np.int64)
        self._memory[THREADS] = threads
        self._lock = threading.Lock()
        self._wake = [threading.Event() for _ in range(threads - 1)]
        for place, event in enumerate(self._wake, start=1):
            arguments = (self._memory, place, event)
            threading.Thread(target=_member, args=arguments, name="cupyllm-cpu", daemon=True).start()
        weakref.finalize(self, _dismiss, self._memory, self._wake)

    def run(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Call `kernel(team's memory, *arguments)`; callers from several threads take turns."""
        with self._lock:
            for event in self._wake:
                if not event.is_set():
                    event.set()
            kernel(self._memory, *arguments)


def _member(memory: np.ndarray, thread: int, wake: threading.Event) -> None:
    """The life of a thread of the team, which is number `thread` of it; the caller of kernels is number 0."""
    while not memory[STOP]:
        take_chunks_until_idle(memory, thread)
        if not memory[STOP]:
            wake.wait()
            wake.clear()


def _dismiss(memory: np.ndarray, wake: list[threading.Event]) -> None:
    memory[STOP] = 1
    for event in wake:
        event.set()


@part
def share_out(team: Any, function: Any, count: int, arguments: Any, constants: Any) -> None:
    """Run function(chunk, *arguments, *constants) for every chunk from 0 to count - 1; returns when all are done."""
    if count <= 0:
        return
    describe(team, function, arguments, constants)
    threads = team[THREADS]
    span = (count + threads - 1) // threads
    team[COUNT], team[SPAN] = count, span
    for thread in range(threads):
        place = TICKETS + _TICKET * thread
        next_job = (team[place] >> 32) + 1
        store_release(team, place, next_job << 32 | max(min(span, count - thread * span), 0))
    while take_chunk(team, 0):
        pass
    spins = 0
    while load_acquire(team, DONE) < count:
        spins += 1
        pause(spins > _SPINS)


@kernel()
def take_chunks_until_idle(team: Any, thread: int) -> None:
    """Take chunks of whatever job there is, until there has been none for a while."""
    idle = 0
    while idle < _SPINS + _YIELDS and not team[STOP]:
        if take_chunk(team, thread):
            idle = 0
        else:
            idle += 1
            pause(idle > _SPINS)


@part
def take_chunk(team: Any, thread: int) -> bool:
    """Take and compute one chunk, of the thread's own span if it has one left; False if there was none to take."""
    threads = team[THREADS]
    for i in range(threads):
        owner = (thread + i) % threads
        place = TICKETS + _TICKET * owner
        ticket = load_acquire(team, place)
        remaining = ticket & 0xFFFFFFFF
        if remaining:
            function, arguments = team[FUNCTION], team[ARGUMENTS]
            chunk = min((owner + 1) * team[SPAN], team[COUNT]) - remaining
            if compare_and_swap(team, place, ticket, ticket - 1):
                call(function, arguments, chunk)
                add_release(team, DONE, 1)
            return True
    return False


def _describe(typing_context: Any, team: Any, function: Any, arguments: Any, constants: Any) -> Any:
    """Write down in the team's memory what a chunk is.

    The arguments, a tuple, are put on the stack of the kernel, which outlives the job. `function` gets them through a
    function of one type for all jobs: (numba's two addresses for results and errors), arguments, chunk.
    """
    share_types = (types.int64, *arguments.types, *constants.types)
    signature = function.get_call_type(typing_context, share_types, {})

    def generate(context: Any, builder: Builder, own_signature: Any, values: Any) -> Value:
        memory = data_pointer(context, builder, team, values[0], number(0))
        stack = cgutils.alloca_once_value(builder, values[2])
        wrapper = _make_wrapper(context, builder, function, signature, arguments, constants)
        facts = {FUNCTION: builder.ptrtoint(wrapper, I64), ARGUMENTS: builder.ptrtoint(stack, I64), DONE: number(0)}
        for place, value in facts.items():
            builder.store(value, builder.gep(memory, [number(place)]))
        return context.get_dummy_value()

    return types.void(team, function, arguments, constants), generate


def _wrapper_type(context: Any) -> Any:
    return context.call_conv.get_function_type(types.none, (types.voidptr, types.int64))


def _make_wrapper(
    context: Any, builder: Builder, function: Any, signature: Any, arguments: Any, constants: Any
) -> Value:
    """A function that calls `function` with a chunk, the arguments from memory, and the constants."""
    name = f"{builder.function.name}.share.{len(builder.module.functions)}"
    wrapper = ir.Function(builder.module, _wrapper_type(context), name)
    wrapper.linkage = "internal"
    inner = ir.IRBuilder(wrapper.append_basic_block("entry"))
    address, chunk = context.call_conv.get_arguments(wrapper)
    stored = inner.load(inner.bitcast(address, context.get_value_type(arguments).as_pointer()))
    values = [
        *cgutils.unpack_tuple(inner, stored, len(arguments.types)),
        *(context.get_constant_generic(inner, kind, kind.literal_value) for kind in constants.types),
    ]
    context.get_function(function, signature)(inner, [chunk, *values])
    context.call_conv.return_value(inner, context.get_dummy_value())
    return wrapper


def _call(typing_context: Any, function: Any, arguments: Any, chunk: Any) -> Any:
    """Call a wrapper by its address. Kernels raise nothing, so its result is not looked at."""

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        kind = _wrapper_type(context)
        result, error = (cgutils.alloca_once(builder, slot.pointee) for slot in kind.args[:2])
        address = builder.inttoptr(values[1], kind.args[2])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [result, error, address, values[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _load_acquire(typing_context: Any, team: Any, place: Any) -> Any:
    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        address = data_pointer(context, builder, team, values[0], values[1])
        return builder.load_atomic(address, ordering="acquire", align=8)

    return types.int64(team, types.int64), generate


def _store_release(typing_context: Any, team: Any, place: Any, value: Any) -> Any:
    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        address = data_pointer(context, builder, team, values[0], values[1])
        builder.store_atomic(values[2], address, ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(team, types.int64, types.int64), generate


def _add_release(typing_context: Any, team: Any, place: Any, amount: Any) -> Any:
    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        address = data_pointer(context, builder, team, values[0], values[1])
        builder.atomic_rmw("add", address, values[2], ordering="release")
        return context.get_dummy_value()

    return types.void(team, types.int64, types.int64), generate


def _compare_and_swap(typing_context: Any, team: Any, place: Any, expected: Any, new: Any) -> Any:
    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        address = data_pointer(context, builder, team, values[0], values[1])
        swapped = builder.cmpxchg(address, values[2], values[3], ordering="acq_rel", failordering="acquire")
        return builder.extract_value(swapped, 1)

    return types.boolean(team, types.int64, types.int64, types.int64), generate


def _pause(typing_context: Any, let_others_run: Any) -> Any:
    """Wait for a moment: a hint to the processor, or to the system that another thread may have this processor."""

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        with builder.if_else(values[0]) as (then, otherwise):
            with then:
                yield_type = ir.FunctionType(I32, [])
                builder.call(cgutils.get_or_insert_function(builder.module, yield_type, "sched_yield"), [])
            with otherwise:
                if _IS_X86:
                    hint_type = ir.FunctionType(ir.VoidType(), [])
                    builder.call(cgutils.get_or_insert_function(builder.module, hint_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(types.boolean), generate


describe = instruction(_describe)
store_release = instruction(_store_release)
call = instruction(_call)
load_acquire = instruction(_load_acquire)
add_release = instruction(_add_release)
compare_and_swap = instruction(_compare_and_swap)
pause = instruction(_pause)
