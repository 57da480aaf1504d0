"""The seam: the moments at which the core calls its companions.

The core averages gradients and knows no companion. A companion registers a class of observers. Each wrapper gets one
observer of each class, and calls its methods at the moments that are listed below. Only methods that a class
overrides are called, so an event that nobody listens to costs nothing.

``events.main()`` prints which companion listens to which event. The smallest companion::

    class Printer(minddp.events.Observer):
        name = "printer"

        def before_forward(self, joining):
            print("forward of iteration", self.averager.reducer.iteration())

    minddp.events.register(Printer)

What always holds
    Observers are called in the order in which their classes were registered, on all ranks alike, since some of them
    communicate. The order is compared between ranks when a wrapper is constructed.
"""

from __future__ import annotations

import difflib
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from . import environment
from .functions import refuse_left

if TYPE_CHECKING:
    import torch

    from . import _C
    from .reducer import Plan


class Observer:
    """One companion's half of one wrapper. Subclasses override what they need.

    Attributes:
        name: the companion's name, for ``MINDDP_WITHOUT`` and messages.
        options: the constructor's arguments that the companion adds, with their defaults.
        arguments: their description, which the wrapper's docstring gets.
        left: arguments that the constructor had once, with the way out: it refuses them by name.
        tunes_buckets: it cuts buckets anew for ``bucket_cap_mb="auto"``.
        settings: what :meth:`parse` made of the arguments.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    arguments: ClassVar[str] = ""
    left: ClassVar[Mapping[str, str]] = {}
    tunes_buckets: ClassVar[bool] = False
    _averager: weakref.ref[Any] | None = None

    def __init__(self, ddp: Any, settings: Any):
        self.settings = settings

    @property
    def averager(self) -> Any:
        """The wrapper's, or ``None`` before it is made."""
        return None if self._averager is None else self._averager()

    def listens(self, event: str) -> bool:
        """Whether this wrapper's observer has anything to do at ``event``, for which its class has a method."""
        return True

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Any:
        """Checks the arguments of this companion. What it returns is pickled with the wrapper.

        Raises:
            ValueError, TypeError: an argument makes no sense; named.
        """
        return dict(values)

    # Construction. All ranks construct together: these may raise on all ranks alike.

    def constructing(self, ddp: Any) -> None:
        """The module and the group are known, and no tensor has been looked at. May change the module; may raise."""

    def compared(self, parameters: Any) -> Mapping[str, Any]:
        """What must be the same on all ranks, by argument. The ranks raise if it is not; what is not returned here
        is not compared. May communicate."""
        return {}

    def exchange(self) -> Any:
        """What this rank sends to the others in the constructor's all-gather: what JSON can hold."""

    def exchanged(self, everyone: list[Any]) -> None:
        """What each rank has sent, in rank order."""

    def planning(self, plan: Plan) -> None:
        """A reducer is about to be made of ``plan``, which may be changed. May raise, and communicate."""

    def reducer_made(self, reducer: _C.Reducer, before: _C.Reducer | None) -> None:
        """A reducer has taken the place of ``before``. Callbacks and cases are placed here."""

    def named(self, token: str) -> None:
        """What all ranks call this wrapper from now on."""

    # A forward with gradients.

    def entering(self) -> None:
        """A forward begins. What comes before is this rank's own time. Must not raise or communicate."""

    def checking(self) -> None:
        """Something new is about to begin, and the last iteration should be over. May raise."""

    def before_forward(self, joining: bool) -> None:
        """The forward's backward will be synchronized. ``joining``: ranks may have run out of data, and take no part
        in other collectives than the forward's own; otherwise this may communicate. May raise."""

    def after_forward(self, outputs: list[torch.Tensor], synchronized: bool) -> None:
        """The module has run, also without gradients. ``outputs``: the tensors in its output."""

    # Backward, on autograd's threads.

    def bucket_packed(self, bucket: Any) -> None:
        """``bucket`` holds this rank's gradients and is about to be reduced. Must not communicate. May raise."""

    def after_last_launch(self) -> None:
        """All buckets of this iteration have left. May begin collectives, and must not wait for them."""

    # What happens now and then.

    def buckets_changed(self, reducer: _C.Reducer) -> None:
        """Gradients travel in other buckets than the reducer's first from now on."""

    def hooking(self, steps: bool) -> None:
        """A communication hook is about to be registered. ``steps``: it runs the optimizer. May raise."""

    def hook_changed(self, name: str) -> None:
        """A communication hook of this name has been registered."""

    def step_skipped(self) -> None:
        """No optimizer will use the last averages."""

    def joined(self, now: bool) -> None:
        """In ``join()``: this rank has run out of data, and is about to take part in an iteration of the others; or
        (``now=False``) all have, and the context ends."""

    def shadowed(self, synchronized: bool, by_all: bool) -> None:
        """It has taken part in an iteration. ``by_all``: sums are divided by all ranks."""

    def refreshing(self, ddp: Any) -> None:
        """The module's parameters are about to be looked at anew, and buckets cut anew. May change the module; may
        raise."""

    def saving(self) -> None:
        """``state_dict()`` is called. May raise."""

    def failed(self, error: BaseException | str, where: str) -> None:
        """This rank raises ``error``: in "forward", which the program may handle; in "backward": it will not finish
        its part of an iteration; in a "collective": it takes no part in the wrapper's next one outside of backward;
        in a "call" that concerns no other rank. Must not raise."""

    def unfinished(self) -> bool:
        """Whether there is something to give up, beside what the reducer knows of. Must not raise."""
        return False

    def aborting(self) -> None:
        """An unfinished iteration is about to be given up. Must not raise."""

    def collective(self) -> AbstractContextManager[None]:
        """A context for a collective outside of backward, in which all ranks take part."""
        return nullcontext()


