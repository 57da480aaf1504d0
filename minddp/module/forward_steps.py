"""Forward's steps, by the short way where they are minddp's own.

Libraries override them (mmcv's wrapper its ``_run_ddp_forward``), and programs patch them: then theirs are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Step = Callable[..., Any]


def steps_of(kind: type) -> tuple[Step, Step, Step, Callable[[Any], bool]]:
    """``_pre_forward``, ``_run_ddp_forward`` and ``_post_forward`` of ``kind``, without their wrappers against
    torch.compile, which cost some five microseconds each; and whether an instance has another one."""
    names = ("_pre_forward", "_run_ddp_forward", "_post_forward")
    before, run, after = (vars(kind)[name] for name in names)

    def has_own(ddp: Any) -> bool:
        of = type(ddp)
        return (
            of._pre_forward is not before
            or of._run_ddp_forward is not run
            or of._post_forward is not after
            or not ddp.__dict__.keys().isdisjoint(names)
        )

    return before.__wrapped__, run.__wrapped__, after.__wrapped__, has_own
