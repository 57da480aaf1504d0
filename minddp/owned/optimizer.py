"""The class :class:`Owned`."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..messages import indented
from . import layout, states
from .binding import Binding, bind
from .exchange import Exchange

Entry = tuple[Any, type[torch.optim.Optimizer], dict[str, Any]]
_BY_PARAMETER = ("params", "param_names")  # entries of a group; all others are settings and counters
_OF_SCALER = ("grad_scale", "found_inf")  # a GradScaler sets them on the optimizer for the time of a step


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings and counters; tensors and containers among them are copied, since a step may count there."""
    kept = {name: value for name, value in group.items() if name not in _BY_PARAMETER}
    tensor = torch.Tensor
    return {name: v.clone() if isinstance(v, tensor) else copy.deepcopy(v) for name, v in kept.items()}


class _Stepper:
    """An optimizer of the program's class over the parameters of one piece that this rank owns.

    Each is stepped once a step, as the plain one is, so whatever counts steps counts the same.
    """

    def __init__(self, owned: Owned, entry: int, mine: dict[int, list[torch.Tensor]]):
        self._owned = owned
        self._mine = mine  # by the group's index
        groups = [{**_settings(owned.param_groups[g]), "params": parameters} for g, parameters in mine.items()]
        _, kind, settings = owned._entries[entry]
        self._optimizer = kind(groups, **settings)

    def show(self) -> None:
        """The program sees the parameters' states, and what the step has counted in its groups."""
        self._owned.state.update({p: s for p, s in self._optimizer.state.items() if isinstance(p, torch.Tensor)})
        for group, index in zip(self._optimizer.param_groups, self._mine):
            shown = self._owned.param_groups[index]
            for name, value in _settings(group).items():
                if isinstance(value, torch.Tensor) and isinstance(shown.get(name), torch.Tensor):
                    shown[name].copy_(value)
                else:
                    shown[name] = value

    def states(self) -> dict[torch.Tensor, Any]:
        """By parameter.

        Raises:
            RuntimeError: the optimizer keeps more, which belongs to no parameter.
        """
        kind, state = type(self._optimizer), self._optimizer.state
        more = [repr(key) for key in state if not isinstance(key, torch.Tensor)]
        if more or kind.state_dict is not torch.optim.Optimizer.state_dict:
            raise RuntimeError(
                f"minddp.Owned: {kind.__name__} keeps state that belongs to no parameter"
                + (f" ({', '.join(more)})" if more else " (it has a state_dict() of its own)")
                + ", so no dictionary of all ranks can be made of it. Use the optimizer itself where you save."
            )
        return dict(state)

    def step(self) -> None:
        """Steps with the settings that the program sees, and may have changed."""
        owned, optimizer = self._owned, self._optimizer
        for group, index in zip(optimizer.param_groups, self._mine):
            group.update(_settings(owned.param_groups[index]))
        scaler = {name: getattr(owned, name) for name in _OF_SCALER if hasattr(owned, name)}
        vars(optimizer).update(scaler)
        step: Any = type(optimizer).step
        try:
            # torch's hooks for all optimizers run once, around Owned.step; this is the function that they surround.
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
        finally:
            for name in scaler:
                delattr(optimizer, name)

    def load(self, loaded: dict[torch.Tensor, Any]) -> None:
        """Takes its parameters' part of ``loaded``, cast as the optimizer casts what it loads."""
        parameters = [p for theirs in self._mine.values() for p in theirs]
        numbers = {p: number for number, p in enumerate(parameters)}
        groups = [
            {**_settings(self._owned.param_groups[g]), "params": [numbers[p] for p in theirs]}
            for g, theirs in self._mine.items()
        ]
        state = {numbers[p]: loaded[p] for p in parameters if p in loaded}
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.show()


