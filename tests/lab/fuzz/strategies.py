"""Draws programs: scenes of real training, composed at random, then now and then mutated.

What always holds: a program depends on the seed and its index only, so that a report can name it by two numbers. Most
programs are ones that torch's class runs to the end; about a quarter have a step removed, doubled or moved, or a
constructor argument that does not fit.
"""

from __future__ import annotations

import copy
import random
from typing import Any

from hypothesis import strategies as st

from .own import MOVES, OUTPUTS, OWN

__all__ = ["SCENES", "draw_program", "nth_program", "programs"]

Step = list[Any]
_PLAIN = ["linear", "linear", "bare", "scale", "linear"]
_RARE = ["frozen", "twice", "double", "complex", "half", "embedding", "bn", "dropout", "checkpoint", "collective"]
_RARE += ["branch", "idle"]


class Drawing:
    """One program in the making; ``steps`` grows scene by scene."""

    def __init__(self, rng: random.Random, world: int):
        self.rng, self.world = rng, world
        self.steps: list[Step] = []
        self.names = 0
        self.nets: list[dict[str, Any]] = []
        self.wrappers: list[dict[str, Any]] = []
        self.optimizers: list[dict[str, Any]] = []

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def add(self, verb: str, **arguments: Any) -> None:
        self.steps.append([verb, {k: v for k, v in arguments.items() if v is not None}])

    # --- models and wrappers ---------------------------------------------------------------------------

    def block(self) -> dict[str, Any]:
        rng = self.rng
        kind = rng.choice(_PLAIN) if self.chance(0.6) else rng.choice(_RARE)
        block: dict[str, Any] = {"kind": kind}
        if kind == "branch":
            block["ranks"] = sorted(rng.sample(range(self.world), rng.randint(1, self.world - 1)))
        if kind == "embedding" and self.chance(0.5):
            block["sparse"] = True
        if kind == "checkpoint":
            block["reentrant"] = self.chance(0.5)
        if self.nets and self.chance(0.15):
            block = {"kind": "same", "net": rng.randrange(len(self.nets)), "block": rng.randrange(3)}
        return block

    def net(self) -> dict[str, Any]:
        blocks = [self.block() for _ in range(self.rng.randint(1, 3))]
        if not any(block["kind"] in ("linear", "bare", "scale") for block in blocks):
            blocks.insert(0, {"kind": "linear"})
        if blocks[0]["kind"] == "checkpoint":
            blocks.insert(0, {"kind": "linear"})
        if any(b["kind"] == "collective" for b in blocks) and any(b["kind"] == "branch" for b in blocks):
            blocks = [b for b in blocks if b["kind"] != "collective"]
        net: dict[str, Any] = {"blocks": blocks}
        if self.chance(0.3):
            net["out"] = self.rng.choice(["tuple", "dict", "dataclass"])
        return net

    def kinds(self, w: int | None = None) -> set[str]:
        nets = self.nets if w is None else [self.nets[self.wrappers[w]["net"]]]
        kinds = set()
        for net in nets:
            for block in net["blocks"]:
                if block["kind"] == "same":
                    others = self.nets[block["net"]]["blocks"]
                    block = others[block["block"] % len(others)]
                kinds.add(block["kind"])
        return kinds

    def arguments(self, net: int, loose: bool) -> dict[str, Any]:
        rng, a = self.rng, {}
        used_all = not loose
        if (not used_all and self.chance(0.9)) or self.chance(0.15):
            a["find_unused_parameters"] = True
        if self.chance(0.1):
            a["static_graph"] = True
        if self.chance(0.25):
            a["gradient_as_bucket_view"] = True
        if self.chance(0.5):
            a["bucket_cap_mb"] = rng.choice([1e-6, 2e-5, 1e-4, 1])
        elif self.chance(0.1):
            a["bucket_cap_mb_list"] = rng.choice([[1], [2e-5, 1], [1e-6, 1e-4]])
        for name, p, value in (
            # Its contract: the same parameters are unused on all ranks.
            ("skip_all_reduce_unused_params", 0.0 if loose else 0.08, True),
            ("batched_grad_copy", 0.05, True),
            ("init_sync", 0.04, False),
            ("process_group", 0.08, "own"),
        ):
            if self.chance(p):
                a[name] = value
        if self.chance(0.15):
            a[rng.choice(["broadcast_buffers", "forward_sync_buffers"])] = self.chance(0.3)
        return a

    def draw_lazy_buckets(self) -> None:
        """Torch has them from 2.15 on; the interpreter leaves them out for a class without."""
        made = [wrapper["args"] for wrapper in self.wrappers]
        for arguments in made + [step[1]["args"] for step in self.steps if step[0] == "rewrap"]:
            if self.chance(0.25):
                arguments["lazy_bucket_allocation"] = True

    def draw_own(self) -> None:
        """Classes of the program's own, odd modules and outputs, hooks that move gradients."""
        verbs = {verb for verb, _ in self.steps}
        for wrapper in self.wrappers:
            if self.chance(0.12) and "pickle" not in verbs:
                wrapper["own"] = self.rng.choice(OWN)
        looks = [self.wrappers[w]["args"] for w in range(len(self.wrappers))]
        looks += [arguments["args"] for verb, arguments in self.steps if verb == "rewrap"]
        # Torch's class looks into outputs then, and takes what it cannot see for unused.
        walks = any({"find_unused_parameters", "static_graph"} & set(arguments) for arguments in looks)
        for net in self.nets:
            if "out" in net and self.chance(0.4):
                net["out"] = self.rng.choice([out for out in OUTPUTS if not (walks and out == "slots")])
            if self.chance(0.1) and "pickle" not in verbs:
                net["tells"] = self.rng.choice(["twice", "hides"])
            plain = [] if verbs & {"pickle", "deepcopy", "func_grad"} else net["blocks"]
            for block in plain:
                if block["kind"] == "linear" and self.chance(0.05):
                    block["kind"] = "scripted"
        if self.chance(0.08):
            at, how = self.rng.randrange(len(self.steps) + 1), self.rng.choice(MOVES)
            self.steps.insert(at, ["move_grad", {"w": self.w(), "p": self.rng.randrange(4), "how": how}])

    def build(self) -> None:
        for _ in range(self.rng.choice([1, 1, 1, 2, 2, 3])):
            self.nets.append(self.net())
        for i in range(len(self.nets)):
            self.wrappers.append({"net": i})
            loose = bool(self.kinds(i) & {"branch", "idle"}) or self.nets[i].get("out") is not None
            self.wrappers[i]["args"] = self.arguments(i, loose)
        kind = "sgd" if self.chance(0.7) else "adam"
        if any(block.get("sparse") for net in self.nets for block in net["blocks"]):
            kind = "sgd"
        if "complex" in self.kinds():
            kind = "sgd"
        together = len(self.wrappers) > 1 and self.chance(0.4)
        of = [list(range(len(self.wrappers)))] if together else [[w] for w in range(len(self.wrappers))]
        self.optimizers = [{"kind": kind, "of": which} for which in of]

    # --- pieces of scenes ------------------------------------------------------------------------------

    def w(self) -> int:
        return self.rng.randrange(len(self.wrappers))

    def opt(self, w: int) -> int:
        return next(i for i, o in enumerate(self.optimizers) if w in o["of"])

    def head(self) -> Any:
        if self.chance(0.7):
            return None
        return self.rng.choice(["a", "b", ["a", "b"], ["both", "a"]])

    def forward(self, w: int, **more: Any) -> str:
        out = self.name("o")
        self.add("forward", out=out, w=w, batch=3 if self.chance(0.2) else None, **more)
        return out

    def loss(self, of: list[str], **more: Any) -> str:
        out = self.name("l")
        self.add("loss", out=out, of=of, head=self.head(), **more)
        return out

    def zero(self, w: int) -> None:
        self.add("zero", w=w, to_none=False if self.chance(0.2) else None)

    def step(self, w: int) -> None:
        sparse = any(block.get("sparse") for net in self.nets for block in net["blocks"])
        if self.chance(0.15) and not sparse:
            self.add("clip", w=w, max=0.5)
        if self.chance(0.05) and not sparse:
            self.add("scale_grad", w=w, by=0.5)
        self.add("step", opt=self.opt(w))

    # --- scenes ----------------------------------------------------------------------------------------

    def train(self) -> None:
        w = self.w()
        self.zero(w)
        self.add("backward", loss=self.loss([self.forward(w)]))
        self.step(w)

    def accumulate(self) -> None:
        w = self.w()
        self.zero(w)
        for _ in range(self.rng.randint(1, 2)):
            self.add("backward", loss=self.loss([self.forward(w, sync=False)]), sync=False)
        self.add("backward", loss=self.loss([self.forward(w)]))
        self.step(w)

    def twice(self) -> None:
        """Two forwards, one or two losses and backwards."""
        w = self.w()
        self.zero(w)
        a, b = self.forward(w), self.forward(w)
        if self.chance(0.5):
            self.add("backward", loss=self.loss([a, b]))
        else:
            for out in self.rng.sample([a, b], 2):
                self.add("backward", loss=self.loss([out]))
        self.step(w)

    def several(self) -> None:
        """Several wrapped modules in one loss, side by side or in a chain."""
        ws = self.rng.sample(range(len(self.wrappers)), self.rng.randint(1, len(self.wrappers)))
        for w in ws:
            self.zero(w)
        outs: list[str] = []
        chain = self.chance(0.5)
        for w in ws:
            outs.append(self.forward(w, input=outs[-1] if chain and outs else None))
        losses = [outs] if self.chance(0.6) else [[out] for out in outs]
        made = [self.loss(of) for of in losses]
        for i, loss in enumerate(made):
            self.add("backward", loss=loss, retain_graph=True if i + 1 < len(made) else None)
        for opt in sorted({self.opt(w) for w in ws}):
            self.add("step", opt=opt)

    def gan(self) -> None:
        if len(self.wrappers) < 2:
            return self.train()
        g, d = self.rng.sample(range(len(self.wrappers)), 2)
        frozen = self.chance(0.6)
        if self.chance(0.7):
            self.zero(d)
            real, fake = self.forward(d), self.forward(d, input=self.forward(g), detach=True)
            for loss in [self.loss([real, fake])] if self.chance(0.5) else [self.loss([real]), self.loss([fake])]:
                self.add("backward", loss=loss)
            self.step(d)
        self.zero(g)
        if frozen:
            self.add("freeze", w=d, p="all")
        self.add("backward", loss=self.loss([self.forward(d, input=self.forward(g))]))
        self.step(g)
        if frozen:
            self.add("freeze", w=d, p="all", value=True)
        return None

    def attack(self) -> None:
        """PGD: the gradient of the input, sometimes on one rank only, then a step."""
        w = self.w()
        alone = self.chance(0.2) and not self.kinds(w) & {"bn", "collective"}
        ranks = [self.rng.randrange(self.world)] if alone else None
        via = "module" if ranks and self.chance(0.5) else None
        for _ in range(self.rng.randint(1, 2)):
            out = self.forward(w, xgrad=True, ranks=ranks, via=via, eval=True if self.chance(0.3) else None)
            loss = self.loss([out], ranks=ranks)
            if self.chance(0.7):
                self.add("grad", loss=loss, out=self.name("g"), ranks=ranks)
            else:
                self.add("backward", loss=loss, inputs="x", ranks=ranks)
        self.train()

    def saliency(self) -> None:
        w = self.w()
        self.zero(w)
        self.add("backward", loss=self.loss([self.forward(w)]))
        loss = self.loss([self.forward(w, eval=True, xgrad=True)])
        if self.chance(0.5):
            self.add("grad", loss=loss, out=self.name("g"))
        else:
            self.add("backward", loss=loss, inputs="x")
        self.step(w)

    def evaluate(self) -> None:
        w = self.w()
        only = None if self.kinds(w) & {"bn", "collective"} else [0]
        via = "module" if self.chance(0.5) else None
        self.forward(w, grad=False, eval=True if self.chance(0.8) else None, via=via, ranks=only if via else None)

    def probe(self) -> None:
        """A forward, and often a backward, through ``.module``, on all or one rank."""
        w = self.w()
        ranks = [0] if self.chance(0.5) and not self.kinds(w) & {"collective"} else None
        loss = self.loss([self.forward(w, via="module", ranks=ranks)], ranks=ranks)
        if self.chance(0.7):
            self.add("backward", loss=loss, ranks=ranks)
        if self.chance(0.7):
            self.zero(w)
        self.train()

    def jacobian(self) -> None:
        w = self.w()
        if not self.kinds(w) & {"bn", "collective"}:
            self.add("jacobian", w=w, eval=True if self.chance(0.5) else None)
        self.train()

    def func_grad(self) -> None:
        w = self.w()
        if not self.kinds(w) & {"collective", "checkpoint", "embedding"}:
            self.add("func_grad", w=w)
        self.train()

    def functional(self) -> None:
        w = self.w()
        loss = self.loss([self.forward(w, via="functional", xgrad=True)])
        if self.chance(0.5):
            self.add("grad", loss=loss, out=self.name("g"))
        self.train()

    def penalty(self) -> None:
        """A gradient penalty on input or parameters; also a Hessian-vector product."""
        w = self.w()
        if self.kinds(w) & {"collective", "checkpoint", "embedding"}:
            return self.train()
        self.zero(w)
        wrt = self.rng.choice(["x", "params"])
        loss = self.loss([self.forward(w, xgrad=True)])
        grads = self.name("g")
        self.add("grad", loss=loss, out=grads, wrt=wrt, w=w, create_graph=True)
        total = self.name("l")
        self.add("penalty", out=total, of=grads, add=loss if self.chance(0.7) else None)
        if self.chance(0.3):
            self.add("grad", loss=total, out=self.name("g"), wrt="params", w=w)
            return self.train()
        self.add("backward", loss=total, create_graph=True if self.chance(0.15) else None)
        self.step(w)
        return None

    def param_grads(self) -> None:
        """autograd.grad or backward(inputs=) for the parameters, then training goes on."""
        w = self.w()
        loss = self.loss([self.forward(w)])
        if self.chance(0.6):
            self.add("grad", loss=loss, out=self.name("g"), wrt="params", w=w)
        else:
            self.zero(w)
            self.add("backward", loss=loss, inputs="params", w=w)
            if self.chance(0.5):
                self.step(w)
        self.train()

    def retain(self) -> None:
        w = self.w()
        self.zero(w)
        loss = self.loss([self.forward(w)])
        self.add("backward", loss=loss, retain_graph=True)
        if self.chance(0.5):
            self.zero(w)
        self.add("backward", loss=loss)
        if self.chance(0.5):
            self.zero(w)
            self.train()
        else:
            self.step(w)

    def unfinished(self) -> None:
        """A forward, or a loss, without a backward."""
        out = self.forward(self.w())
        if self.chance(0.5):
            out = self.loss([out])
        if self.chance(0.5):
            self.add("drop", out=out)
        self.train()

    def freeze(self) -> None:
        w, p = self.w(), self.rng.randrange(4)
        self.add("freeze", w=w, p=p)
        self.train()
        if self.chance(0.7):
            self.add("freeze", w=w, p=p, value=True)
            self.train()

    def watch(self) -> None:
        read = "all" if self.chance(0.6) else self.rng.randrange(4)
        kind = self.rng.choice(["tensor", "post_accumulate", "module", "node"])
        self.add("hook", w=self.w(), kind=kind, p=self.rng.randrange(4), read=read)
        scene = self.rng.choice([self.train, self.accumulate, self.twice, self.several])
        scene()
        if self.chance(0.5):
            self.add("unhook")

    def mishap(self) -> None:
        """An exception that the program catches, in forward, loss or a hook; then training goes on."""
        w = self.w()
        where = self.rng.choice(["forward", "loss", "hook"])
        self.zero(w)
        if where == "hook":
            kind = self.rng.choice(["tensor", "post_accumulate", "module"])
            self.add("hook", w=w, kind=kind, p=self.rng.randrange(4), read="all", fail=1)
        out = self.forward(w, fail=True if where == "forward" else None)
        loss = self.loss([out], fail=True if where == "loss" else None)
        self.add("backward", loss=loss)
        self.add("unhook")
        self.train()

    def uneven(self) -> None:
        w = self.w()
        if self.kinds(w) & {"collective", "branch"}:
            return self.train()
        batches = [self.rng.randint(1, 3) for _ in range(self.world)]
        head = None if self.wrappers[w]["args"].get("find_unused_parameters") is None else self.head()
        self.add("join", w=w, opt=self.opt(w), batches=batches, divide=False if self.chance(0.3) else None, head=head)
        return self.train() if self.chance(0.7) else None

    def rewrap(self) -> None:
        w = self.w()
        loose = "find_unused_parameters" in self.wrappers[w]["args"]
        args = self.arguments(self.wrappers[w]["net"], loose)
        args.pop("init_sync", None)
        # Two armed reducers on views of one gradient race in torch's class.
        views = "gradient_as_bucket_view" in {**args, **self.wrappers[w]["args"]}
        self.add("rewrap", w=w, args=args, keep=True if not views and self.chance(0.7) else None)
        self.rng.choice([self.train, self.accumulate])()

    def copied(self) -> None:
        w = self.w()
        self.add(self.rng.choice(["deepcopy", "pickle", "state_dict"]), w=w)
        self.train()

    # --- the whole -------------------------------------------------------------------------------------

    def mutate(self) -> None:
        steps, rng = self.steps, self.rng
        for _ in range(rng.randint(1, 2)):
            if len(steps) < 2:
                return
            i = rng.randrange(len(steps))
            what = rng.randrange(4)
            if what == 0:
                del steps[i]
            elif what == 1:
                steps.insert(i, copy.deepcopy(steps[i]))
            elif what == 2:
                j = rng.randrange(len(steps))
                steps.insert(j, steps.pop(i))
            elif steps[i][0] in ("forward", "backward"):
                name, value = rng.choice([("sync", False), ("eval", True), ("retain_graph", True), ("via", "module")])
                steps[i][1][name] = value


