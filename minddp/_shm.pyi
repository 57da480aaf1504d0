"""The shared-memory transport's interface; csrc/shm."""

from datetime import timedelta
from typing import Any

Card = tuple[int, int, int]

class Segment:
    """This process's memory, which peers map until ``close()``. Its card: process, descriptor, token."""

    def __init__(self) -> None: ...
    def card(self) -> Card: ...
    def close(self) -> None: ...

def backend(rest: Any, own: Segment, cards: list[Card], timeout: timedelta) -> Any: ...