class Owned(torch.optim.Optimizer):
    """Optimizers of which each rank keeps and computes its own share, whole parameters at a time.

    ``step()`` is a collective: every rank calls it, equally often. It steps this rank's parameters, sends their new
    values while the next are stepped, and returns when all parameters are whole on all ranks, with the bits that the
    plain optimizers give::

        muon, adamw = (matrices, torch.optim.Muon, dict(lr=0.02)), (others, torch.optim.AdamW, dict(lr=3e-4))
        opt = minddp.Owned(ddp, [muon, adamw])

    Gradients must be averaged when ``step()`` is called. ``state`` has this rank's parameters alone; ``state_dict()``
    needs :meth:`consolidate_state_dict` before it. The state of a rank that is lost is lost: go on from a checkpoint.

    Args:
        ddp: a :class:`minddp.DistributedDataParallel`; or a module that is wrapped in one before the first step, as
            trainers do that make the optimizer first. A program of one process sends nothing.
        optimizers: ``(params, optimizer class, keyword arguments)``, with ``params`` as the class takes them. A class
            fits if its update of a parameter depends on that parameter, its gradient and its state alone.

    Raises:
        TypeError, ValueError: an entry makes no sense; an optimizer needs a closure; a parameter trains and the
            wrapper does not average it; the ranks' parameters differ (on every rank).
    """

    def __init__(self, ddp: torch.nn.Module, optimizers: Sequence[Entry]):
        if not isinstance(ddp, torch.nn.Module):
            raise TypeError(f"minddp.Owned: ddp must be a wrapper or a module, got {type(ddp).__name__}")
        self._entries = [_checked(position, entry) for position, entry in enumerate(optimizers)]
        if not self._entries:
            raise ValueError("minddp.Owned: optimizers is empty: pass (params, optimizer class, keyword arguments)")
        self._module = ddp
        self._binding: Binding | None = None
        self._owners: dict[torch.Tensor, int] = {}
        self._pieces: list[list[list[torch.Tensor]]] = []  # for each piece, for each rank, parameters
        self._steppers: list[list[_Stepper]] = []  # for each piece, this rank's
        self._known: list[int] = []  # `id` of each parameter that has an owner
        self._exchange: Exchange | None = None
        self._reduced: Any = None  # the parameters that the wrapper reduced when the exchange was made
        self._sent: set[int] = set()  # `id` of each parameter whose values are sent
        self._consolidated: dict[torch.Tensor, Any] | None = None  # all ranks' states
        self._has_state = False  # some rank may have states
        plain = [kind(params, **settings) for params, kind, settings in self._entries]
        self._step_supports_amp_scaling = all(getattr(p, "_step_supports_amp_scaling", False) for p in plain)
        self._entry_of_group = [entry for entry, optimizer in enumerate(plain) for _ in optimizer.param_groups]
        # Groups have their own optimizer's defaults already; schedulers look for a momentum in the first one's.
        super().__init__([group for optimizer in plain for group in optimizer.param_groups], {})
        self.defaults = dict(plain[0].defaults)
        if isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
            self._bind()

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
        group_of: dict[torch.Tensor, int] = {}
        for index in groups:
            orthogonalizes = issubclass(self._entries[self._entry_of_group[index]][1], torch.optim.Muon)
            # What is frozen costs nothing now, so it is given away last.
            parameters = sorted(self.param_groups[index]["params"], key=lambda p: not p.requires_grad)
            owners = layout.owners([layout.work(p, orthogonalizes) for p in parameters], binding.loads)
            self._owners.update(zip(parameters, owners))
            for parameter in self.param_groups[index]["params"]:
                group_of[parameter] = index
                by_rank[self._owners[parameter]].append(parameter)
        for ranges in layout.pieces([[layout.nbytes(p) for p in theirs] for theirs in by_rank]):
            piece = [[theirs[i] for i in run] for theirs, run in zip(by_rank, ranges)]
            mine: dict[int, dict[int, list[torch.Tensor]]] = {}  # by entry, by group
            for parameter in piece[binding.rank]:
                index = group_of[parameter]
                mine.setdefault(self._entry_of_group[index], {}).setdefault(index, []).append(parameter)
            self._pieces.append(piece)
            self._steppers.append([_Stepper(self, entry, theirs) for entry, theirs in mine.items()])
            for stepper in self._steppers[-1]:
                stepper.show()
        self._known = [id(p) for p in self._parameters()]
        self._has_state = self._has_state or bool(self.state)
        self._consolidated = self._reduced = None

    def _agree(self, binding: Binding) -> None:
        """Raises on every rank if the ranks' parameters differ, and on this one if no wrapper averages them."""
        facts = [
            [index, self._entry_of_group[index], str(tuple(p.shape)), str(p.dtype), p.requires_grad]
            for index, group in enumerate(self.param_groups)
            for p in group["params"]
        ]
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest()
        with binding.collective():
            if len(set(binding.everyone(digest))) > 1:
                raise ValueError(_difference(binding.everyone(facts)))
        binding.report(lambda: binding.check_averaged([p for p in self._parameters() if p.requires_grad]))

    def add_param_group(self, param_group: dict[str, Any], entry: int | None = None) -> None:
        """Adds a group. Collective, once there is a wrapper.

        Args:
            param_group: as torch's; ``params`` and settings.
            entry: which of ``optimizers`` steps it; needed if there are several.
        """
        if len(self.param_groups) < len(self._entry_of_group):  # the constructor's, whose entry is known
            super().add_param_group(param_group)
            return
        entry = 0 if entry is None and len(self._entries) == 1 else entry
        if entry is None or not 0 <= entry < len(self._entries):
            raise ValueError(
                f"minddp.Owned.add_param_group: entry must say which of the optimizers steps the group, 0 to "
                f"{len(self._entries) - 1}, got {entry!r}"
            )
        _, kind, settings = self._entries[entry]
        (made,) = kind([param_group], **settings).param_groups  # checked as the class checks it
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
                them.
            LostPeer: another rank has failed, or is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        binding = self._bind()
        binding.follow(self._module)
        exchange = self._exchange_of_now(binding)
        binding.report(lambda: self._check(binding))
        self._consolidated, self._has_state = None, True
        try:
            failed = binding.report(lambda: self._step_and_send(binding, exchange))
        except BaseException:  # Ctrl-C, or a lost rank: what is under way may still write to the exchange's memory
            self._exchange = self._reduced = None
            raise
        if failed is not None:
            raise failed
        return loss

    def _step_and_send(self, binding: Binding, exchange: Exchange | None) -> Exception | None:
        """Returns what a parameter's step has raised: all is sent first, or the ranks would no longer be in step."""
        failed: Exception | None = None
        with torch.no_grad(), binding.collective():
            for index, steppers in enumerate(self._steppers):
                for stepper in steppers:
                    try:
                        stepper.step()
                    except Exception as error:
                        failed = failed or error
                if exchange is not None:
                    exchange.send(index)
            if exchange is not None:
                exchange.finish()
            for stepper in (stepper for steppers in self._steppers for stepper in steppers):
                stepper.show()
        return failed

    def _check(self, binding: Binding) -> None:
        binding.check_synchronized()
        parameters = self._parameters()
        if [id(p) for p in parameters] != self._known:
            raise RuntimeError(
                f"minddp.Owned.step() on rank {binding.rank}: param_groups has other parameters than the ranks "
                "agreed on. Add parameters by add_param_group(), on every rank; to leave some out, make a new Owned."
            )
        if binding.ranks > 1:
            mine = [p for p in parameters if self._owners[p] == binding.rank and id(p) not in self._sent]
            if left := [str(tuple(p.shape)) for p in mine if p.grad is not None]:
                raise RuntimeError(
                    f"minddp.Owned.step() on rank {binding.rank}: {len(left)} parameters have a gradient that "
                    f"the wrapper does not average, of shapes {', '.join(left[:10])}. After unfreezing, call "
                    "minddp.refresh(ddp) on every rank."
                )

    def _exchange_of_now(self, binding: Binding) -> Exchange | None:
        """Sends what the wrapper reduces or has reduced: the same on all ranks, also if one of them freezes some."""
        if binding.group is None or binding.ranks == 1 or binding.reduced is self._reduced:
            return self._exchange
        self._reduced = binding.reduced
        self._sent |= {id(p) for p in self._reduced}
        sent = [[[p for p in theirs if id(p) in self._sent] for theirs in piece] for piece in self._pieces]
        self._exchange = Exchange(sent, binding.group)
        return self._exchange

    # --- states ---

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers all ranks' states on one rank, on the host. Collective; the others keep none of it.

        Until the next step, :meth:`state_dict` on that rank is what the plain optimizer would give.

        Args:
            to: the rank, in the wrapper's process group.
        """
        binding = self._bind()
        if not isinstance(to, int) or not 0 <= to < binding.ranks:
            raise ValueError(
                f"minddp.Owned.consolidate_state_dict: to must be a rank, 0 to {binding.ranks - 1}, got {to!r}"
            )
        mine = binding.report(lambda: self._own_part(binding))
        with binding.collective():
            everyone = states.gather(mine, binding.group, to)
        self._consolidated = None
        if everyone is not None:
            state = {number: values for theirs in everyone for number, values in theirs["state"].items()}
            self._consolidated = {p: state[n] for n, p in enumerate(self._parameters()) if n in state}
            for theirs in everyone:  # what is counted in a group of which this rank owns nothing
                for index, group in theirs["groups"].items():
                    if index not in mine["groups"]:
                        self.param_groups[index].update(group)

    def _own_part(self, binding: Binding) -> dict[str, Any]:
        """What this rank has of the state, on the host: by a parameter's number, and by a group's."""
        numbers = {parameter: number for number, parameter in enumerate(self._parameters())}
        found = [stepper.states() for steppers in self._steppers for stepper in steppers]
        groups = {
            index: _settings(group)
            for index, group in enumerate(self.param_groups)
            if any(self._owners[p] == binding.rank for p in group["params"])
        }
        state = {numbers[p]: values for theirs in found for p, values in theirs.items()}
        mine: dict[str, Any] = states.to_host({"state": state, "groups": groups})
        return mine

    def _plain(self, state: Any) -> list[dict[str, Any]]:
        """The plain optimizers' dictionaries, of states by parameter and the groups as they are now."""
        made: list[dict[str, Any]] = [{"state": {}, "param_groups": []} for _ in self._entries]
        for index, group in enumerate(self.param_groups):
            into = made[self._entry_of_group[index]]
            first = sum(len(earlier["params"]) for earlier in into["param_groups"])
            numbers = range(first, first + len(group["params"]))
            named = {"param_names": group["param_names"]} if "param_names" in group else {}
            into["param_groups"].append({**_settings(group), **named, "params": list(numbers)})
            into["state"].update({n: state[p] for n, p in zip(numbers, group["params"]) if p in state})
        return made

    def state_dict(self) -> dict[str, Any]:
        """What the plain optimizer would give; of several, ``{"optimizers": [the first's, the second's, ...]}``.

        Raises:
            RuntimeError: states are on several ranks, and :meth:`consolidate_state_dict` has not gathered them on
                this one since the last step. It never waits for another rank.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._consolidated is None and self._has_state and self._binding is not None and self._binding.ranks > 1:
            raise RuntimeError(
                f"minddp.Owned.state_dict() on rank {self._binding.rank}: each rank has the states of its own "
                "parameters. Call opt.consolidate_state_dict(to=rank) on every rank first, after the last step; then "
                "state_dict() on that rank."
            )
        several = self._plain(self.state if self._consolidated is None else self._consolidated)
        answer = several[0] if len(several) == 1 else {"optimizers": several}
        for after in self._optimizer_state_dict_post_hooks.values():
            answer = after(self, answer) or answer
        return answer

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what the plain optimizer gave, or :meth:`state_dict`; each rank keeps its own parameters' states.

        Not a collective, once there is a wrapper: call it on every rank, with the same dictionary.

        Raises:
            ValueError: it has other optimizers, other groups, or groups of another size.
            RuntimeError: it has states, and no wrapper says yet which rank owns which parameter.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        several = state_dict.get("optimizers", [state_dict])
        sizes = [[len(group["params"]) for group in theirs["param_groups"]] for theirs in several]
        own = [[len(group["params"]) for group in theirs["param_groups"]] for theirs in self._plain({})]
        if sizes != own:
            raise ValueError(
                f"minddp.Owned.load_state_dict: by optimizer, state_dict has groups of {sizes} parameters, and this "
                f"one groups of {own}"
            )
        loaded: dict[torch.Tensor, Any] = {}
        left = [iter(theirs["param_groups"]) for theirs in several]
        for entry, group in zip(self._entry_of_group, self.param_groups):
            given = next(left[entry])
            group.update(copy.deepcopy({k: v for k, v in given.items() if k not in _BY_PARAMETER}))
            state = several[entry]["state"]
            loaded.update({p: state[n] for p, n in zip(group["params"], given["params"]) if n in state})
        if loaded:
            self._bind()
            self._has_state = True
        self._consolidated = None
        self.state.clear()
        for stepper in (stepper for steppers in self._steppers for stepper in steppers):
            stepper.load(loaded)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "minddp.Owned cannot be pickled or copied: it belongs to a wrapper, and each rank has a part of it. Save "
            "state_dict() after consolidate_state_dict(), and load it into a new one."
        )


def _checked(position: int, entry: Any) -> Entry:
    where = f"minddp.Owned: optimizers[{position}]"
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
    return params, kind, dict(settings)


def _difference(everyone: Sequence[Sequence[Any]]) -> str:
    lines = [f"rank {rank}: {len(theirs)} parameters" for rank, theirs in enumerate(everyone)]
    for facts in zip(*everyone):
        if any(theirs != facts[0] for theirs in facts):
            lines = [
                f"rank {rank}: group {group}, optimizers[{entry}], {shape} {dtype}{'' if trains else ', frozen'}"
                for rank, (group, entry, shape, dtype, trains) in enumerate(facts)
            ]
            break
    return (
        "minddp.Owned: the ranks' parameters differ, so they would not agree on owners:\n"
        f"{indented(lines)}\nPass the same groups, in the same order, with the same parameters frozen, on every rank."
    )
