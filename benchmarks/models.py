"""The benchmarks' models, with random weights and random inputs; nothing is downloaded.

``workload(name, device)`` builds one: a module, a batch, and ``loss()`` that runs forward. The weights
depend on the name alone, the batch on the rank. Parameters are never changed by a benchmark (no
optimizer runs), so every step does the same work.

Sizes are chosen for one CPU core a rank. The ``-small`` models keep the architecture (and so the mix of
large and small parameters in their order) at a fraction of the width.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import plain_models
import torch
from harness import BenchmarkError
from torch import nn

__all__ = ["MODELS", "Workload", "workload"]


@dataclass
class Workload:
    """A module and what to feed it. ``call(wrapped)`` runs forward through ``wrapped``: a scalar loss."""

    name: str
    module: nn.Module
    call: Callable[[nn.Module], torch.Tensor]

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def sizes(self) -> list[int]:
        """Bytes of each parameter's gradient."""
        return [p.numel() * p.element_size() for p in self.parameters()]

    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(self.sizes())


def _mlp(widths: list[int]) -> nn.Sequential:
    """Linear layers and ReLUs, initialized so that deep ones neither vanish nor overflow: arithmetic on
    denormal numbers is slow and would be measured as something else."""
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        linear = nn.Linear(width, following)
        nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _dense(widths: list[int], batch: int) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (_mlp(widths), _mean_square(lambda: torch.randn(batch, widths[0])))


def _mean_square(make: Callable[[], torch.Tensor]) -> Callable[[torch.device], Any]:
    def prepare(device: torch.device) -> Callable[[nn.Module], torch.Tensor]:
        x = make().to(device)
        return lambda module: module(x).square().mean()

    return prepare


def _resnet(image: int, batch: int, **sizes: Any) -> tuple[nn.Module, Any]:
    transformers = _transformers()
    module = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000, **sizes))

    def prepare(device: torch.device) -> Callable[[nn.Module], torch.Tensor]:
        pixels = torch.randn(batch, 3, image, image, device=device)
        labels = torch.randint(1000, (batch,), device=device)
        return lambda wrapped: wrapped(pixel_values=pixels, labels=labels).loss

    return module, prepare


def _bert(tokens: int, batch: int, **sizes: Any) -> tuple[nn.Module, Any]:
    transformers = _transformers()
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(config), _tokens(config.vocab_size, tokens, batch)


def _gpt2(tokens: int, batch: int, **sizes: Any) -> tuple[nn.Module, Any]:
    transformers = _transformers()
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **no_dropout, use_cache=False)
    return transformers.GPT2LMHeadModel(config), _tokens(config.vocab_size, tokens, batch)


def _tokens(vocabulary: int, tokens: int, batch: int) -> Callable[[torch.device], Any]:
    def prepare(device: torch.device) -> Callable[[nn.Module], torch.Tensor]:
        ids = torch.randint(vocabulary, (batch, tokens), device=device)
        return lambda wrapped: wrapped(input_ids=ids, labels=ids).loss

    return prepare


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise BenchmarkError(
            "this model needs the package transformers (pip install transformers); "
            "many-small, mlp38 and mlp67 do without"
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers


# name -> (what it is, builder of (module, prepare)); ``prepare(device)`` draws the batch
MODELS: dict[str, tuple[str, Callable[[], tuple[nn.Module, Any]]]] = {
    "many-small": ("400 small parameters (200 Linear 16x16)", _dense([16] * 201, 8)),
    "mlp38": ("MLP, 9 x 1024 wide, 38 MB", _dense([1024] * 10, 256)),
    "mlp46": ("MLP, 11 x 1024 wide, 46 MB", _dense([1024] * 12, 256)),
    "mlp67": ("MLP, 4 x 2048 wide, 67 MB", _dense([2048] * 5, 64)),
    "mlp67-light": ("the same with a batch of 8: mostly communication", _dense([2048] * 5, 8)),
    "mlp67-small": ("MLP, 4 x 1024 wide, 17 MB", _dense([1024] * 5, 64)),
    "resnet50": ("ResNet-50, batch 2 of 96 px", lambda: _resnet(96, 2)),
    "resnet50-small": (
        "ResNet-50 at a quarter of the width, batch 2 of 64 px",
        lambda: _resnet(64, 2, embedding_size=16, hidden_sizes=[64, 128, 256, 512]),
    ),
    "bert-base": ("BERT-base, batch 1 of 64 tokens", lambda: _bert(64, 1)),
    "bert-small": (
        "BERT, 6 layers of 256, 8,192 words, batch 4 of 64 tokens",
        lambda: _bert(
            64, 4, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024,
            vocab_size=8192,
        ),
    ),
    "gpt2": ("GPT-2 small, batch 1 of 64 tokens", lambda: _gpt2(64, 1)),
    "gpt2-small": (
        "GPT-2, 6 layers of 256, 8,192 words, batch 4 of 64 tokens",
        lambda: _gpt2(64, 4, n_embd=256, n_layer=6, n_head=4, vocab_size=8192),
    ),
    "resnet50-224": ("ResNet-50, batch 256 of 224 px, AMP, channels last", lambda: plain_models.resnet50(224, 256)),
    "gpt2-1024": ("GPT-2 small, batch 8 of 1,024 tokens, AMP", lambda: plain_models.gpt2(1024, 8)),
    "layers-7b": ("four layers as those of a 7B model, 2,048 tokens", lambda: plain_models.layers_7b(4, 2048, 1)),
}  # fmt: skip


def workload(name: str, device: torch.device, rank: int = 0) -> Workload:
    """Builds ``name`` on ``device``: weights from a fixed seed, the batch from ``rank``'s.

    ``name`` is one of ``MODELS``, or ``"module:factory SHAPE ..."``: the user's, as ``minddp tune`` takes it.
    """
    if ":" in name:
        return _users(name, device)
    if name not in MODELS:
        raise BenchmarkError(f"model {name!r} is not one of {', '.join(MODELS)}")
    torch.manual_seed(0)
    module, prepare = MODELS[name][1]()
    module.train().to(device)
    torch.manual_seed(1 + rank)
    return Workload(name, module, prepare(device))


def _users(name: str, device: torch.device) -> Workload:
    from minddp.cli.tune import TuneError, load_workload

    factory, *inputs = name.split()
    sys.path[:0] = [folder for folder in [os.getcwd()] if folder not in sys.path]
    torch.manual_seed(0)
    try:
        module, loss = load_workload(factory, inputs, device)
    except TuneError as error:
        raise BenchmarkError(str(error).replace("--model ", "--models ")) from error
    return Workload(name, module.train(), loss)
