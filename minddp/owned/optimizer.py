"""The class :class:`Owned`."""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch

from ..messages import indented
from . import layout, states
from .binding import Binding, bind
from .exchange import Exchange

Group = dict[str, Any]
_OF_SCALER = ("grad_scale", "found_inf")  # a GradScaler sets them on the optimizer for the time of a step


def _settings(group: Group) -> Group:
    """All of a group that is not by parameter: settings and counters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _copied(group: Group) -> Group:
    """Its settings, with copies of tensors and containers, since a step may count there."""
    kept = _settings(group).items()
    return {name: v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for name, v in kept}


class _Stepper:
    """An optimizer of the program's class for what this rank owns of one piece. It steps in the program's ``state``.

    Each is stepped once a step, so what counts steps in itself counts as the plain one. What counts in a group must
    find the same numbers in each piece: in the group's last one it finds the program's own, in the others a copy.

    Args:
        mine: parameters by their group's index.
        last: the groups of which no later piece has a parameter.
    """

    def __init__(self, owned: Owned, entry: int, mine: dict[int, list[torch.Tensor]], last: set[int]):
        self._owned, self._mine, self._last = owned, mine, last
        groups = [{**_copied(owned.param_groups[index]), "params": theirs} for index, theirs in mine.items()]
        self._optimizer = owned._make(entry, groups)
        for parameter, state in self._optimizer.state.items():  # Adagrad has made it already
            owned.state.setdefault(parameter, state)

    def step(self) -> None:
        owned, optimizer = self._owned, self._optimizer
        scaler = {name: getattr(owned, name) for name in _OF_SCALER if hasattr(owned, name)}
        groups = [(owned.param_groups[index], index in self._last, theirs) for index, theirs in self._mine.items()]
        given = [{**(_settings(g) if last else _copied(g)), "params": theirs} for g, last, theirs in groups]
        vars(optimizer).update(scaler, state=owned.state, param_groups=given)
        step: Any = type(optimizer).step
        try:
            # torch's hooks for all optimizers run once, around Owned.step; this is the function that they surround.
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
        finally:
            for (group, last, _), stepped in zip(groups, given):
                group.update(_settings(stepped) if last else {})
            for name in (*scaler, "state"):  # a state that the program replaces is not to live on
                delattr(optimizer, name)


class Owned(torch.optim.Optimizer):
    """Optimizers of which each rank keeps and computes its own share, whole parameters at a time.

    ``step()`` is a collective: every rank calls it, equally often. It steps this rank's parameters, sends their new
    values while the next are stepped, and returns when all parameters are whole on all ranks, with the bits that the
    plain optimizers give::

        muon, adamw = (matrices, torch.optim.Muon, dict(lr=0.02)), (others, torch.optim.AdamW, dict(lr=3e-4))
        opt = minddp.Owned(ddp, [muon, adamw])

    Gradients must be averaged when ``step()`` is called. ``state`` has this rank's parameters alone; edits of it are
    heard as a plain optimizer's. ``state_dict()`` needs :meth:`consolidate_state_dict` before it. The state of a rank
    that is lost is lost: go on from a checkpoint.

    Args:
        ddp: a :class:`minddp.DistributedDataParallel`; or a module that is wrapped in one before the first step, as
            trainers do that make the optimizer first. A program of one process sends nothing.
        optimizers: ``(params, optimizer class, keyword arguments)``, with ``params`` as the class takes them. A class
            fits if its update of a parameter depends on that parameter, its gradient and its state alone.

    Raises:
        TypeError, ValueError: an entry makes no sense; an optimizer needs a closure; a parameter trains and the
            wrapper does not average it; the ranks' parameters differ (on every rank).
    """

    def __init__(self, ddp: torch.nn.Module, optimizers: Sequence[tuple[Any, type[torch.optim.Optimizer], Group]]):
        if not isinstance(ddp, torch.nn.Module):
            raise TypeError(f"minddp.Owned: ddp must be a wrapper or a module, got {type(ddp).__name__}")
        if not isinstance(optimizers, (list, tuple)) or not optimizers:
            raise TypeError(
                "minddp.Owned: optimizers must be a list of (params, optimizer class, keyword arguments), and not "
                f"empty, got {optimizers!r:.200}"
            )
        plain = [_plain(f"minddp.Owned: optimizers[{i}]", entry) for i, entry in enumerate(optimizers)]
        self._module = ddp
        self._binding: Binding | None = None
        self._entries = [(type(optimizer), dict(entry[2])) for optimizer, entry in zip(plain, optimizers)]
        self._entry_of_group = [entry for entry, optimizer in enumerate(plain) for _ in optimizer.param_groups]
        self._owners: dict[torch.Tensor, int] = {}
        self._pieces: list[list[list[torch.Tensor]]] = []  # for each piece, for each rank, parameters
        self._steppers: list[list[_Stepper]] = []  # for each piece, this rank's
        self._known: list[int] = []  # `id` of each parameter that has an owner
        self._sent: set[int] = set()  # `id` of each parameter that the wrapper reduces or has reduced
        self._whole: states.Whole | None = None  # all ranks' states, as they were gathered
        self._has_state = False  # some rank may have states
        self._step_supports_amp_scaling = all(getattr(p, "_step_supports_amp_scaling", False) for p in plain)
        # Groups have their own optimizer's defaults already; schedulers look for a momentum in the first one's.
        super().__init__([group for optimizer in plain for group in optimizer.param_groups], {})
        self.defaults, self.state = dict(plain[0].defaults), states.Share(dict)
        if isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
            self._bind()

    def _make(self, entry: int, groups: list[Group]) -> torch.optim.Optimizer:
        kind, settings = self._entries[entry]
        return kind(groups, **settings)

    # --- who owns what ---

    def _bind(self) -> Binding:
        if self._binding is None:
            self._binding = bind(self._module)
            self._give_owners(self._binding, range(len(self.param_groups)))
        return self._binding

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _give_owners(self, binding: Binding, groups: Sequence[int]) -> None:
        self._agree(binding)
        by_rank: list[list[torch.Tensor]] = [[] for _ in range(binding.ranks)]
        group_of = {p: index for index in groups for p in self.param_groups[index]["params"]}
        for index in groups:
            orthogonalizes = issubclass(self._entries[self._entry_of_group[index]][0], torch.optim.Muon)
            # What is frozen costs nothing now, so it is given away last.
            parameters = sorted(self.param_groups[index]["params"], key=lambda p: not p.requires_grad)
            owners = layout.owners([layout.work(p, orthogonalizes) for p in parameters], binding.loads)
            self._owners.update(zip(parameters, owners))
        for parameter in group_of:
            by_rank[self._owners[parameter]].append(parameter)
        cut = layout.pieces([[p.nbytes for p in theirs] for theirs in by_rank])
        last = {group_of[by_rank[binding.rank][i]]: k for k, piece in enumerate(cut) for i in piece[binding.rank]}
        for number, places in enumerate(cut):
            piece = [[theirs[i] for i in run] for theirs, run in zip(by_rank, places)]
            mine: dict[int, dict[int, list[torch.Tensor]]] = {}  # by entry, by group
            for parameter in piece[binding.rank]:
                index = group_of[parameter]
                mine.setdefault(self._entry_of_group[index], {}).setdefault(index, []).append(parameter)
            ends = {index for index in last if last[index] == number}
            self._pieces.append(piece)
            self._steppers.append([_Stepper(self, entry, theirs, ends) for entry, theirs in mine.items()])
        self._known = [id(p) for p in self._parameters()]
        self._has_state = self._has_state or bool(self.state)
        self._whole = None

    def _agree(self, binding: Binding) -> None:
        """Raises on every rank if the ranks' parameters differ, and on this one if no wrapper averages them."""
        facts = [
            f"group {index}, optimizers[{self._entry_of_group[index]}], {tuple(p.shape)} {p.dtype}"
            + (", trains" if p.requires_grad else ", frozen")
            for index, group in enumerate(self.param_groups)
            for p in group["params"]
        ]
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest()
        with binding.collective():
            if len(set(binding.everyone(digest))) > 1:
                rows = itertools.zip_longest(*binding.everyone(facts), fillvalue="no more parameters")
                differing = next(row for row in rows if len(set(row)) > 1)
                raise ValueError(
                    "minddp.Owned: the ranks' parameters differ, so they would not agree on owners:\n"
                    + indented([f"rank {rank}: {fact}" for rank, fact in enumerate(differing)])
                    + "\nPass the same groups, in the same order, with the same parameters frozen, on every rank."
                )
        binding.report(lambda: binding.check_averaged([p for p in self._parameters() if p.requires_grad]))

    def add_param_group(self, param_group: Group, entry: int | None = None) -> None:
        """Adds a group. Collective, once there is a wrapper.

        Args:
            param_group: as torch's; ``params`` and settings.
            entry: which of ``optimizers`` steps it; needed if there are several.
        """
        if len(self.param_groups) < len(self._entry_of_group):  # the constructor's, whose entry is known
            return super().add_param_group(param_group)
        entry = 0 if entry is None and len(self._entries) == 1 else entry
        if entry is None or entry not in range(len(self._entries)):
            raise ValueError(
                f"minddp.Owned.add_param_group: entry must say which of the optimizers steps the group, 0 to "
                f"{len(self._entries) - 1}, got {entry!r}"
            )
        (made,) = self._make(entry, [param_group]).param_groups  # checked as the class checks it
        defaults, self.defaults = self.defaults, {}  # the group has its own optimizer's
        try:
            super().add_param_group(made)
        finally:
            self.defaults = defaults
        self._entry_of_group.append(entry)
        if self._binding is not None:
            self._give_owners(self._binding, [len(self.param_groups) - 1])

    # --- steps ---

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's parameters and makes all parameters whole on all ranks. Collective.

        Args:
            closure: called once, before the step; its result is returned.

        Raises:
            RuntimeError: gradients are this rank's alone (a backward under ``no_sync()``), or no wrapper averages
                them; or an optimizer keeps state that belongs to no parameter.
            LostPeer: another rank has failed, or is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        binding = self._bind()
        binding.follow(self._module)
        self._sent.update(map(id, binding.reduced))  # the same on all ranks, also if one of them freezes some
        binding.report(lambda: self._check(binding))
        self._whole, self._has_state = None, True
        if (failed := binding.report(lambda: self._step_and_send(binding))) is not None:
            raise failed
        return loss

    def _step_and_send(self, binding: Binding) -> Exception | None:
        """Returns what a parameter's step has raised: all is sent first, or the ranks would no longer be in step."""
        failed: Exception | None = None
        exchange = None if binding.group is None or binding.ranks == 1 else Exchange(binding.group)
        with torch.no_grad(), binding.collective():
            for piece, steppers in zip(self._pieces, self._steppers):
                for stepper in steppers:
                    try:
                        stepper.step()
                    except Exception as error:
                        failed = failed or error
                if exchange is not None:
                    exchange.send([[p for p in theirs if id(p) in self._sent] for theirs in piece])
            if exchange is not None:
                exchange.finish()
        if isinstance(self.state, states.Share):
            self.state.elsewhere = exchange is not None
        if failed is None and (more := [repr(key) for key in self.state if not isinstance(key, torch.Tensor)]):
            failed = RuntimeError(
                f"minddp.Owned.step() on rank {binding.rank}: an optimizer keeps state that belongs to no parameter "
                f"({', '.join(more[:10])}), and each owner would have another one. Use the optimizer itself."
            )
        return failed

    def _check(self, binding: Binding) -> None:
        binding.check_synchronized()
        where, parameters = f"minddp.Owned.step() on rank {binding.rank}:", self._parameters()
        if [id(p) for p in parameters] != self._known:
            raise RuntimeError(
                f"{where} param_groups has other parameters than the ranks agreed on. Add parameters by "
                "add_param_group(), on every rank; to leave some out, make a new Owned."
            )
        mine = (p for p in parameters if binding.ranks > 1 and self._is_mine(p))
        if left := [str(tuple(p.shape)) for p in mine if p.grad is not None and id(p) not in self._sent]:
            raise RuntimeError(
                f"{where} {len(left)} parameters have a gradient that the wrapper does not average, of shapes "
                f"{', '.join(left[:10])}. After unfreezing, call minddp.refresh(ddp) on every rank."
            )

    # --- states ---

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gathers all ranks' states on one rank, or on all, on the host. Collective; the others keep none of it.

        Until a rank's next step or edit of ``state``, :meth:`state_dict` on that rank is what the plain optimizer
        would give. An edit of other ranks' states alone cannot be seen there: consolidate after edits.

        Args:
            to: the rank, in the wrapper's process group; None: all ranks.

        Raises:
            ValueError: there is no such rank.
            RuntimeError: an optimizer class has a ``state_dict()`` of its own.
            TypeError: a state holds what is not sent: no tensor, number, text or container of these.
        """
        binding = self._bind()
        if to is not None and (not isinstance(to, int) or not 0 <= to < binding.ranks):
            raise ValueError(
                f"minddp.Owned.consolidate_state_dict: to must be a rank, 0 to {binding.ranks - 1}, or None for all "
                f"ranks, got {to!r}"
            )
        mine = binding.report(lambda: states.packed(self._own_part()))
        with binding.collective():
            everyone = states.gather(mine, binding.group, to)
        state = {number: values for theirs in everyone for number, values in theirs["state"].items()}
        gathered = {p: state[n] for n, p in enumerate(self._parameters()) if n in state}
        self._whole = states.Whole(gathered, self.state) if everyone else None
        for index, group in (item for theirs in everyone for item in theirs["groups"].items()):
            if not any(map(self._is_mine, self.param_groups[index]["params"])):  # then nothing has counted in it here
                self.param_groups[index].update(group)

    def _is_mine(self, parameter: torch.Tensor) -> bool:
        return self._binding is not None and self._owners[parameter] == self._binding.rank

    def _own_part(self) -> dict[str, Any]:
        """What this rank has of the state: by a parameter's number, and by a group's."""
        for kind, _ in self._entries:
            if kind.state_dict is not torch.optim.Optimizer.state_dict:
                raise RuntimeError(
                    f"minddp.Owned: {kind.__name__} has a state_dict() of its own, so nobody knows what all ranks' "
                    "would be. Use the optimizer itself where you save."
                )
        own = {i: _settings(g) for i, g in enumerate(self.param_groups) if any(map(self._is_mine, g["params"]))}
        groups = {  # a program's learning rates may be numpy's, which torch.load does not read
            i: {name: v.item() if isinstance(v, numpy.generic) else v for name, v in g.items()}
            for i, g in own.items()
        }
        mine = {n: self.state[p] for n, p in enumerate(self._parameters()) if self._is_mine(p) and p in self.state}
        return {"state": mine, "groups": groups}

    def state_dict(self) -> dict[str, Any]:
        """What the plain optimizer would give.

        Of several it is what one with all their groups would give, and in it ``"optimizers"``, what each would give.

        Raises:
            RuntimeError: states are on several ranks, and :meth:`consolidate_state_dict` has not gathered them on
                this one since the last step, or since this rank's were edited. It never waits for another rank.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state: Any = self.state
        if self._has_state and self._binding is not None and self._binding.ranks > 1:
            if self._whole is None or self._whole.is_stale(state, self._is_mine):
                raise RuntimeError(
                    f"minddp.Owned.state_dict() on rank {self._binding.rank}: each rank has the states of its own "
                    "parameters. Call opt.consolidate_state_dict(to=rank) on every rank first, after the last step "
                    "and the last edit of opt.state; then state_dict() on that rank. With to=None all ranks have it."
                )
            state = self._whole.gathered
        answer = _packed(self.param_groups, state)
        if len(self._entries) > 1:
            answer["optimizers"] = [_packed(groups, state) for groups in self._by_entry(self.param_groups)]
        for after in self._optimizer_state_dict_post_hooks.values():
            answer = after(self, answer) or answer
        return answer

    def _by_entry(self, groups: Sequence[Group]) -> list[list[Group]]:
        entries = range(len(self._entries))
        return [[g for g, of in zip(groups, self._entry_of_group) if of == entry] for entry in entries]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what the plain optimizer gave, or :meth:`state_dict`; each rank keeps its own parameters' states.

        Of several plain optimizers it takes ``{"optimizers": [the first's, the second's, ...]}``. Not a collective,
        once there is a wrapper: call it on every rank, with the same dictionary.

        Raises:
            TypeError: it is no such dictionary.
            ValueError: it has other optimizers, other groups, or groups of another size.
            RuntimeError: it has states, and no wrapper says yet which rank owns which parameter.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        given = state_dict.get("optimizers") if isinstance(state_dict, Mapping) else None
        parts = [state_dict] if given is None else given
        if not (isinstance(parts, (list, tuple)) and all(map(_is_packed, parts))):
            raise TypeError(
                "minddp.Owned.load_state_dict: state_dict must be what an optimizer's state_dict() returns, "
                '{"state": ..., "param_groups": [...]}, or {"optimizers": [...]} of such dictionaries, got '
                f"{state_dict!r:.200}"
            )
        own = self._by_entry(self.param_groups)
        if given is None:
            by_entry = self._by_entry(state_dict["param_groups"])
            given = [{"state": state_dict["state"], "param_groups": groups} for groups in by_entry]
        sizes = [[len(group["params"]) for group in part["param_groups"]] for part in given]
        if sizes != (here := [[len(group["params"]) for group in groups] for groups in own]):
            raise ValueError(
                f"minddp.Owned.load_state_dict: by optimizer, state_dict has groups of {sizes} parameters, and this "
                f"one groups of {here}"
            )
        if any(part["state"] for part in given):
            self._bind()
            self._has_state = True
        loaded, made = states.Share(dict), []
        for entry, (part, groups) in enumerate(zip(given, own)):
            plain = self._make(entry, [dict(group) for group in groups])
            numbers = {
                n: p for old, g in zip(part["param_groups"], groups) for n, p in zip(old["params"], g["params"])
            }
            mine = {n: part["state"][n] for n, p in numbers.items() if n in part["state"] and self._is_mine(p)}
            plain.load_state_dict({**part, "state": mine})  # which casts it: never more than what this rank keeps
            loaded.update(plain.state)
            made.append(iter(plain.param_groups))
        loaded.elsewhere = self._has_state
        self.state, self.param_groups = loaded, [next(made[entry]) for entry in self._entry_of_group]
        self._whole = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "minddp.Owned cannot be pickled or copied: it belongs to a wrapper, and each rank has a part of it. Save "
            "state_dict() after consolidate_state_dict(), and load it into a new one."
        )


