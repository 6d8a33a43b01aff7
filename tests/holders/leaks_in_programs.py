"""Leaks in running or suspended code: generators, coroutines, exceptions, threads, contexts."""

import asyncio
import contextvars
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from types import coroutine
from typing import Any

import torch
from planted import CLEANUP, KEEP, Table, leak

PROGRAMS: Table = []
LOCAL = threading.local()
REQUEST: contextvars.ContextVar[Any] = contextvars.ContextVar("request")
EXCEPTION = "store the text of the exception instead"
GENERATOR = "exhaust the suspended generator, or close() it"
COROUTINE = "await the suspended coroutine, or close() it"
# Up to Python 3.10, only the stack of its frame references what a generator or coroutine awaits.
ON_STACK = sys.version_info < (3, 11)
YIELDS_FROM = ".gi_frame -> generator" if ON_STACK else ".gi_yieldfrom"
AWAITS = ".cr_frame -> coroutine" if ON_STACK else ".cr_await"


def counting(x: torch.Tensor) -> Iterator[int]:
    yield 1
    yield len(x)


@leak(PROGRAMS, "planted.KEEP[0].gi_frame.f_locals['x']", hint=GENERATOR)
def suspended_generator() -> None:
    generator = counting(torch.ones(250))
    next(generator)
    KEEP.append(generator)


@leak(PROGRAMS, "planted.KEEP[0].gi_frame.f_locals['x']", hint=GENERATOR)
def generator_never_started() -> None:
    KEEP.append(counting(torch.ones(250)))


def delegating() -> Generator[int, None, None]:
    yield from counting(torch.ones(250))


@leak(
    PROGRAMS,
    f"planted.KEEP[0]{YIELDS_FROM}.gi_frame.f_locals['x']",
    hint=GENERATOR,
    made="next(generator)",
)
def inner_generator() -> None:
    generator = delegating()
    next(generator)
    KEEP.append(generator)


@leak(PROGRAMS, "planted.KEEP[0].__self__.gen.gi_frame.f_locals['x']", hint=GENERATOR)
def context_never_left() -> None:
    @contextmanager
    def using(x: torch.Tensor) -> Iterator[None]:
        yield
        len(x)

    stack = ExitStack()
    manager = using(torch.ones(250))
    stack.enter_context(manager)
    KEEP.append(manager.__exit__)
    CLEANUP.callback(stack.close)


@coroutine
def suspend() -> Generator[None, None, None]:
    yield


async def waiting(x: torch.Tensor) -> int:
    await suspend()
    return len(x)


