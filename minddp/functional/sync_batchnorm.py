"""Batch normalization over the batch of all ranks, on any device that has a c10d backend.

Overview
    :class:`SyncBatchNorm` replaces ``BatchNorm1d/2d/3d`` (and ``torch.nn.SyncBatchNorm``);
    :func:`convert_sync_batchnorm` does so for a whole model. Two implementations compute the same:

    * :func:`batch_norm_reference`, a few lines of plain autograd over ``minddp.functional.all_reduce``.
      Read this one; it is also what a double backward runs.
    * ``_FastBatchNorm``, a hand-written forward and backward: one collective and two passes over the
      input going forward, one collective and four passes going back.

What always holds
    Every rank of the group calls the same layers in the same order, with any number of samples, none
    included: one collective in each training forward, and one in each backward that asks for the
    input's gradient. Statistics are float32 (float64 for float64 inputs) whatever the input is. No
    value is read back from the device, save on a rank whose batch has at most one value per channel.

Gradients
    A rank's loss depends on every rank's input through the statistics, and the sum over ranks of the
    losses is what is differentiated. As everywhere in data-parallel training the gradients of
    ``weight`` and ``bias`` stay local; DistributedDataParallel averages them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from ..functions import group_of, module_of
from ..messages import CommunicatesInForward, gather_objects, wait_for, work_on
from . import all_reduce
from .arguments import rank_in
from .transport import gather_rows

__all__ = ["SyncBatchNorm", "batch_norm_reference", "convert_sync_batchnorm"]


class GroupStatistics(NamedTuple):
    """What the whole group's batch looks like, the same on every rank.

    ``mean`` and ``var`` (biased) have shape (C,), ``total`` is the number of values per channel as a
    0-dimensional tensor; all three are float32, or float64 for float64 inputs.
    """

    mean: Tensor
    var: Tensor
    total: Tensor


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _per_channel(vector: Tensor, dim: int) -> Tensor:
    """A (C,) vector shaped to broadcast over an input with ``dim`` dimensions."""
    return vector.view(1, -1, *[1] * (dim - 2))


def _reduced_dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


# ---------------------------------------------------------------------------- the readable reference


def batch_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
) -> tuple[Tensor, GroupStatistics]:
    """Batch normalization over all ranks' inputs, as one would write it down.

    Args:
        x: (N, C, ...) floating-point input; N may differ between ranks and may be 0.
        weight: (C,) scale or None.
        bias: (C,) shift or None.
        eps: added to the variance.
        group: the process group; every rank of it must call.

    Returns:
        The normalized input, in x's dtype, and the group's statistics. Both may be differentiated
        any number of times.
    """
    dtype = _statistics_dtype(x.dtype)
    wide, dims = x.to(dtype), _reduced_dims(x)
    local_count = x.new_full((1,), x.numel() // x.shape[1], dtype=dtype)
    first = all_reduce(torch.cat([wide.sum(dims), local_count]), "sum", group)
    count = first[-1].detach()
    mean = first[:-1] / count.clamp(min=1)
    centered = wide - _per_channel(mean, x.dim())
    var = all_reduce(centered.square().sum(dims), "sum", group) / count.clamp(min=1)
    y = centered * _per_channel(torch.rsqrt(var + eps), x.dim())
    if weight is not None:
        y = y * _per_channel(weight.to(dtype), x.dim())
    if bias is not None:
        y = y + _per_channel(bias.to(dtype), x.dim())
    return y.to(x.dtype), GroupStatistics(mean, var, count)


# ------------------------------------------------------------------------------------ the fast path


def _local_statistics(x: Tensor) -> Tensor:
    """This rank's (mean, M2, count), packed into 2C + 1 values; M2 is the sum of squared deviations."""
    dtype = _statistics_dtype(x.dtype)
    channels, count = x.shape[1], x.numel() // x.shape[1]
    if count == 0:
        return x.new_zeros(2 * channels + 1, dtype=dtype)
    # The running statistics, left as they are by momentum 0, only set the result's dtype on CPU.
    unused = x.new_zeros(channels, dtype=dtype), x.new_zeros(channels, dtype=dtype)
    mean, var = torch.batch_norm_update_stats(x, *unused, 0.0)
    return torch.cat([mean, var * count, mean.new_full((1,), count)])


