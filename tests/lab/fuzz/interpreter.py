"""Runs one program on this rank with a given class and records what it sees.

What always holds: the two classes get models from the same seed, the same data and the same steps; what is
recorded depends on the class under test only. An observation is ``(step, label, value)``; ``value`` is ``None``, a
number array, or text. ``Planned`` is caught, as the program says; any other exception ends the program on this rank.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import pickle
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from . import own
from .nets import Net, Planned, head_of
from .program import Program

_CLASSES = {"torch": "torch.nn.parallel:DistributedDataParallel", "minddp": "minddp:DistributedDataParallel"}

__all__ = ["run_program"]

Arguments = dict[str, Any]  # of a step


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return tensor.clone().numpy()


def _plain_hook(group: Any, bucket: Any) -> Any:
    """An all_reduce with a ``then``, as users write it."""
    group = group if group is not None else dist.group.WORLD
    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


_HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "python": _plain_hook,
}


class Run:
    """One program on one rank, whose groups wait ``wait_for``.

    ``apart`` gives every wrapper and the collectives of the nets groups of their own.

    A verb's method returns False where the step was skipped, since a variable that it names does not exist.
    """

    def __init__(self, program: Program, ddp_class: Any, rank: int, apart: bool, wait_for: timedelta):
        self.program, self.ddp_class, self.rank, self.apart, self.wait_for = program, ddp_class, rank, apart, wait_for
        self.observations: list[tuple[int, str, Any]] = []
        self.groups: list[Any] = []
        self.handles: list[Any] = []
        self.kept: list[Any] = []
        self.vars: dict[str, Any] = {}
        self.inputs: dict[str, torch.Tensor] = {}
        self.wrappers: list[Any] = []
        self.optimizers: list[Any] = []
        self.nets: list[Net] = []
        self.at = -1

    # --- what is recorded ------------------------------------------------------------------------------

    def note(self, label: str, value: Any) -> None:
        self.observations.append((self.at, label, _array(value) if isinstance(value, torch.Tensor) else value))

    def _note_grads(self) -> None:
        seen = set()
        for i, ddp in enumerate(self.wrappers):
            for name, p in torch.nn.Module.named_parameters(ddp.module):
                if id(p) not in seen:
                    seen.add(id(p))
                    self.note(f"net{i}.{name}.grad", p.grad)

    def _note_state(self) -> None:
        for i, ddp in enumerate(self.wrappers):
            for name, p in torch.nn.Module.named_parameters(ddp.module):
                self.note(f"net{i}.{name}", p)
            for name, buffer in ddp.module.named_buffers():
                self.note(f"buffer net{i}.{name}", buffer)

    # --- the run ---------------------------------------------------------------------------------------

    def run(self) -> None:
        program = self.program
        # What a module hides torch's class averages, and does not broadcast.
        same_start = any(net.get("tells") == "hides" for net in program["nets"])
        same_start |= any(wrapper["args"].get("init_sync") is False for wrapper in program["wrappers"])
        torch.manual_seed(program["seed"] + (0 if same_start else self.rank))
        for net in program["nets"]:
            self.nets.append(Net(net, self.nets))
        if self.apart:
            group = self._new_group()
            for net in self.nets:
                net.group = group
        for net, wrapper in zip(self.nets, program["wrappers"]):
            self.wrappers.append(self._wrap(net, wrapper["args"], wrapper.get("own")))
        self.optimizers = [self._optimizer(spec) for spec in program["optimizers"]]
        torch.manual_seed(program["seed"] + 17 * self.rank)
        for self.at, (verb, a) in enumerate(program["steps"]):
            if self.rank not in a.get("ranks", [self.rank]):
                continue
            try:
                done = getattr(self, "do_" + verb)(a)
            except Planned as planned:
                done = True
                self.note("caught", str(planned))
            if done is not False:
                self._note_grads()
                if verb in ("step", "join", "state_dict", "rewrap", "deepcopy", "pickle"):
                    self._note_state()

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        for name in ("vars", "inputs", "wrappers", "optimizers", "kept", "nets", "handles"):
            getattr(self, name).clear()

    def _new_group(self) -> Any:
        everyone = list(range(self.program["world"]))
        self.groups.append(dist.new_group(everyone, timeout=self.wait_for))
        return self.groups[-1]

    def _wrap(self, net: Any, arguments: dict[str, Any], kind: str | None = None) -> Any:
        arguments = dict(arguments)
        if arguments.pop("process_group", None) == "own" or self.apart:
            arguments["process_group"] = self._new_group()
        if "lazy_bucket_allocation" not in inspect.signature(self.ddp_class).parameters:
            arguments.pop("lazy_bucket_allocation", None)
        return (self.ddp_class if kind is None else own.subclass(self.ddp_class, kind))(net, **arguments)

    def _optimizer(self, spec: dict[str, Any]) -> Any:
        parameters = list({id(p): p for w in spec["of"] for p in self.wrappers[w].parameters()}.values())
        if spec["kind"] == "adam":
            return torch.optim.Adam(parameters, lr=0.01, eps=1e-2, foreach=False)
        return torch.optim.SGD(parameters, lr=0.05)

    def _ddp(self, a: Arguments) -> Any:
        return self.wrappers[a.get("w", 0)]

    def _x(self, batch: int = 2, salt: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.program["seed"] + 10 * (self.at + salt) + self.rank)
        return torch.randn(batch, 4, generator=generator)

    # --- forward and loss ------------------------------------------------------------------------------

    def do_forward(self, a: Arguments) -> Any:
        ddp = self._ddp(a)
        source = a.get("input", "x")
        if source != "x" and source not in self.vars:
            return False
        x = self._x(a.get("batch", 2)) if source == "x" else head_of(self.vars[source], "both")
        if a.get("detach"):
            x = x.detach()
        if a.get("xgrad") and x.is_leaf:
            x.requires_grad_()
        ddp.train(not a.get("eval", False))
        with torch.set_grad_enabled(a.get("grad", True)), _no_sync(a, ddp):
            out = self._call(a, ddp, x)
        self.note(a["out"], head_of(out, "both"))
        self.vars[a["out"]], self.inputs[a["out"]] = out, x
        return True

    def _call(self, a: Arguments, ddp: Any, x: torch.Tensor) -> Any:
        keywords = {"rank": self.rank, "fail": a.get("fail", False)}
        via = a.get("via", "ddp")
        if via == "module":
            return ddp.module(x, **keywords)
        if via == "functional":
            named = dict(ddp.named_parameters())
            parameters = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in named.items()}
            return torch.func.functional_call(ddp, parameters, (x,), keywords)
        return ddp(x, **keywords)

    def do_loss(self, a: Arguments) -> Any:
        if not all(name in self.vars for name in a["of"]):
            return False
        if a.get("fail"):
            raise Planned("in loss")
        loss = torch.zeros(())
        for name in a["of"]:
            h = head_of(self.vars[name], self._head(a))
            loss = loss + (h * h).sum() + h.sum()
        self.note(a["out"], loss)
        self.vars[a["out"]], self.inputs[a["out"]] = loss, self.inputs[a["of"][0]]
        return True

    def _head(self, a: Arguments) -> str:
        """Which output a loss is of, on this rank."""
        head = a.get("head", "both")
        return head[self.rank % len(head)] if isinstance(head, list) else head

    def do_penalty(self, a: Arguments) -> Any:
        if a["of"] not in self.vars:
            return False
        total = self.vars.get(a.get("add", ""), torch.zeros(()))
        for g in self.vars[a["of"]]:
            if g is not None:
                total = total + 0.1 * (g * g.conj()).real.sum()
        self.vars[a["out"]] = total
        self.note(a["out"], total)
        return True

    def do_drop(self, a: Arguments) -> None:
        self.vars.pop(a["out"], None)
        self.inputs.pop(a["out"], None)

    # --- backward --------------------------------------------------------------------------------------

    def do_backward(self, a: Arguments) -> Any:
        ddp = self._ddp(a)
        loss = self.vars.get(a["loss"])
        if loss is None or not loss.requires_grad:
            return False
        inputs = self._with_respect_to(a["inputs"], a, ddp) if "inputs" in a else None
        with _no_sync(a, ddp):
            loss.backward(inputs=inputs, **_graph_flags(a))
        if a.get("inputs") == "x":
            self.note("x.grad", self.inputs[a["loss"]].grad)
        return True

    def do_grad(self, a: Arguments) -> Any:
        ddp = self._ddp(a)
        loss = self.vars.get(a["loss"])
        if loss is None or not loss.requires_grad:
            return False
        wrt = self._with_respect_to(a.get("wrt", "x"), a, ddp)
        grads = torch.autograd.grad(loss, wrt, allow_unused=True, **_graph_flags(a))
        for i, grad in enumerate(grads):
            self.note(f"{a['out']}[{i}]", grad)
        self.vars[a["out"]] = grads
        return True

    def _with_respect_to(self, what: str, a: Arguments, ddp: Any) -> list[torch.Tensor]:
        return [self.inputs[a["loss"]]] if what == "x" else [p for p in ddp.parameters() if p.requires_grad]

    def do_jacobian(self, a: Arguments) -> None:
        ddp = self._ddp(a)
        ddp.train(not a.get("eval", False))
        made = torch.autograd.functional.jacobian(lambda x: head_of(ddp(x, rank=self.rank), "a"), self._x())
        self.note("jacobian", made)

    def do_func_grad(self, a: Arguments) -> None:
        ddp = self._ddp(a)
        ddp.eval()
        parameters = {name: p.detach().clone() for name, p in ddp.named_parameters()}
        x = self._x()

        def loss(values: Any) -> torch.Tensor:
            return head_of(torch.func.functional_call(ddp, values, (x,), {"rank": self.rank}), "both").sum()

        for name, grad in torch.func.grad(loss)(parameters).items():
            self.note(f"func_grad {name}", grad)

    # --- gradients and steps ---------------------------------------------------------------------------

    def do_zero(self, a: Arguments) -> None:
        ddp = self._ddp(a)
        ddp.zero_grad(set_to_none=a.get("to_none", True))

    def do_clip(self, a: Arguments) -> None:
        ddp = self._ddp(a)
        self.note("norm", torch.nn.utils.clip_grad_norm_(ddp.parameters(), a["max"]))

    def do_scale_grad(self, a: Arguments) -> None:
        ddp = self._ddp(a)
        for p in ddp.parameters():
            if p.grad is not None:
                p.grad.mul_(a["by"])

    def do_step(self, a: Arguments) -> None:
        self.optimizers[a["opt"]].step()

    def do_join(self, a: Arguments) -> None:
        ddp = self._ddp(a)
        ddp.train()
        opt = self.optimizers[a["opt"]]
        with ddp.join(divide_by_initial_world_size=a.get("divide", True)):
            for batch in range(a["batches"][self.rank]):
                opt.zero_grad()
                h = head_of(ddp(self._x(salt=batch + 1), rank=self.rank), self._head(a))
                (h * h).sum().backward()
                self._note_grads()
                opt.step()

    # --- what is changed on the way --------------------------------------------------------------------

    def _parameter(self, ddp: Any, index: int) -> torch.nn.Parameter:
        parameters = list(ddp.parameters())
        return parameters[index % len(parameters)]

    def do_freeze(self, a: Arguments) -> None:
        ddp = self._ddp(a)
        for p in list(ddp.parameters()) if a["p"] == "all" else [self._parameter(ddp, a["p"])]:
            p.requires_grad_(a.get("value", False))

    def do_hook(self, a: Arguments) -> Any:
        ddp = self._ddp(a)
        p = self._parameter(ddp, a["p"])
        label, calls = f"hook{self.at}", [0]

        def look(*_: Any) -> None:
            calls[0] += 1
            if a.get("fail") == calls[0]:
                raise Planned("in hook")
            for i, other in enumerate(ddp.module.parameters()):
                if a["read"] in ("all", i):
                    self.note(f"{label} reads {i}", other.grad)

        kind = a["kind"]
        if kind == "module":
            self.handles.append(ddp.module.register_full_backward_hook(look))
        elif not p.requires_grad:
            return False
        elif kind == "tensor":
            self.handles.append(p.register_hook(look))
        elif kind == "post_accumulate":
            self.handles.append(p.register_post_accumulate_grad_hook(look))
        else:
            with torch.enable_grad():
                node = p.view_as(p).grad_fn.next_functions[0][0]
            self.kept.append(node)
            self.handles.append(node.register_hook(look))
        return True

    def do_move_grad(self, a: Arguments) -> Any:
        ddp = self._ddp(a)
        p = self._parameter(ddp, a["p"])
        if not p.requires_grad:
            return False
        move = functools.partial(own.move_gradient, a["how"])
        self.handles.append(p.register_post_accumulate_grad_hook(move))
        return True

    def do_unhook(self, a: Arguments) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def do_comm_hook(self, a: Arguments) -> None:
        ddp = self._ddp(a)
        ddp.register_comm_hook(ddp.process_group, _HOOKS[a["hook"]])

    # --- other wrappers --------------------------------------------------------------------------------

    def do_rewrap(self, a: Arguments) -> None:
        ddp = self._ddp(a)
        module = ddp.module
        if a.get("keep"):
            self.kept.append(ddp)
        self.wrappers[a["w"]] = ddp = None  # unless kept, the old one is gone before there is a new one
        self.wrappers[a["w"]] = self._wrap(module, a["args"])

    def do_deepcopy(self, a: Arguments) -> None:
        ddp = self._ddp(a)
        self._replace(a["w"], copy.deepcopy(ddp))

    def do_pickle(self, a: Arguments) -> None:
        ddp = self._ddp(a)
        self._replace(a["w"], pickle.loads(pickle.dumps(ddp)))

    def _replace(self, w: int, ddp: Any) -> None:
        self.wrappers[w] = ddp
        for i, spec in enumerate(self.program["optimizers"]):
            if w in spec["of"]:
                self.optimizers[i] = self._optimizer(spec)

    def do_state_dict(self, a: Arguments) -> None:
        ddp = self._ddp(a)
        state = {name: value.clone() for name, value in ddp.state_dict().items()}
        self.note("keys", " ".join(state))
        ddp.load_state_dict(state)


def _no_sync(a: Arguments, ddp: Any) -> Any:
    return ddp.no_sync() if a.get("sync") is False else contextlib.nullcontext()


def _graph_flags(a: Arguments) -> dict[str, bool]:
    return {name: a.get(name, False) for name in ("retain_graph", "create_graph")}


def run_program(program: Program, name: str, rank: int, apart: bool, wait_for: timedelta) -> dict[str, Any]:
    """``{"observations": [...], "end": "ok" | "raised", "at": step, "error": "Type: first line", "left_over": ...}``.

    ``name``: of a class: ``torch``, ``minddp``, or ``module:attribute``.
    """
    module, attribute = _CLASSES.get(name, name).split(":")
    run = Run(program, getattr(importlib.import_module(module), attribute), rank, apart, wait_for)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, program.get("dtype", "float32")))
    result: dict[str, Any] = {"end": "ok", "at": len(program["steps"]), "error": "", "left_over": ""}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.run()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        result |= {"end": "raised", "at": run.at, "error": f"{type(error).__name__}: {lines[0][:300]}"}
    finally:
        torch.set_default_dtype(usual)
    result["observations"], groups = run.observations, list(run.groups)
    if result["end"] == "ok":
        result["left_over"] = _left_over(program["world"], [None, *groups])
    run.close()
    for group in groups if result["end"] == "ok" else ():
        dist.destroy_process_group(group)
    return result


def _left_over(world: int, groups: list[Any]) -> str:
    """Whether a group still carries a collective of the program: then a known sum comes out wrong, or fails."""
    for group in groups:
        sent = torch.full((3,), 41.0, dtype=torch.float64)
        try:
            dist.all_reduce(sent, group=group)
        except RuntimeError as error:
            return f"a collective of the program was left over: {str(error).splitlines()[0][:200]}"
        if not torch.equal(sent, torch.full((3,), 41.0 * world, dtype=torch.float64)):
            return "a collective of the program was left over: the sum after the program is wrong"
    return ""
