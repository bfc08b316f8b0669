"""Runs an iterator a few items ahead in a thread, so that reading shards hides behind computing."""

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


_END = object()


def prefetch(items: Iterator[Item], depth: int) -> Generator[Item, None, None]:
    """Yields `items` in order; an error raised by them is raised here. Closing this generator ends the thread."""
    waiting: queue.Queue[object] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(item: object) -> bool:
        while not closed.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(_END)
        except Exception as error:
            put(_Failure(error))

    thread = threading.Thread(target=produce, name="shard-reader", daemon=True)
    thread.start()
    try:
        while (item := waiting.get()) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            yield item  # pyright: ignore[reportReturnType]
    finally:
        closed.set()
        thread.join()
