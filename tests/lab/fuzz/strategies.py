"""Programs for hypothesis to draw: scenes of real training, composed at random, some of them with a mistake.

What always holds: the simplest value of each choice leaves something out (an option, a block, a scene, a step), so
that hypothesis shrinks a program by shrinking its choices. Most programs are ones that torch's class runs to the end;
in about one of six a step is missing, doubled, moved or changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from .own import MOVES, OUTPUTS, OWN

__all__ = ["programs"]

# As often as they stand here: plain blocks are three of five.
_PLAIN = ["linear", "bare", "linear", "scale", "linear"]
_RARE = ["frozen", "twice", "double", "complex", "half", "embedding", "bn", "dropout", "checkpoint", "collective"]
_RARE += ["branch", "idle", "scripted"]
_KINDS = 8 * _PLAIN + 2 * _RARE
# scene: how often
_SCENES = {
    "train": 3, "several": 4, "watch": 4, "gan": 3, "attack": 3, "accumulate": 2, "twice": 2, "saliency": 2,
    "evaluate": 2, "probe": 2, "penalty": 2, "param_grads": 2, "freeze": 2, "mishap": 2, "uneven": 2, "rewrap": 2,
    "copied": 2, "derivative": 2, "functional": 1, "retain": 1, "unfinished": 1,
}  # fmt: skip
_PERCENT, _KEPT = st.integers(0, 99), st.integers(0, 299)


class _Drawing:
    """One program in the making; ``steps`` grows scene by scene."""

    def __init__(self, draw: Callable[[Any], Any], world: int):
        self.draw, self.world = draw, world
        self.steps: list[list[Any]] = []
        self.names: list[str] = []
        self.nets: list[dict[str, Any]] = []
        self.wrappers: list[dict[str, Any]] = []
        self.optimizers: list[dict[str, Any]] = []
        self.build()

    def chance(self, percent: int) -> bool:
        return bool(self.draw(_PERCENT) >= 100 - percent)

    def maybe(self, percent: int, value: Any = True) -> Any:
        """The value, or None, for which a step's argument is left out."""
        return value if self.chance(percent) else None

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def below(self, count: int) -> int:
        return int(self.draw(st.integers(0, count - 1)))

    def some(self, count: int, least: int = 1, most: int | None = None) -> list[int]:
        """Different numbers below ``count``, in any order."""
        order = self.draw(st.permutations(range(count)))
        return list(order[: least + self.below((most or count) - least + 1)])

    def name(self, prefix: str) -> str:
        self.names.append(prefix)
        return f"{prefix}{len(self.names)}"

    def add(self, verb: str, **arguments: Any) -> None:
        if self.draw(_KEPT):  # seldom a step is missing; where hypothesis shrinks, each that can be missed
            self.steps.append([verb, {k: v for k, v in arguments.items() if v is not None}])

    # --- models and wrappers ---------------------------------------------------------------------------

    def block(self) -> dict[str, Any]:
        block: dict[str, Any] = {"kind": self.pick(*_KINDS)}
        kind = block["kind"]
        if kind == "branch":
            block["ranks"] = sorted(self.some(self.world, most=self.world - 1))
        if kind == "embedding" and self.chance(50):
            block["sparse"] = True
        if kind == "checkpoint":
            block["reentrant"] = self.chance(50)
        if self.nets and self.chance(15):
            block = {"kind": "same", "net": self.below(len(self.nets)), "block": self.below(3)}
        return block

    def net(self) -> dict[str, Any]:
        blocks = [self.block() for _ in range(1 + self.below(3))]
        if blocks[0]["kind"] == "checkpoint" or not any(block["kind"] in _PLAIN for block in blocks):
            blocks.insert(0, {"kind": "linear"})
        if any(block["kind"] == "branch" for block in blocks):
            blocks = [block for block in blocks if block["kind"] != "collective"]
        net: dict[str, Any] = {"blocks": blocks}
        if self.chance(30):
            net["out"] = self.pick("tuple", "dict", "dataclass")
        if self.chance(10):
            net["tells"] = self.pick("twice", "hides")
        return net

    def kinds(self, w: int) -> set[str]:
        """Of the blocks of a wrapper's net."""
        kinds = set()
        for block in self.nets[w]["blocks"]:
            if block["kind"] == "same":
                others = self.nets[block["net"]]["blocks"]
                block = others[block["block"] % len(others)]
            kinds.add(block["kind"])
        return kinds

    def arguments(self, net: dict[str, Any], loose: bool) -> dict[str, Any]:
        """Of a constructor. ``loose``: some ranks, or some iterations, leave parameters out."""
        a: dict[str, Any] = {}
        for name, percent, value in (
            ("find_unused_parameters", 92 if loose else 15, True),
            ("static_graph", 10, True),
            ("gradient_as_bucket_view", 25, True),
            ("lazy_bucket_allocation", 25, True),  # the interpreter leaves it out for a torch without
            # Its contract: the same parameters are unused on all ranks.
            ("skip_all_reduce_unused_params", 0 if loose else 8, True),
            ("batched_grad_copy", 5, True),
            ("init_sync", 4, False),
            ("process_group", 8, "own"),
        ):
            if self.chance(percent):
                a[name] = value
        if self.chance(50):
            a["bucket_cap_mb"] = self.pick(1, 1e-4, 2e-5, 1e-6)
        elif self.chance(10):
            a["bucket_cap_mb_list"] = self.pick([1], [2e-5, 1], [1e-6, 1e-4])
        if self.chance(15):
            a[self.pick("broadcast_buffers", "forward_sync_buffers")] = self.chance(30)
        if net.get("out") == "slots":
            # With these torch's class looks into outputs, and takes what it cannot see for unused.
            a = {name: value for name, value in a.items() if name not in ("find_unused_parameters", "static_graph")}
        return a

    def wrap(self, w: int) -> dict[str, Any]:
        net = self.nets[w]
        loose = bool(self.kinds(w) & {"branch", "idle"}) or "out" in net
        if "out" in net and self.chance(40):
            net["out"] = self.pick(*OUTPUTS)
        wrapper: dict[str, Any] = {"args": self.arguments(net, loose)}
        if self.chance(12):
            wrapper["own"] = self.pick(*OWN)
        return wrapper

    def build(self) -> None:
        for w in range(self.pick(1, 1, 1, 2, 2, 3)):
            self.nets.append(self.net())
            self.wrappers.append(self.wrap(w))
        everyone = list(range(len(self.wrappers)))
        together = len(everyone) > 1 and self.chance(40)
        blocks = [block for net in self.nets for block in net["blocks"]]
        self.sparse = any(block.get("sparse") for block in blocks)
        plain = not self.sparse and all(block["kind"] != "complex" for block in blocks)
        kind = "adam" if plain and self.chance(30) else "sgd"
        self.optimizers = [{"kind": kind, "of": of} for of in ([everyone] if together else [[w] for w in everyone])]

    # --- pieces of scenes ------------------------------------------------------------------------------

    def w(self) -> int:
        return self.below(len(self.wrappers))

    def opt(self, w: int) -> int:
        return next(i for i, optimizer in enumerate(self.optimizers) if w in optimizer["of"])

    def head(self) -> Any:
        return self.maybe(30, self.pick("a", "b", ["a", "b"], ["both", "a"]))

    def forward(self, w: int, **more: Any) -> str:
        out = self.name("o")
        self.add("forward", out=out, w=w, batch=self.maybe(20, 3), **more)
        return out

    def loss(self, *of: str, **more: Any) -> str:
        out = self.name("l")
        self.add("loss", out=out, of=list(of), head=self.head(), **more)
        return out

    def grad(self, loss: str, **more: Any) -> str:
        out = self.name("g")
        self.add("grad", loss=loss, out=out, **more)
        return out

    def backward(self, *of: str, **more: Any) -> None:
        self.add("backward", loss=self.loss(*of), **more)

    def zero(self, w: int) -> int:
        self.add("zero", w=w, to_none=self.maybe(20, False))
        return w

    def step(self, w: int) -> None:
        if self.chance(15) and not self.sparse:
            self.add("clip", w=w, max=0.5)
        if self.chance(5) and not self.sparse:
            self.add("scale_grad", w=w, by=0.5)
        self.add("step", opt=self.opt(w))

    # --- scenes ----------------------------------------------------------------------------------------

    def train(self) -> None:
        w = self.zero(self.w())
        self.backward(self.forward(w))
        self.step(w)

    def accumulate(self) -> None:
        w = self.zero(self.w())
        for _ in range(1 + self.below(2)):
            self.backward(self.forward(w, sync=False), sync=False)
        self.backward(self.forward(w))
        self.step(w)

    def twice(self) -> None:
        """Two forwards, one or two losses and backwards."""
        w = self.zero(self.w())
        outs = [self.forward(w), self.forward(w)]
        if self.chance(50):
            self.backward(*outs)
        else:
            for i in self.some(2, least=2):
                self.backward(outs[i])
        self.step(w)

    def several(self) -> None:
        """Several wrapped modules in one loss, side by side or in a chain."""
        ws = self.some(len(self.wrappers))
        chain = self.chance(50)
        outs: list[str] = []
        for w in ws:
            self.zero(w)
        for w in ws:
            outs.append(self.forward(w, input=outs[-1] if chain and outs else None))
        losses = [self.loss(out) for out in outs] if self.chance(40) else [self.loss(*outs)]
        for loss in losses:
            self.add("backward", loss=loss, retain_graph=None if loss == losses[-1] else True)
        for opt in sorted({self.opt(w) for w in ws}):
            self.add("step", opt=opt)

    def gan(self) -> None:
        if len(self.wrappers) < 2:
            return self.train()
        g, d = self.some(len(self.wrappers), least=2, most=2)
        if self.chance(70):
            self.zero(d)
            outs = [self.forward(d), self.forward(d, input=self.forward(g), detach=True)]
            for loss in [self.loss(*outs)] if self.chance(50) else [self.loss(out) for out in outs]:
                self.add("backward", loss=loss)
            self.step(d)
        self.zero(g)
        frozen = self.chance(60)
        if frozen:
            self.add("freeze", w=d, p="all")
        self.backward(self.forward(d, input=self.forward(g)))
        self.step(g)
        if frozen:
            self.add("freeze", w=d, p="all", value=True)
        return None

    def attack(self) -> None:
        """PGD: the gradient of the input, sometimes on one rank only, then a step."""
        w = self.w()
        alone = self.chance(20) and not self.kinds(w) & {"bn", "collective"}
        ranks = [self.below(self.world)] if alone else None
        via = self.maybe(50, "module") if alone else None
        for _ in range(1 + self.below(2)):
            loss = self.loss(self.forward(w, xgrad=True, ranks=ranks, via=via, eval=self.maybe(30)), ranks=ranks)
            self.input_gradient(loss, 30, ranks=ranks)
        self.train()

    def input_gradient(self, loss: str, percent: int, **more: Any) -> None:
        if self.chance(percent):
            self.add("backward", loss=loss, inputs="x", **more)
        else:
            self.grad(loss, **more)

    def saliency(self) -> None:
        w = self.zero(self.w())
        self.backward(self.forward(w))
        self.input_gradient(self.loss(self.forward(w, eval=True, xgrad=True)), 50)
        self.step(w)

    def evaluate(self) -> None:
        w = self.w()
        via = self.maybe(50, "module")
        alone = via and not self.kinds(w) & {"bn", "collective"}
        self.forward(w, grad=False, eval=self.maybe(80), via=via, ranks=[0] if alone else None)

    def probe(self) -> None:
        """A forward, and often a backward, through ``.module``, on all or one rank."""
        w = self.w()
        ranks = [0] if self.chance(50) and "collective" not in self.kinds(w) else None
        loss = self.loss(self.forward(w, via="module", ranks=ranks), ranks=ranks)
        if self.chance(70):
            self.add("backward", loss=loss, ranks=ranks)
        if self.chance(70):
            self.zero(w)
        self.train()

    def derivative(self) -> None:
        """A Jacobian, or torch.func.grad, then training goes on."""
        w = self.w()
        if self.chance(50) and not self.kinds(w) & {"collective", "checkpoint", "embedding", "scripted"}:
            self.add("func_grad", w=w)
        elif not self.kinds(w) & {"bn", "collective"}:
            self.add("jacobian", w=w, eval=self.maybe(50))
        self.train()

    def functional(self) -> None:
        loss = self.loss(self.forward(self.w(), via="functional", xgrad=True))
        if self.chance(50):
            self.grad(loss)
        self.train()

    def penalty(self) -> None:
        """A gradient penalty on input or parameters; also a Hessian-vector product."""
        w = self.w()
        if self.kinds(w) & {"collective", "checkpoint", "embedding"}:
            return self.train()
        self.zero(w)
        loss, total = self.loss(self.forward(w, xgrad=True)), self.name("l")
        grads = self.grad(loss, wrt=self.pick("x", "params"), w=w, create_graph=True)
        self.add("penalty", out=total, of=grads, add=self.maybe(70, loss))
        if self.chance(30):
            self.grad(total, wrt="params", w=w)
            return self.train()
        self.add("backward", loss=total, create_graph=self.maybe(15))
        return self.step(w)

    def param_grads(self) -> None:
        """autograd.grad or backward(inputs=) for the parameters, then training goes on."""
        w = self.w()
        loss = self.loss(self.forward(w))
        if self.chance(60):
            self.grad(loss, wrt="params", w=w)
        else:
            self.zero(w)
            self.add("backward", loss=loss, inputs="params", w=w)
            if self.chance(50):
                self.step(w)
        self.train()

    def retain(self) -> None:
        w = self.zero(self.w())
        loss = self.loss(self.forward(w))
        self.add("backward", loss=loss, retain_graph=True)
        if self.chance(50):
            self.zero(w)
        self.add("backward", loss=loss)
        if self.chance(50):
            self.zero(w)
            return self.train()
        return self.step(w)

    def unfinished(self) -> None:
        """A forward, or a loss, without a backward."""
        out = self.forward(self.w())
        if self.chance(50):
            out = self.loss(out)
        if self.chance(50):
            self.add("drop", out=out)
        self.train()

    def freeze(self) -> None:
        w, p = self.w(), self.below(4)
        self.add("freeze", w=w, p=p)
        self.train()
        if self.chance(70):
            self.add("freeze", w=w, p=p, value=True)
            self.train()

    def watch(self) -> None:
        read = self.below(4) if self.chance(40) else "all"
        kind = self.pick("tensor", "post_accumulate", "module", "node")
        self.add("hook", w=self.w(), kind=kind, p=self.below(4), read=read)
        self.pick(self.train, self.accumulate, self.twice, self.several)()
        if self.chance(50):
            self.add("unhook")

    def mishap(self) -> None:
        """An exception that the program catches, in forward, loss or a hook; then training goes on."""
        w = self.w()
        where = self.pick("forward", "loss", "hook")
        self.zero(w)
        if where == "hook":
            kind = self.pick("tensor", "post_accumulate", "module")
            self.add("hook", w=w, kind=kind, p=self.below(4), read="all", fail=1)
        out = self.forward(w, fail=True if where == "forward" else None)
        self.add("backward", loss=self.loss(out, fail=True if where == "loss" else None))
        self.add("unhook")
        self.train()

    def uneven(self) -> None:
        w = self.w()
        if self.kinds(w) & {"collective", "branch"}:
            return self.train()
        batches = [1 + self.below(3) for _ in range(self.world)]
        head = self.head() if "find_unused_parameters" in self.wrappers[w]["args"] else None
        self.add("join", w=w, opt=self.opt(w), batches=batches, divide=self.maybe(30, False), head=head)
        return self.train() if self.chance(70) else None

    def rewrap(self) -> None:
        w = self.w()
        old = self.wrappers[w]["args"]
        args = self.arguments(self.nets[w], "find_unused_parameters" in old)
        args.pop("init_sync", None)
        # Two armed reducers on views of one gradient race in torch's class.
        views = "gradient_as_bucket_view" in {**args, **old}
        self.add("rewrap", w=w, args=args, keep=self.maybe(70) if not views else None)
        self.pick(self.train, self.accumulate)()

    def copied(self) -> None:
        w = self.w()
        net = self.nets[w]
        # Classes made in functions do not pickle, and scripted modules are not copied.
        local = "own" in self.wrappers[w] or "tells" in net
        scripted = "scripted" in self.kinds(w)
        ways = ["state_dict"] + ["deepcopy"] * (not scripted) + ["pickle"] * (not scripted and not local)
        self.add(self.pick(*ways), w=w)
        self.train()

    # --- mistakes --------------------------------------------------------------------------------------

    def mistake(self) -> None:
        """A step twice, elsewhere or otherwise."""
        i, what = self.below(len(self.steps)), self.below(3)
        if what == 0:
            self.steps.insert(i, copy.deepcopy(self.steps[i]))
        elif what == 1:
            self.steps.insert(self.below(len(self.steps)), self.steps.pop(i))
        elif self.steps[i][0] in ("forward", "backward"):
            name, value = self.pick(("sync", False), ("eval", True), ("retain_graph", True), ("via", "module"))
            self.steps[i][1][name] = value