# scene: how often
SCENES = {
    "train": 3, "accumulate": 2, "twice": 2, "several": 4, "gan": 3, "attack": 3, "saliency": 2, "evaluate": 2,
    "probe": 2, "jacobian": 1, "func_grad": 1, "functional": 1, "penalty": 2, "param_grads": 2, "retain": 1,
    "unfinished": 1, "freeze": 2, "watch": 4, "mishap": 2, "uneven": 2, "rewrap": 2, "copied": 2,
}  # fmt: skip


def draw_program(rng: random.Random, world: int = 2) -> dict[str, Any]:
    drawing = Drawing(rng, world)
    drawing.build()
    if drawing.chance(0.08):
        drawing.add("comm_hook", w=drawing.w(), hook=rng.choice(["allreduce", "fp16", "bf16", "python"]))
    for _ in range(rng.randint(1, 4)):
        scene = rng.choices(list(SCENES), list(SCENES.values()))[0]
        getattr(drawing, scene)()
    if drawing.chance(0.15):
        drawing.mutate()
    if any(step[0] == "join" for step in drawing.steps):
        # Each rank steps as often as it has batches, so what an optimizer remembers would differ.
        for optimizer in drawing.optimizers:
            optimizer["kind"] = "sgd"
    seed = rng.randrange(1000)
    drawing.draw_lazy_buckets()  # last, so that the rest of a program stays what it was without them
    drawing.draw_own()
    return {
        "world": world,
        "seed": seed,
        "nets": drawing.nets,
        "wrappers": drawing.wrappers,
        "optimizers": drawing.optimizers,
        "steps": drawing.steps,
    }


def nth_program(seed: int, index: int, worlds: tuple[int, ...] = (2,)) -> dict[str, Any]:
    """The program that a report names by its seed and index; the worlds take turns."""
    return draw_program(random.Random(f"{seed}/{index}"), worlds[index % len(worlds)])


def programs(world: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    """For hypothesis: programs, shrunk by what ``shrink`` knows rather than by their random numbers."""
    return st.integers(0, 2**32).map(lambda seed: nth_program(seed, 0, (world,)))