EVENTS = tuple(
    name
    for name, value in vars(Observer).items()
    if inspect.isfunction(value) and not name.startswith("_") and name != "listens"
)
_registered: dict[str, type[Observer]] = {}


def register(companion: type[Observer]) -> None:
    """Each wrapper that is constructed from now on gets an observer of this class. ``import minddp`` registers the
    companions' own.

    Raises:
        ValueError: another companion has one of its arguments already.
    """
    for other in (other for other in _registered.values() if other.name != companion.name):
        if both := set(other.options) & set(companion.options):
            raise ValueError(f"companion {companion.name!r}: {other.name!r} has the arguments {both} already")
    _registered[companion.name] = companion


def unregister(name: str) -> None:
    """Wrappers that are constructed from now on get no observer of that companion."""
    del _registered[name]


def registered() -> list[type[Observer]]:
    """The classes that wrappers get, in order; without those that ``MINDDP_WITHOUT`` names."""
    return [companion for companion in _registered.values() if not environment.leaves_out(companion.name)]


class Observers:
    """The observers of one wrapper. ``observers.before_forward`` lists the methods of those that listen.

    Attributes:
        settings: by companion, what the arguments came to.
    """

    def __init__(self, ddp: Any, settings: Mapping[str, Any]):
        self.settings = dict(settings)
        self._by_name = {c.name: c(ddp, settings[c.name]) for c in registered() if c.name in settings}
        for event in EVENTS:
            overrides = [o for o in self._by_name.values() if getattr(type(o), event) is not getattr(Observer, event)]
            listening = [observer for observer in overrides if observer.listens(event)]
            setattr(self, event, tuple(getattr(observer, event) for observer in listening))

    if TYPE_CHECKING:  # the constructor sets all of EVENTS

        def __getattr__(self, event: str) -> Any: ...

    def get(self, name: str) -> Any:
        """The observer of that companion, or None."""
        return self._by_name.get(name)

    def of_averager(self, averager: Any) -> None:
        """The wrapper's averager is being made."""
        for observer in self._by_name.values():
            observer._averager = weakref.ref(averager)

    def names(self) -> list[str]:
        return list(self._by_name)

    def tune_buckets(self) -> bool:
        """Whether one of them cuts buckets anew for ``bucket_cap_mb="auto"``."""
        return any(observer.tunes_buckets for observer in self._by_name.values())

    @contextmanager
    def together(self) -> Iterator[None]:
        """The observers' contexts for a collective outside of backward."""
        with ExitStack() as stack:
            for context in self.collective:
                stack.enter_context(context())
            yield


def parse(options: Mapping[str, Any], known: Iterable[str] = ()) -> dict[str, Any]:
    """The constructor's further arguments, by companion, as each of them reads its own.

    Args:
        known: names of arguments, of which one may be meant where nobody takes one.

    Raises:
        TypeError: no companion has such an argument, or its companion is left out and the value is not the default.
        ValueError, TypeError: a companion refuses a value.
    """
    left = dict(options)
    settings = {}
    for companion in registered():
        values = {name: left.pop(name, default) for name, default in companion.options.items()}
        settings[companion.name] = companion.parse(values)
    for companion in _registered.values():
        for name, default in companion.options.items():
            if name in left and left.pop(name) != default:
                raise TypeError(
                    "DistributedDataParallel: MINDDP_PLAIN or MINDDP_WITHOUT leaves out the companion "
                    f"{companion.name!r}, which has the argument {name!r}: attach it, or leave the argument out."
                )
    gone = {name: way for companion in _registered.values() for name, way in companion.left.items()}
    refuse_left("DistributedDataParallel", set(left) & set(gone), gone)
    for name in left:
        meant = difflib.get_close_matches(name, known, n=1)
        listed = "help(minddp.DistributedDataParallel) describes all arguments."
        way = f"Did you mean {meant[0]!r}?" if meant else listed
        raise TypeError(f"DistributedDataParallel has no argument {name!r}. {way}")
    return settings


def all_options() -> dict[str, Any]:
    """The arguments that companions add, with their defaults."""
    return {name: default for companion in registered() for name, default in companion.options.items()}


def main() -> None:
    """Prints which companion listens to which event."""
    for event in EVENTS:
        names = [c.name for c in registered() if getattr(c, event) is not getattr(Observer, event)]
        print(f"{event:18} {', '.join(names) or '-'}")
