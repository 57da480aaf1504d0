"""docs/faults.md from results."""
from __future__ import annotations
from collections.abc import Sequence
from typing import Any
def page(results: Sequence[dict[str, Any]], group_timeout: int, desync_timeout: int) -> str:
    return ""
