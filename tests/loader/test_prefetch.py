from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.errors import SourceError, StallError
from easypipe.loader.prefetch import InOrder, Prefetcher
from laws import assert_no_new_threads


def counted(stop: int | None, seconds: float = 0.0):
    def make(index, enter):
        enter("work")
        if seconds:
            time.sleep(seconds * (index % 3))  # later items overtake earlier ones
        return None if stop is not None and index >= stop else index

    return make


@given(
    start=st.integers(0, 5),
    count=st.integers(0, 20),
    workers=st.integers(1, 5),
    ahead=st.integers(1, 7),
)
def test_items_come_in_order_whoever_makes_them(start, count, workers, ahead):
    made = list(
        Prefetcher(counted(start + count), start, workers=workers, ahead=ahead, stall_timeout_s=10)
    )
    assert made == list(InOrder(counted(start + count), start)) == list(range(start, start + count))


def test_items_that_overtake_each_other_wait():
    assert list(Prefetcher(counted(12, 0.01), 0, workers=3, ahead=6, stall_timeout_s=10)) == list(
        range(12)
    )


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_than_ahead_items_are_made(ahead):
    begun = []

    def make(index, enter):
        begun.append(index)
        return index

    items = Prefetcher(make, 0, workers=4, ahead=ahead, stall_timeout_s=10)
    time.sleep(0.2)
    assert sorted(begun) == list(range(ahead))
    assert next(items) == 0
    time.sleep(0.2)
    assert sorted(begun) == list(range(ahead + 1))
    items.close()


def test_workers_are_threads_that_do_exist():
    before = set(threading.enumerate())
    items = Prefetcher(counted(None), 0, workers=3, ahead=5, stall_timeout_s=10, name="seen")
    assert sorted(t.name for t in set(threading.enumerate()) - before) == [
        "easypipe-seen-0",
        "easypipe-seen-1",
        "easypipe-seen-2",
    ]
    items.close()
    assert_no_new_threads(before)


def test_a_break_leaves_no_thread():
    before = set(threading.enumerate())
    for item in Prefetcher(counted(None), 0, workers=3, ahead=5, stall_timeout_s=10):
        if item == 4:
            break
    assert_no_new_threads(before)


def test_a_reference_cycle_leaves_no_thread_once_collected():
    before = set(threading.enumerate())
    items = Prefetcher(counted(None), 0, workers=2, ahead=5, stall_timeout_s=10)
    items.me = items  # type: ignore[attr-defined]
    del items
    gc.collect()
    assert_no_new_threads(before)


def test_the_end_and_close_leave_no_thread_and_stay_the_end():
    before = set(threading.enumerate())
    items = Prefetcher(counted(3), 0, workers=2, ahead=5, stall_timeout_s=10)
    assert list(items) == [0, 1, 2]
    assert_no_new_threads(before)
    assert list(items) == []
    items.close()
    items.close()


@pytest.mark.parametrize("kind", [Prefetcher, InOrder])
def test_an_error_comes_where_its_item_was_due_and_never_turns_into_the_end(kind):
    before = set(threading.enumerate())

    def make(index, enter):
        if index == 3:
            error = SourceError(at="a.jsonl, row 17", problem="not UTF-8")
            error.add_note("dataset 'code'")
            raise error
        return index

    items = (
        kind(make, 0, workers=3, ahead=8, stall_timeout_s=10)
        if kind is Prefetcher
        else kind(make, 0)
    )
    assert list(itertools.islice(items, 3)) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(SourceError, match="row 17: not UTF-8") as caught:
            next(items)
    assert "dataset 'code'" in caught.value.__notes__
    # where it happened, not only where it was raised again
    assert "make" in [frame.name for frame in caught.traceback]
    assert_no_new_threads(before)


def test_a_stall_names_the_stage_and_is_never_the_end():
    before = set(threading.enumerate())
    release = threading.Event()

    def make(index, enter):
        enter("gather")
        if index == 2:
            enter("read gs://bucket/shard-3")
            release.wait(20)
        return index

    items = Prefetcher(make, 0, workers=2, ahead=2, stall_timeout_s=0.3, name="train")
    assert [next(items), next(items)] == [0, 1]
    started = time.monotonic()
    with pytest.raises(StallError) as caught:
        next(items)
    assert 0.25 < time.monotonic() - started < 5
    assert str(caught.value).startswith(
        "train: batch 2 was not ready after 0.3 s; it is in stage 'read gs://bucket/shard-3', "
        "there for 0."
    )
    assert "raise stall_timeout_s" in str(caught.value)
    with pytest.raises(StallError):
        next(items)
    release.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert_no_new_threads(before)


def test_a_worker_that_hangs_at_close_is_named(caplog):
    release = threading.Event()

    def make(index, enter):
        enter("read")
        release.wait(20)
        return index

    items = Prefetcher(make, 0, workers=1, ahead=1, stall_timeout_s=10)
    time.sleep(0.05)
    with caplog.at_level(logging.WARNING, "easypipe"):
        items.close(join_timeout_s=0.1)
    assert (
        "easypipe-loader-0 did not end within 0.1 s; it is at batch 0, stage 'read'" in caplog.text
    )
    release.set()


def test_waiting_costs_no_processor_time():
    items = Prefetcher(counted(None), 0, workers=2, ahead=4, stall_timeout_s=10)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    items.close()


def test_a_thread_keeps_no_item_that_was_taken() -> None:
    class Item:
        pass

    goes_on = threading.Event()

    def make(index: int, enter: Any) -> Item:
        if index:
            goes_on.wait(20)
        return Item()

    items = Prefetcher(make, 0, workers=1, ahead=1, stall_timeout_s=20)
    try:
        taken = weakref.ref(next(items))
        until = time.monotonic() + 10
        while taken() is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert taken() is None  # while the next one is made
    finally:
        goes_on.set()
        items.close()