def _merge(packed: Tensor) -> GroupStatistics:
    """The group's statistics from one row per rank of :func:`_local_statistics`.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances" (1979), for any number of parts: deviations are taken from the common mean, so nothing
    cancels as it would in E[x^2] - E[x]^2. A rank without samples has count 0 and adds nothing.
    """
    channels = (packed.shape[1] - 1) // 2
    means, squares, counts = packed.split([channels, channels, 1], dim=1)
    count = counts.sum()
    divisor = count.clamp(min=1)
    mean = (means * counts).sum(0) / divisor
    var = (squares + counts * (means - mean).square()).sum(0) / divisor
    return GroupStatistics(mean, var, count)


def _gather_statistics(x: Tensor, group: Any) -> GroupStatistics:
    """One collective: every rank receives every rank's statistics and merges them in rank order."""
    local = _local_statistics(x)
    packed = local.new_empty(dist.get_world_size(group), local.numel())
    gather_rows(packed, local, group)
    return _merge(packed)


def _scale(weight: Tensor | None, stats: GroupStatistics) -> Tensor:
    return torch.ones_like(stats.mean) if weight is None else weight.to(stats.mean.dtype)


def _local_gradient_sums(grad: Tensor, x: Tensor, stats: GroupStatistics, eps: float) -> tuple[Tensor, Tensor]:
    """(sum of grad, sum of grad * normalized x) per channel: this rank's bias and weight gradients."""
    if x.numel() == 0:
        return torch.zeros_like(stats.mean), torch.zeros_like(stats.mean)
    # Batch norm in eval mode takes its statistics as constants; the gradients of its scale and shift
    # are exactly these two sums, in one pass.
    ones, wanted = torch.ones_like(stats.mean), [False, True, True]
    # CUDA's asserts that the saved mean and deviation are there, in eval mode too, and reads them before the others.
    saved = stats.mean, torch.rsqrt(stats.var + eps)
    _, scaled, plain = torch.ops.aten.native_batch_norm_backward(
        grad, x, ones, stats.mean, stats.var, *saved, False, eps, wanted
    )
    return plain, scaled


def _input_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, stats: GroupStatistics, eps: float, sums: Tensor
) -> Tensor:
    """The gradient of x from ``sums``, shape (2, C): the group's sums of dh and of dh * h.

    With h = (x - mean) / std and dh = weight * dy, Ioffe and Szegedy (2015, section 3) give

        dx = (dh - sum(dh) / total - h * sum(dh * h) / total) / std.
    """
    inverse = torch.rsqrt(stats.var + eps)
    average = sums / stats.total.clamp(min=1)
    scale, offset, slope = inverse * weight, -inverse * average[0], -inverse.square() * average[1]
    dim = x.dim()
    # x - mean first, in a pass of its own: folding the mean into the offset would cancel where the mean
    # is large beside the deviation.
    out = torch.sub(x, _per_channel(stats.mean, dim))
    torch.addcmul(_per_channel(offset, dim), out, _per_channel(slope, dim), out=out)
    return out.addcmul_(grad.to(out.dtype), _per_channel(scale, dim)).to(x.dtype)


