"""Losses and a layer that look at the whole batch, however many ranks share it.

Each is its authors' formula with the sums over the batch taken over the ranks by ``minddp.functional``, and
equals one process that holds the whole batch: values, and the gradient of every parameter.

How to train with them
    Each rank returns a loss of its own such that the *mean of the ranks' losses* is the loss of the whole
    batch. DDP averages gradients, so ``loss.backward()`` under DDP gives the gradient of the whole batch's
    loss, if every rank has as many samples; with uneven shares use ``reduction="weighted"``. That holds as
    well where every rank computes the same, whole loss: the mean of N equal losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from minddp import functional as F

__all__ = ["MinibatchStdDev", "barlow_twins", "clip", "nt_xent"]


class MinibatchStdDev(nn.Module):
    """Appends one channel: how much features vary over the whole batch (Karras et al., "Progressive Growing
    of GANs", 2018, section 3).

    The standard deviation over the batch of each of the C x H x W positions (biased, ``eps`` under the
    root), averaged over the positions: one number for all samples of all ranks.

    Args:
        group: the ranks that share the batch. A group of its own keeps its collectives apart from DDP's.
        eps: added to the variance, so that the root has a derivative at 0.

    Shapes: ``(B, C, H, W)`` to ``(B, C + 1, H, W)``; B may be 1, and differ between ranks.
    """

    def __init__(self, group: Any = None, eps: float = 1e-8):
        super().__init__()
        self.group, self.eps = group, eps

    def forward(self, x: Tensor) -> Tensor:
        _, variance = _moments(x, self.group)
        deviation = (variance + self.eps).sqrt().mean()
        return torch.cat([x, deviation.expand(x.shape[0], 1, *x.shape[2:])], dim=1)


def _moments(x: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over the rows of all ranks, in two passes: stable where mean >> deviation."""
    count = F.all_reduce(x.new_tensor(float(x.shape[0])), group=group)
    mean = F.all_reduce(x.sum(0), group=group) / count
    return mean, F.all_reduce((x - mean).square().sum(0), group=group) / count


def nt_xent(z1: Tensor, z2: Tensor, temperature: float = 0.5, group: Any = None) -> Tensor:
    """SimCLR's loss (Chen et al., "A Simple Framework for Contrastive Learning", 2020, equation 1).

    Every sample's two views attract; each of the 2B views of the whole batch repels all others.

    Args:
        z1, z2: ``(b, d)``: this rank's samples, seen twice; b may differ between ranks.
        temperature: of the softmax.
        group: the ranks that share the batch.

    Returns:
        The mean over this rank's 2b views.
    """
    ours = normalize(torch.cat([z1, z2]), dim=1)
    shares = F.all_gather(ours, group, concat=False)
    first = sum(len(share) for share in shares[: dist.get_rank(group)])
    logits = ours @ torch.cat(shares).T / temperature
    here = torch.arange(len(ours), device=ours.device)
    partner = (here + len(z1)) % len(ours)
    itself = nn.functional.one_hot(first + here, logits.shape[1]).bool()
    return cross_entropy(logits.masked_fill(itself, float("-inf")), first + partner)


def clip(image: Tensor, text: Tensor, scale: Tensor, local_loss: bool = True, group: Any = None) -> Tensor:
    """CLIP's loss (Radford et al., "Learning Transferable Visual Models", 2021, figure 3).

    Args:
        image, text: ``(b, d)``: this rank's pairs.
        scale: a scalar, the temperature's inverse.
        local_loss: True compares this rank's pairs with all B, ``b x B`` logits. False computes the whole
            ``B x B`` loss on every rank: the same training for N times the work.
        group: the ranks that share the batch.

    Returns:
        The mean over this rank's pairs, or over all pairs.
    """
    image, text = normalize(image, dim=1), normalize(text, dim=1)
    images, texts = F.all_gather(image, group, concat=False), F.all_gather(text, group, concat=False)
    first = sum(len(share) for share in images[: dist.get_rank(group)]) if local_loss else 0
    if not local_loss:
        image, text = torch.cat(images), torch.cat(texts)
    partner = first + torch.arange(len(image), device=image.device)
    of_images = cross_entropy(scale * image @ torch.cat(texts).T, partner)
    of_texts = cross_entropy(scale * text @ torch.cat(images).T, partner)
    return (of_images + of_texts) / 2


def barlow_twins(
    z1: Tensor, z2: Tensor, weight: float = 5e-3, eps: float = 1e-5, group: Any = None
) -> Tensor:
    """The Barlow Twins loss (Zbontar et al., "Self-Supervised Learning via Redundancy Reduction", 2021,
    equation 1): the two views' cross-correlation over the whole batch, compared with the identity.

    Only sums over rows cross ranks: d x d numbers, whatever the batch.

    Args:
        z1, z2: ``(b, d)``: this rank's samples, seen twice; b may differ between ranks.
        weight: of the off-diagonal terms.
        eps: added to the variances.
        group: the ranks that share the batch.

    Returns:
        The whole batch's loss, the same on all ranks.
    """
    count = F.all_reduce(z1.new_tensor(float(z1.shape[0])), group=group)
    correlation = F.all_reduce(_standardized(z1, eps, group).T @ _standardized(z2, eps, group), group=group)
    correlation = correlation / count
    diagonal = correlation.diagonal()
    off_diagonal = correlation - torch.diag(diagonal)
    return (1 - diagonal).square().sum() + weight * off_diagonal.square().sum()


def _standardized(z: Tensor, eps: float, group: Any) -> Tensor:
    mean, variance = _moments(z, group)
    return (z - mean) / (variance + eps).sqrt()