def _packed(groups: list[Group], state: Any) -> dict[str, Any]:
    """As ``torch.optim.Optimizer.state_dict``."""
    numbers = {p: number for number, p in enumerate(p for group in groups for p in group["params"])}
    return {
        "state": {number: state[p] for p, number in numbers.items() if p in state},
        "param_groups": [{**group, "params": [numbers[p] for p in group["params"]]} for group in groups],
    }


def _is_packed(part: Any) -> bool:
    """Whether it is what :func:`_packed` makes, or another optimizer's ``state_dict()``."""
    if not (isinstance(part, Mapping) and isinstance(part.get("state"), Mapping)):
        return False
    groups = part.get("param_groups")
    return isinstance(groups, (list, tuple)) and all(isinstance(g, Mapping) and "params" in g for g in groups)


def _plain(where: str, entry: Any) -> torch.optim.Optimizer:
    """The optimizer that an entry describes."""
    if not isinstance(entry, (tuple, list)) or len(entry) != 3:
        raise TypeError(f"{where} must be (params, optimizer class, keyword arguments), got {entry!r}")
    params, kind, settings = entry
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or issubclass(kind, Owned):
        raise TypeError(f"{where}: {kind!r} is no optimizer class of one rank (a subclass of torch.optim.Optimizer)")
    if not isinstance(settings, dict):
        raise TypeError(f"{where}: keyword arguments must be a dict, got {settings!r}")
    wanted = list(inspect.signature(kind.step).parameters.values())[1:]
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in wanted):
        raise ValueError(
            f"{where}: {kind.__name__}.step() needs a closure, which it calls several times with parameters that no "
            "rank has whole in between. Use this optimizer itself, on every rank."
        )
    try:
        return kind(params, **settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {kind.__name__} does not take its params or arguments: {error}") from error