def started(running: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
    CLEANUP.callback(running.close)
    running.send(None)
    return running


@leak(
    PROGRAMS,
    "planted.KEEP[0].cr_frame.f_locals['x']",
    hint=COROUTINE,
)
def suspended_coroutine() -> None:
    KEEP.append(started(waiting(torch.ones(250))))


async def calling() -> int:
    return await waiting(torch.ones(250))


@leak(
    PROGRAMS,
    f"planted.KEEP[0]{AWAITS}.cr_frame.f_locals['x']",
    hint=COROUTINE,
    made="running.send(None)",
)
def awaited_coroutine() -> None:
    running = calling()
    running.send(None)
    CLEANUP.callback(running.close)
    KEEP.append(running)


async def streaming(x: torch.Tensor) -> AsyncIterator[int]:
    yield 1
    yield len(x)


@leak(PROGRAMS, "planted.KEEP[0].ag_frame.f_locals['x']", hint="aclose()")
def suspended_async_generator() -> None:
    stream = streaming(torch.ones(250))
    step = stream.__anext__()
    try:
        step.send(None)  # type: ignore[attr-defined]
    except StopIteration:
        KEEP.append(stream)


@leak(
    PROGRAMS,
    "planted.KEEP[0]._coro.cr_frame.f_locals['x']",
    hint=COROUTINE,
)
def pending_task() -> None:
    loop = asyncio.new_event_loop()
    x = torch.ones(250)
    task = loop.create_task(waiting(x))
    loop.call_soon(loop.stop)
    loop.run_forever()
    KEEP.append(task)
    CLEANUP.callback(loop.close)
    CLEANUP.callback(loop.run_until_complete, asyncio.gather(task, return_exceptions=True))


@leak(PROGRAMS, "planted.KEEP[0]._result")
def result_of_a_future() -> None:
    future: Future[Any] = Future()
    future.set_result(torch.ones(250))
    KEEP.append(future)


@leak(PROGRAMS, "planted.KEEP[0].__traceback__.tb_frame.f_locals['x']", hint=EXCEPTION)
def stored_exception() -> None:
    try:
        x = torch.ones(250)
        raise ValueError(len(x))
    except ValueError as error:
        KEEP.append(error)


@leak(PROGRAMS, "planted.KEEP[0].__traceback__.tb_next.tb_frame.f_locals['x']", hint=EXCEPTION)
def exception_from_within() -> None:
    def fail(x: torch.Tensor) -> None:
        raise ValueError(len(x))

    try:
        fail(torch.ones(250))
    except ValueError as error:
        KEEP.append(error)


@leak(PROGRAMS, "planted.KEEP[0].__context__.__traceback__.tb_frame.f_locals['x']", hint=EXCEPTION)
def context_of_an_exception() -> None:
    def fail() -> None:
        x = torch.ones(250)
        raise ValueError(len(x))

    try:
        try:
            fail()
        except ValueError as error:
            KEEP.append(KeyError().with_traceback(None))
            error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
            KEEP[0].__context__ = error
    finally:
        pass


@leak(PROGRAMS, "planted.KEEP[0].args[0]")
def argument_of_an_exception() -> None:
    KEEP.append(ValueError(torch.ones(250)))


@leak(PROGRAMS, "planted.KEEP[0].tb_frame.f_locals['x']", hint=EXCEPTION)
def stored_traceback() -> None:
    x = torch.ones(250)
    try:
        raise ValueError(len(x))
    except ValueError:
        KEEP.append(sys.exc_info()[2])


@leak(PROGRAMS, "sys.last_value.__traceback__.tb_frame.f_locals['x']", hint=EXCEPTION)
def last_exception_of_the_interpreter() -> None:
    x = torch.ones(250)
    try:
        raise ValueError(len(x))
    except ValueError as error:
        sys.last_value = error
        CLEANUP.callback(delattr, sys, "last_value")


@leak(PROGRAMS, "planted.KEEP[0].f_locals['x']")
def stored_frame() -> None:
    x = torch.ones(250)
    KEEP.append(sys._getframe())
    assert x is not None


def in_thread(work: Any, *args: Any) -> None:
    """Run `work` in a thread that does not end before the test."""
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(begun, end, *args), name="planted")
    thread.start()
    assert begun.wait(10)
    CLEANUP.callback(thread.join)
    CLEANUP.callback(end.set)


@leak(PROGRAMS, "x in computing (", made="torch.ones(250)")
def local_of_a_running_thread() -> None:
    def computing(begun: threading.Event, end: threading.Event) -> None:
        x = torch.ones(250)
        begun.set()
        end.wait(10)
        len(x)

    in_thread(computing)


@leak(PROGRAMS, "x in sleeping (")
def argument_of_a_running_thread() -> None:
    def sleeping(begun: threading.Event, end: threading.Event, x: torch.Tensor) -> None:
        begun.set()
        end.wait(10)
        len(x)

    in_thread(sleeping, torch.ones(250))


@leak(PROGRAMS, "planted.KEEP[0]._args[0]")
def thread_never_started() -> None:
    KEEP.append(threading.Thread(target=print, args=(torch.ones(250),)))


@leak(PROGRAMS, "leaks_in_programs.LOCAL.x")
def thread_local() -> None:
    LOCAL.x = torch.ones(250)
    CLEANUP.callback(delattr, LOCAL, "x")


@leak(PROGRAMS, "leaks_in_programs.LOCAL.x")
def thread_local_of_another_thread() -> None:
    def working(begun: threading.Event, end: threading.Event) -> None:
        LOCAL.x = torch.ones(250)
        begun.set()
        end.wait(10)

    in_thread(working)


@leak(PROGRAMS, "request.get() (a context variable)")
def context_variable() -> None:
    REQUEST.set(torch.ones(250))
    CLEANUP.callback(REQUEST.set, None)


@leak(PROGRAMS, "planted.KEEP[0][<ContextVar 'request'>]")
def stored_context() -> None:
    context = contextvars.copy_context()
    context.run(REQUEST.set, torch.ones(250))
    KEEP.append(context)


@leak(PROGRAMS, "planted.KEEP[0] -> list[2]")
def iterator_over_a_list() -> None:
    KEEP.append(iter([1, 2, torch.ones(250)]))