class _FastBatchNorm(Function):
    """Normalizes over the group. Returns the output, then mean, variance and count (no gradients)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        stats = _gather_statistics(x, group)
        ctx.save_for_backward(x, weight, bias, *stats)
        ctx.mark_non_differentiable(*stats)
        ctx.eps, ctx.group = eps, group
        if x.numel() == 0:
            return torch.empty_like(x), *stats
        shift = torch.zeros_like(stats.mean) if bias is None else bias.to(stats.mean.dtype)
        return F.batch_norm(x, stats.mean, stats.var, _scale(weight, stats), shift, eps=eps), *stats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if torch.is_grad_enabled():
            return _FastBatchNorm._differentiable_backward(ctx, grad)
        x, weight, bias, *saved = ctx.saved_tensors
        stats = GroupStatistics(*saved)
        grad_bias, grad_weight = _local_gradient_sums(grad, x, stats, ctx.eps)
        grad_x = None
        if ctx.needs_input_grad[0]:
            scale = _scale(weight, stats)
            sums = torch.stack([grad_bias, grad_weight]) * scale
            work = dist.all_reduce(sums, group=ctx.group, async_op=True)
            wait_for(work, ctx.group, "the sums of gradients in SyncBatchNorm")
            grad_x = _input_gradient(grad, x, scale, stats, ctx.eps, sums)
        return (
            grad_x,
            grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            grad_bias.to(bias.dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )

    @staticmethod
    def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """backward(create_graph=True): the statistics become functions of x again, by the reference."""
        x, weight, bias = ctx.saved_tensors[:3]
        y, _ = batch_norm_reference(x, weight, bias, ctx.eps, ctx.group)
        wanted = [i for i in range(3) if ctx.needs_input_grad[i]]
        found = torch.autograd.grad(y, [(x, weight, bias)[i] for i in wanted], grad, create_graph=True)
        result: list[Tensor | None] = [None] * 5
        for i, gradient in zip(wanted, found, strict=True):
            result[i] = gradient
        return tuple(result)


# -------------------------------------------------------------------------------- checks and module

# Which group a layer's ranks have compared their channels in. Outside the module, so that it is neither
# pickled nor copied with it.
_compared: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def _compare_once(module: SyncBatchNorm, x: Tensor, group: Any) -> None:
    """Before a layer's first collective in a group: do all ranks hold the same channels and width?

    Raises:
        ValueError: on every rank, when they differ; a collective of unequal sizes would hang or abort.
    """
    seen = _compared.get(module)
    if seen is not None and seen() is group:
        return
    work_on(group, x.device)
    rows = gather_objects([x.shape[1], _statistics_dtype(x.dtype).itemsize], group)
    if any(row != rows[0] for row in rows):
        listed = ", ".join(
            f"rank {rank}: {channels} channels, float{8 * width} statistics"
            for rank, (channels, width) in enumerate(rows)
        )
        raise ValueError(
            f"SyncBatchNorm: the ranks of the group run layers that do not match ({listed}). "
            "Build the same model, and call its layers in the same order, on every rank."
        )
    _compared[module] = weakref.ref(group)


def _require_two_values(x: Tensor, count: Tensor, group: Any) -> None:
    """Raises on every rank when the group's batch has one value per channel (its variance is unknown).

    Only a rank with at most one value of its own can see a total of one, so only such a rank reads the
    count back from the device; with a total of one that is every rank.
    """
    if x.numel() // x.shape[1] <= 1 and count.item() == 1:
        raise ValueError(
            "SyncBatchNorm: expected more than one value per channel in the group's batch when training, got "
            f"one over all {dist.get_world_size(group)} ranks (input of shape {tuple(x.shape)} on rank "
            f"{dist.get_rank(group)}). Use a larger batch, or eval()."
        )


def _given(group: Any, function: str) -> Any:
    """``group``; raises if it is neither a process group nor None, nor what a rank outside of one gets for it; or if
    torch's collectives, which look it up, do not find it."""
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:  # unused on this rank: forward says so
        return group
    group = group_of(group, function)
    if dist.is_initialized():
        rank_in(group, function, "process_group", TypeError)
    return group


class SyncBatchNorm(_BatchNorm, CommunicatesInForward):
    """Batch normalization whose training statistics cover the batches of all ranks.

    Input and output have shape (N, C, ...) with at least two dimensions and any floating-point dtype; N
    may differ between ranks and may be 0. The output equals that of ``BatchNorm`` over the concatenated
    batch; so do gradients (of the sum of the ranks' losses) and running statistics.

    It works on CPU as well as on CUDA, with a group of any c10d backend that covers the input's device.
    In eval mode, without an initialized default process group, or in a group of one, it is plain batch
    normalization. Parameters, buffers and state dict are those of ``torch.nn.BatchNorm1d/2d/3d`` and
    ``torch.nn.SyncBatchNorm``, so checkpoints load both ways. Differentiable twice and more often. Under
    torch.compile the synchronized part runs uncompiled, at a graph break (so not with fullgraph=True).

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: weight of the new value in the running statistics; None for their plain average.
        affine: learn a scale and a shift per channel.
        track_running_stats: keep running statistics for eval; without them eval normalizes by the
            local batch.
        process_group: the ranks to share statistics with; None for the default group. Every rank of it
            must run the layer in training, as often.
        device: where parameters and buffers are made.
        dtype: their dtype.
        bias: False for an affine layer that has no shift.

    Raises:
        TypeError: ``process_group`` is no process group.
        ValueError: from forward, if the input has less than two dimensions, another number of channels
            than ``num_features``, or no floating-point dtype; if the group does not include this rank; and
            on all ranks together, if the group's batch has only one value per channel, or if at a layer's
            first training step the ranks' channels or dtypes do not match.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if affine and not bias:  # torch before 2.12 has no such argument
            self.register_parameter("bias", None)
        self.process_group = _given(process_group, "SyncBatchNorm")

    def reset_parameters(self) -> None:
        """Scale 1, shift 0, running statistics as at the start."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: expected an (N, C, ...) input, got one of {tuple(input.shape)}")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: expected {self.num_features} channels in dimension 1 (num_features), "
                f"got an input of shape {tuple(input.shape)}"
            )
        if not input.is_floating_point():
            raise ValueError(f"SyncBatchNorm: expected a floating-point input, got {input.dtype}")

    def _group_to_share_with(self) -> Any:
        """The process group of this forward, or None when there is nothing to synchronize."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if self.process_group is None else self.process_group
        world_size = dist.get_world_size(group)
        if world_size < 1:
            raise ValueError(
                f"SyncBatchNorm: rank {dist.get_rank()} is not in the layer's process_group; "
                "give each rank's layer a group that includes it"
            )
        return group if world_size > 1 else None

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes ``input``, of shape (N, C, ...); a collective in training mode."""
        group = self._group_to_share_with()
        if group is None:
            return super().forward(input)
        self._check_input_dim(input)
        return self._normalize_over_group(input, group)

    @torch._disable_dynamo  # torch.compiler.disable would import all of torch._dynamo here and now
    def _normalize_over_group(self, input: Tensor, group: Any) -> Tensor:
        _compare_once(self, input, group)
        y, *stats = _FastBatchNorm.apply(input, self.weight, self.bias, self.eps, group)
        self._absorb(input, GroupStatistics(*stats), group)
        return y

    def _absorb(self, input: Tensor, stats: GroupStatistics, group: Any) -> None:
        """Takes the group's statistics into the running ones."""
        _require_two_values(input, stats.total, group)
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        factor: Any = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = self.num_batches_tracked.to(stats.mean.dtype).reciprocal()
        unbiased = stats.var * (stats.total / (stats.total - 1).clamp(min=1))
        for running, value in ((self.running_mean, stats.mean), (self.running_var, unbiased)):
            before = running.to(value.dtype)
            # An empty batch has no statistics to take in.
            running.copy_(torch.lerp(before, torch.where(stats.total > 0, value, before), factor))

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """:func:`convert_sync_batchnorm`, under the name that ``torch.nn.SyncBatchNorm`` gives it."""
        return convert_sync_batchnorm(module, process_group)


