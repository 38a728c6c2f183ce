"""The engine thread. Requests and aborts reach it through a queue; token events leave it for the event loop.

    event loop                                   engine thread
    submit(EngineRequest)   -- command queue --> engine.add_parallel, add_beams
    LiveRequest.next_event  <-- call_soon_threadsafe, asyncio.Queue --  engine.step
    LiveRequest.close       -- command queue --> engine.abort, abort_search

The thread owns the engine: nothing else calls these. It carries out every waiting command between two steps and blocks
on the queue when there is nothing to run. What can go wrong has one rule each: a request that cannot be added fails
alone; a step or an abort that raises ends every live request, and the thread goes on with an empty engine; a step older
than the watchdog ends them too, and new requests are refused until it returns; where not even an empty engine can be
had, the thread dies, and a thread that has died refuses everything from then on.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from cupyllm.api.engine_request import EngineRequest
from cupyllm.api.errors import UnavailableError
from cupyllm.api.live_request import ADMITTED, LiveRequest
from cupyllm.api.tally import Tally
from cupyllm.api.waiting_count import WaitingCount
from cupyllm.beam_search import BeamSearch
from cupyllm.engine import Engine
from cupyllm.engine_stats import EngineStats
from cupyllm.errors import EngineError
from cupyllm.step_result import StepResult, TokenEvent
from cupyllm.step_trace import StepTrace

log = logging.getLogger(__name__)

# So many failed steps in a row are taken for damage that stays, such as a GPU that needs a reset.
FAILED_STEPS_UNTIL_UNWELL = 3
# Seconds, for the histogram of what steps take.
STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
T = TypeVar("T")


class EngineWorker:
    """Runs an engine in a thread of its own and speaks for it on the event loop."""

    def __init__(self, engine: Engine, *, watchdog_seconds: float) -> None:
        self.trace = StepTrace(engine)  # of the engine thread
        self._engine = engine
        self._watchdog_seconds = watchdog_seconds
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Of the engine thread: sequence id -> request and choice, search -> request and prompt
        self._owners: dict[int | BeamSearch, tuple[LiveRequest, int]] = {}
        self._live: set[LiveRequest] = set()
        self._calls: set[asyncio.Future[Any]] = set()
        self._waiting = WaitingCount(engine)
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._has_ended = False  # the thread; true before anybody who waits for it is told
        self._loop: asyncio.AbstractEventLoop
        self._watch: asyncio.Task[None]
        self._step_started: float | None = None
        self._failed_in_a_row = 0
        self.num_failed_steps = 0
        self.step_seconds = Tally(STEP_BOUNDS)
        self.draining = False

    # The event loop's side.

    def start(self) -> None:
        """Start the thread, and the watch over it on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watch = self._loop.create_task(self._watch_steps())

    async def stop(self) -> None:
        """End the thread after the step in progress, and wait for that."""
        self._watch.cancel()
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, 5.0)

    async def submit(self, asked: EngineRequest) -> LiveRequest:
        """Queue all prompts of a request with all their answers, or none.

        Raises RequestError for what can never be served, QueueFullError, and UnavailableError.
        """
        refusal = self.refusal()
        if refusal is not None:
            raise UnavailableError(refusal)
        self._waiting.come(asked.num_waiting)
        request = LiveRequest(asked, abort=self._ask_to_abort, forget=self._forget)
        self._live.add(request)
        self._idle.clear()
        self._commands.put(partial(self._add, request))
        try:
            await request.admitted()
        except BaseException:
            request.close()
            raise
        return request

    def post(self, command: Callable[[], None]) -> None:
        """Have the engine thread do something between two steps. If it raises, the log says so and nothing ends."""
        self._commands.put(partial(_unless_it_fails, command))

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises in the engine thread, between two steps."""
        if self._has_ended:
            raise UnavailableError("the engine thread has ended")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(answer)
        answer.add_done_callback(self._calls.discard)
        self._commands.put(partial(self._answer, answer, function))
        return await answer

    def fail_all(self, error: EngineError) -> None:
        """End every live request with an error."""
        for request in list(self._live):
            request.deliver(error)
            request.close()

    def trouble(self) -> str | None:
        """Why the engine is not well, or None."""
        if self._has_ended:
            return "the engine thread has ended"
        if self._is_stuck():
            return f"a step of the engine has been running for more than {self._watchdog_seconds:g} s"
        if self._failed_in_a_row >= FAILED_STEPS_UNTIL_UNWELL:
            return f"the last {FAILED_STEPS_UNTIL_UNWELL} steps of the engine failed"
        return None

    def refusal(self) -> str | None:
        """Why no request can be taken now, or None. After failed steps a new try is the only way to find out."""
        if self.draining:
            return "the server is stopping"
        if self._has_ended or self._is_stuck():
            return self.trouble()
        return None

    @property
    def stats(self) -> EngineStats:
        """How full the engine is, read while it may be changing: a figure, not a promise."""
        return self._engine.stats

    @property
    def num_live(self) -> int:
        """Requests that have been taken and have not ended."""
        return len(self._live)

    async def wait_until_idle(self, seconds: float) -> bool:
        """Wait for the last live request to end; False if some live on after `seconds`."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    def _ask_to_abort(self, request: LiveRequest, choice: int) -> None:
        """Have the engine drop one choice of a request."""
        self._commands.put(partial(self._abort, request, choice))

    def _forget(self, request: LiveRequest) -> None:
        """The request is over for the event loop; the engine drops what is left of it."""
        if request not in self._live:
            return
        self._live.remove(request)
        self._waiting.leave(request.asked.num_waiting)
        self._commands.put(partial(self._drop, request))
        if not self._live:
            self._idle.set()

    def _is_stuck(self) -> bool:
        started = self._step_started
        return started is not None and time.monotonic() - started > self._watchdog_seconds

    async def _watch_steps(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._watchdog_seconds / 4))
            if self._live and self._is_stuck():
                log.error("a step has been running for more than %g s", self._watchdog_seconds)
                self.fail_all(EngineError("the engine is stuck"))

    def _note_end(self) -> None:
        """The thread has ended, and whoever still waits for it would wait for ever."""
        self.fail_all(EngineError("the engine thread has ended"))
        for answer in list(self._calls):
            _set_unless_done(answer, None, UnavailableError("the engine thread has ended"))

    # The engine thread's side.

    def _run(self) -> None:
        try:
            while self._carry_out_commands():
                if self._engine.has_work:
                    self._step()
        except BaseException:
            log.critical("the engine thread died", exc_info=True)
        finally:
            self._has_ended = True  # first: whoever comes after the others were told finds it true
            self._post(self._note_end)

    def _carry_out_commands(self) -> bool:
        """Do all that waits in the queue; blocks while the engine has no work. False: the thread is to end."""
        wait = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            try:
                command()
            except Exception:
                log.exception("a command to the engine failed; all live requests end")
                self._end_everything(EngineError("a command to the engine failed"))
            wait = False

    def _answer(self, answer: asyncio.Future[T], function: Callable[[], T]) -> None:
        try:
            self._post(_set_unless_done, answer, function(), None)
        except Exception as error:
            self._post(_set_unless_done, answer, None, error)

    def _add(self, request: LiveRequest) -> None:
        self._waiting.taken(request.asked.num_waiting)
        try:
            request.work.add_to(self._engine)
            self._owners |= {s.id: (request, choice) for choice, s in enumerate(request.work.sequences)}
            self._owners |= {search: (request, number) for number, search in enumerate(request.work.searches)}
        except Exception as error:
            self._post(request.deliver, error)  # first: taking out what was queued may fail too
            self._abort(request)
        else:
            self._post(request.deliver, ADMITTED)

    def _abort(self, request: LiveRequest, choice: int | None = None) -> None:
        for ended in request.work.abort(self._engine, choice):
            self._owners.pop(ended, None)

    def _drop(self, request: LiveRequest) -> None:
        self._waiting.left(request.asked.num_waiting)
        self._abort(request)

    def _step(self) -> None:
        started = self._step_started = time.monotonic()
        try:
            self._dispatch(self._engine.step())
        except Exception:
            self.num_failed_steps += 1
            self._failed_in_a_row += 1
            log.exception("a step of the engine failed; all live requests end")
            self._end_everything(EngineError("a step of the engine failed"))
        else:
            self._failed_in_a_row = 0
            self.step_seconds.add(time.monotonic() - started)
        finally:
            self._step_started = None

    def _dispatch(self, events: StepResult) -> None:
        items = []
        for event in events:
            request, choice = self._owners[event.sequence.id]
            items.append((request, choice, event))
            if event.finish_reason is not None:
                del self._owners[event.sequence.id]
        for search in events.ended_searches:
            request, number = self._owners.pop(search)
            items += [(request, choice, event) for choice, event in request.work.answers_of_search(number)]
        if items:
            self._post(_deliver, items)  # one wake-up of the loop for the whole step

    def _end_everything(self, error: EngineError) -> None:
        """Empty the engine after a fault of ours, and tell those that were in it. Raises where something stays."""
        self._engine.abort_all()
        self._engine.check_idle()
        for request in {request for request, _ in self._owners.values()}:
            self._post(request.deliver, error)
        self._owners.clear()

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            log.debug("the event loop has ended; a result is dropped")


def _deliver(items: list[tuple[LiveRequest, int, TokenEvent]]) -> None:
    now = time.monotonic()
    for request, choice, event in items:
        request.deliver((choice, event, now))


def _unless_it_fails(command: Callable[[], None]) -> None:
    try:
        command()
    except Exception:
        log.exception("a command that concerns no request failed")


def _set_unless_done(answer: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    """Whoever waited for the answer may have gone."""
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