@st.composite
def _scene(draw: Callable[[Any], Any], drawing: _Drawing) -> None:
    """A composite, so that hypothesis sees which choices go together and leaves out all of them."""
    scene = draw(st.sampled_from([name for name, often in _SCENES.items() for _ in range(often)]))
    getattr(drawing, scene)()


@st.composite
def programs(draw: Callable[[Any], Any], worlds: tuple[int, ...] = (2,)) -> dict[str, Any]:
    """See ``program.py``; ``worlds`` are the numbers of ranks."""
    drawing = _Drawing(draw, draw(st.sampled_from(worlds)))
    if drawing.chance(8):
        drawing.add("comm_hook", w=drawing.w(), hook=drawing.pick("allreduce", "fp16", "bf16", "python"))
    draw(st.lists(_scene(drawing), min_size=1, max_size=4))
    if drawing.chance(8):
        at, w, p = drawing.below(len(drawing.steps) + 1), drawing.w(), drawing.below(4)
        drawing.steps.insert(at, ["move_grad", {"w": w, "p": p, "how": drawing.pick(*MOVES)}])
    if drawing.steps and drawing.chance(12):
        drawing.mistake()
    if any(verb == "join" for verb, _ in drawing.steps):
        # Each rank steps as often as it has batches, so what an optimizer remembers would differ.
        for optimizer in drawing.optimizers:
            optimizer["kind"] = "sgd"
    return {
        "world": drawing.world,
        "seed": drawing.below(1000),
        "nets": drawing.nets,
        "wrappers": drawing.wrappers,
        "optimizers": drawing.optimizers,
        "steps": drawing.steps,
    }