def convert_sync_batchnorm(module: nn.Module, process_group: Any = None) -> nn.Module:
    """Replaces every batch-norm layer in ``module`` by a :class:`SyncBatchNorm`.

    ``BatchNorm1d/2d/3d`` and ``torch.nn.SyncBatchNorm`` are replaced, in place in the tree. The new layer
    takes over all that the old one has: the same Parameter and buffer objects (an optimizer made before
    stays valid), hooks, qconfig, training mode, any other attribute. A layer that is used in several
    places stays one layer.

    Args:
        module: the model, or a batch-norm layer.
        process_group: what the new layers synchronize over; None for the default group.

    Returns:
        ``module``; or the new layer, when ``module`` itself is a batch-norm layer.

    Raises:
        TypeError: ``module`` is no module, or ``process_group`` no process group.
        ValueError: for a lazy layer that has not seen an input yet, for a parametrized one, and for a
            subclass with a forward of its own, which the conversion would drop (as an activation fused
            into it). Nothing is changed then.
    """
    for name, layer in module_of(module, "convert_sync_batchnorm").named_modules():
        if isinstance(layer, _BatchNorm):
            _require_convertible(name, layer)
    return _convert(module, _given(process_group, "convert_sync_batchnorm"), {})


def _require_convertible(name: str, layer: _BatchNorm) -> None:
    label = f"'{name}' ({type(layer).__name__})" if name else type(layer).__name__
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
        raise ValueError(
            f"convert_sync_batchnorm: {label} is lazy and has not seen an input; run one forward pass first"
        )
    if parametrize.is_parametrized(layer):
        raise ValueError(f"convert_sync_batchnorm: {label} is parametrized; remove the parametrizations")
    known = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
    if type(layer).forward not in known:
        raise ValueError(
            f"convert_sync_batchnorm: {label} has a forward of its own, which a SyncBatchNorm would not run; "
            "replace it by a plain batch norm followed by what it adds, then convert"
        )


def _convert(module: nn.Module, process_group: Any, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in done:
        return done[module]
    result = _converted_layer(module, process_group) if isinstance(module, _BatchNorm) else module
    done[module] = result
    for name, child in module._modules.items():
        if child is not None:
            result._modules[name] = _convert(child, process_group, done)
    return result


def _converted_layer(layer: _BatchNorm, process_group: Any) -> SyncBatchNorm:
    result = SyncBatchNorm.__new__(SyncBatchNorm)
    # The very same dictionaries of hooks, so that the handles users hold keep removing them.
    result.__dict__.update(layer.__dict__)
    result.process_group = process_group
    return result
