"""Runs one program on this rank with a given class and records what it sees.

What always holds: the two classes get models from the same seed, the same data and the same steps; what is
recorded depends on the class under test only. An observation is ``(step, label, value)``; ``value`` is ``None``, a
number array, or text. ``Planned`` is caught, as the program says; any other exception ends the program on this rank.
"""

from __future__ import annotations

import contextlib
import copy
import functools
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

GROUP_SECONDS = 4  # what a collective waits for its peers

__all__ = ["Run", "class_named", "run_program"]


def class_named(name: str) -> Any:
    """``torch``, ``minddp``, or ``module:attribute``."""
    if name == "torch":
        return torch.nn.parallel.DistributedDataParallel
    if name == "minddp":
        from minddp import DistributedDataParallel

        return DistributedDataParallel
    import importlib

    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _array(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
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
    """One program on one rank. ``apart`` gives every wrapper and the collectives of the nets groups of their own."""

    def __init__(self, program: dict[str, Any], ddp_class: Any, rank: int, apart: bool = False):
        self.program, self.ddp_class, self.rank, self.apart = program, ddp_class, rank, apart
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
        if isinstance(value, torch.Tensor):
            value = _array(value)
        self.observations.append((self.at, label, value))

    def _note_grads(self) -> None:
        seen = set()
        for i, net in enumerate(self._modules()):
            for name, p in torch.nn.Module.named_parameters(net):
                if id(p) not in seen:
                    seen.add(id(p))
                    self.note(f"net{i}.{name}.grad", p.grad)

    def _note_state(self) -> None:
        for i, net in enumerate(self._modules()):
            for name, p in torch.nn.Module.named_parameters(net):
                self.note(f"net{i}.{name}", p)
            for name, buffer in net.named_buffers():
                self.note(f"buffer net{i}.{name}", buffer)

    def _modules(self) -> list[Any]:
        wrapped = {spec["net"]: w for w, spec in enumerate(self.program["wrappers"]) if w < len(self.wrappers)}
        return [self.wrappers[wrapped[i]].module if i in wrapped else net for i, net in enumerate(self.nets)]

    # --- the run ---------------------------------------------------------------------------------------

    def run(self) -> None:
        program = self.program
        # What a module hides torch's class averages, and does not broadcast.
        same_start = any(net.get("tells") == "hides" for net in program["nets"])
        same_start |= any(w.get("args", {}).get("init_sync") is False for w in program["wrappers"])
        torch.manual_seed(program["seed"] + (0 if same_start else self.rank))
        for spec in program["nets"]:
            self.nets.append(Net(spec, self.nets))
        if self.apart:
            group = self._new_group()
            for net in self.nets:
                net.group = group
        for spec in program["wrappers"]:
            self.wrappers.append(self._wrap(self.nets[spec["net"]], spec.get("args", {}), spec.get("own")))
        self._make_optimizers(range(len(program["optimizers"])))
        torch.manual_seed(program["seed"] + 17 * self.rank)
        for self.at, (verb, arguments) in enumerate(program["steps"]):
            if arguments.get("ranks") is not None and self.rank not in arguments["ranks"]:
                continue
            try:
                done = getattr(self, "do_" + verb)(arguments)
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
        self.groups.append(dist.new_group(everyone, timeout=timedelta(seconds=GROUP_SECONDS)))
        return self.groups[-1]

    def _wrap(self, net: Any, arguments: dict[str, Any], kind: str | None = None) -> Any:
        arguments = dict(arguments)
        if arguments.pop("process_group", None) == "own" or self.apart:
            arguments["process_group"] = self._new_group()
        if "lazy_bucket_allocation" not in inspect.signature(self.ddp_class).parameters:
            arguments.pop("lazy_bucket_allocation", None)
        ddp = (self.ddp_class if kind is None else own.subclass(self.ddp_class, kind))(net, **arguments)
        if kind == "patched":
            own.patch(ddp)
        return ddp

    def _make_optimizers(self, which: Any) -> None:
        for i in which:
            spec = self.program["optimizers"][i]
            parameters = list({id(p): p for w in spec["of"] for p in self.wrappers[w].parameters()}.values())
            if spec["kind"] == "adam":
                made = torch.optim.Adam(parameters, lr=0.01, eps=1e-2, foreach=False)
            else:
                made = torch.optim.SGD(parameters, lr=0.05, momentum=spec.get("momentum", 0.0))
            self.optimizers[i:] = [made, *self.optimizers[i + 1 :]]

    def _replaced(self, w: int) -> None:
        """After a wrapper's module became another object: its optimizers hold the new parameters."""
        self._make_optimizers([i for i, o in enumerate(self.program["optimizers"]) if w in o["of"]])

    # --- verbs -----------------------------------------------------------------------------------------

    def _x(self, batch: int = 0, salt: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.program["seed"] + 10 * (self.at + salt) + self.rank)
        return torch.randn(batch or 2, 4, generator=generator)

    def _ddp(self, a: dict[str, Any]) -> Any:
        w = a.get("w", 0)
        return self.wrappers[w] if w < len(self.wrappers) else None

    def _no_sync(self, a: dict[str, Any], ddp: Any) -> Any:
        return ddp.no_sync() if a.get("sync") is False else contextlib.nullcontext()

    def do_forward(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        source = a.get("input", "x")
        if ddp is None or (source != "x" and source not in self.vars):
            return False
        x = self._x(a.get("batch", 0)) if source == "x" else head_of(self.vars[source], "both")
        if a.get("detach"):
            x = x.detach()
        if a.get("xgrad") and x.is_leaf:
            x.requires_grad_()
        ddp.train(not a.get("eval", False))
        with torch.set_grad_enabled(a.get("grad", True)), self._no_sync(a, ddp):
            out = self._call(a, ddp, x)
        self.note(a["out"], head_of(out, "both"))
        self.vars[a["out"]] = out
        self.inputs[a["out"]] = x
        return True

    def _call(self, a: dict[str, Any], ddp: Any, x: torch.Tensor) -> Any:
        keywords = {"rank": self.rank, "fail": a.get("fail", False)}
        via = a.get("via", "ddp")
        if via == "module":
            return ddp.module(x, **keywords)
        if via == "functional":
            named = dict(ddp.named_parameters())
            parameters = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in named.items()}
            return torch.func.functional_call(ddp, parameters, (x,), keywords)
        return ddp(x, **keywords)

    def do_loss(self, a: dict[str, Any]) -> Any:
        if not all(name in self.vars for name in a["of"]):
            return False
        if a.get("fail"):
            raise Planned("in loss")
        head = a.get("head", "both")
        head = head[self.rank % len(head)] if isinstance(head, list) else head
        loss = torch.zeros(())
        for name in a["of"]:
            h = head_of(self.vars[name], head)
            loss = loss + (h * h).sum() + h.sum()
        self.note(a["out"], loss)
        self.vars[a["out"]] = loss
        self.inputs[a["out"]] = self.inputs[a["of"][0]]
        return True

    def do_penalty(self, a: dict[str, Any]) -> Any:
        if a["of"] not in self.vars:
            return False
        grads = [g for g in self.vars[a["of"]] if g is not None]
        total = self.vars.get(a.get("add", ""), torch.zeros(()))
        for g in grads:
            total = total + 0.1 * (g * g.conj()).real.sum()
        self.vars[a["out"]] = total
        self.note(a["out"], total)
        return True

    def do_backward(self, a: dict[str, Any]) -> Any:
        loss = self.vars.get(a["loss"])
        if loss is None or not loss.requires_grad:
            return False
        inputs: Any = None
        if a.get("inputs") == "x":
            inputs = [self.inputs[a["loss"]]]
        elif a.get("inputs") == "params":
            inputs = [p for p in self._ddp(a).parameters() if p.requires_grad]
        flags = {"retain_graph": a.get("retain_graph", False), "create_graph": a.get("create_graph", False)}
        ddp = self._ddp(a)
        with self._no_sync(a, ddp) if ddp is not None else contextlib.nullcontext():
            loss.backward(inputs=inputs, **flags)
        if a.get("inputs") == "x":
            self.note("x.grad", inputs[0].grad)
        return True

    def do_grad(self, a: dict[str, Any]) -> Any:
        loss = self.vars.get(a["loss"])
        if loss is None or not loss.requires_grad:
            return False
        if a.get("wrt", "x") == "x":
            wrt = [self.inputs[a["loss"]]]
        else:
            wrt = [p for p in self._ddp(a).parameters() if p.requires_grad]
        flags = {"retain_graph": a.get("retain_graph", False), "create_graph": a.get("create_graph", False)}
        grads = torch.autograd.grad(loss, wrt, allow_unused=True, **flags)
        for i, grad in enumerate(grads):
            self.note(f"{a['out']}[{i}]", grad)
        self.vars[a["out"]] = grads
        return True

    def do_jacobian(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        if ddp is None:
            return False
        ddp.train(not a.get("eval", False))
        made = torch.autograd.functional.jacobian(lambda x: head_of(ddp(x, rank=self.rank), "a"), self._x())
        self.note("jacobian", made)
        return True

    def do_func_grad(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        if ddp is None:
            return False
        ddp.eval()
        parameters = {name: p.detach().clone() for name, p in ddp.named_parameters()}
        x = self._x()

        def loss(values: Any) -> torch.Tensor:
            return head_of(torch.func.functional_call(ddp, values, (x,), {"rank": self.rank}), "both").sum()

        for name, grad in torch.func.grad(loss)(parameters).items():
            self.note(f"func_grad {name}", grad)
        return True

    def do_zero(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        return False if ddp is None else ddp.zero_grad(set_to_none=a.get("to_none", True))

    def do_clip(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        if ddp is None:
            return False
        self.note("norm", torch.nn.utils.clip_grad_norm_(ddp.parameters(), a.get("max", 1.0)))
        return True

    def do_scale_grad(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        for p in ddp.parameters() if ddp is not None else ():
            if p.grad is not None:
                p.grad.mul_(a.get("by", 0.5))

    def do_step(self, a: dict[str, Any]) -> Any:
        if a.get("opt", 0) >= len(self.optimizers):
            return False
        return self.optimizers[a.get("opt", 0)].step()

    def _parameter(self, ddp: Any, index: int) -> torch.nn.Parameter:
        parameters = list(ddp.parameters())
        return parameters[index % len(parameters)]

    def do_freeze(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        if ddp is None:
            return False
        which = list(ddp.parameters()) if a.get("p", 0) == "all" else [self._parameter(ddp, a.get("p", 0))]
        for p in which:
            p.requires_grad_(a.get("value", False))
        return True

    def do_hook(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        if ddp is None:
            return False
        p = self._parameter(ddp, a.get("p", 0))
        calls = [0]
        label = f"hook{self.at}"

        def look(*_: Any) -> None:
            calls[0] += 1
            if a.get("fail") and calls[0] == a["fail"]:
                raise Planned("in hook")
            for i, other in enumerate(ddp.module.parameters()):
                if a.get("read", "all") in ("all", i):
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
        elif kind == "node":
            with torch.enable_grad():
                node = p.view_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            self.kept.append(node)
            self.handles.append(node.register_hook(look))
        return True

    def do_move_grad(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        if ddp is None:
            return False
        p = self._parameter(ddp, a.get("p", 0))
        if not p.requires_grad:
            return False
        self.handles.append(
            p.register_post_accumulate_grad_hook(functools.partial(own.move_gradient, a.get("how", "scale")))
        )
        return True

    def do_unhook(self, a: dict[str, Any]) -> Any:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def do_join(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        if ddp is None:
            return False
        ddp.train(not a.get("eval", False))
        head = a.get("head", "both")
        opt = self.optimizers[a.get("opt", 0) % len(self.optimizers)]
        with ddp.join(divide_by_initial_world_size=a.get("divide", True)):
            for batch in range(a["batches"][self.rank % len(a["batches"])]):
                opt.zero_grad()
                h = head_of(ddp(self._x(salt=batch + 1), rank=self.rank), head)
                (h * h).sum().backward()
                self._note_grads()
                opt.step()
        return True

    def do_rewrap(self, a: dict[str, Any]) -> Any:
        w = a.get("w", 0)
        old = self._ddp(a)
        if old is None:
            return False
        if a.get("keep"):
            self.kept.append(old)
        self.wrappers[w] = None
        module = old.module
        del old
        self.wrappers[w] = self._wrap(module, a.get("args", {}))
        return True

    def do_deepcopy(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        if ddp is None:
            return False
        self.wrappers[a.get("w", 0)] = copy.deepcopy(ddp)
        self._replaced(a.get("w", 0))
        return True

    def do_pickle(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        if ddp is None:
            return False
        self.wrappers[a.get("w", 0)] = pickle.loads(pickle.dumps(ddp))
        self._replaced(a.get("w", 0))
        return True

    def do_state_dict(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        if ddp is None:
            return False
        state = {name: value.clone() for name, value in ddp.state_dict().items()}
        self.note("keys", " ".join(state))
        ddp.load_state_dict(state)
        return True

    def do_comm_hook(self, a: dict[str, Any]) -> Any:
        ddp = self._ddp(a)
        if ddp is None:
            return False
        ddp.register_comm_hook(ddp.process_group, _HOOKS[a["hook"]])
        return True

    def do_drop(self, a: dict[str, Any]) -> Any:
        self.vars.pop(a["out"], None)
        self.inputs.pop(a["out"], None)


def run_program(program: dict[str, Any], ddp_class: Any, rank: int, apart: bool = False) -> dict[str, Any]:
    """``{"observations": [...], "end": "ok" | "raised", "at": step, "error": "Type: first line"}``."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, program.get("dtype", "float32")))
    try:
        return _run(Run(program, ddp_class, rank, apart))
    finally:
        torch.set_default_dtype(usual)


def _run(run: Run) -> dict[str, Any]:
    program = run.program
    result: dict[str, Any] = {"end": "ok", "at": len(program["steps"]), "error": ""}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.run()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        result = {"end": "raised", "at": run.at, "error": f"{type(error).__name__}: {lines[0][:300]}"}
    result["observations"] = run.observations
    groups = list(run.groups)
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
