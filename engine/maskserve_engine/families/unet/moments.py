"""Means and variances of GroupNorm's groups, over parts of a map that are put together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and variance of GroupNorm's groups over some positions of a map, float32."""

    count: int
    mean: Tensor
    variance: Tensor
    """[p, groups] population variance."""

    @classmethod
    def of(cls, x: Tensor, groups: int) -> Moments:
        """Return the moments of all positions of [p, C, h, w]."""
        variance, mean = torch.var_mean(
            x.unflatten(1, (groups, -1)).flatten(2).float(), dim=2, correction=0
        )
        return cls(x.shape[2] * x.shape[3], mean, variance)

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both parts together (Chan et al.: no large sums are subtracted)."""
        count = self.count + other.count
        share, mean_change = other.count / count, other.mean - self.mean
        variance = torch.lerp(self.variance, other.variance, share)
        return Moments(
            count,
            torch.add(self.mean, mean_change, alpha=share),
            torch.addcmul(variance, mean_change, mean_change, value=share * (1 - share)),
        )

    def __sub__(self, part: Moments) -> Moments:
        """Return the moments of the positions outside `part`, of which there must be some."""
        count = self.count - part.count
        share = part.count / self.count
        mean = torch.sub(self.mean, part.mean, alpha=share).div_(1 - share)
        mean_change = part.mean - mean
        variance = torch.sub(self.variance, part.variance, alpha=share)
        variance.addcmul_(mean_change, mean_change, value=-share * (1 - share))
        return Moments(count, mean, variance.div_(1 - share).clamp_min_(0.0))

    def of_passes(self, passes: slice) -> Moments:
        return Moments(self.count, self.mean[passes], self.variance[passes])


def normalise(norm: nn.GroupNorm, x: Tensor, moments: Moments) -> Tensor:
    """Apply a GroupNorm to [p, C, h, w] with given moments for each pass."""
    passes, channels = x.shape[:2]
    group_channels = channels // norm.num_groups
    # A batch norm of every pass's own channels: one kernel, float32 inside whatever x is.
    mean, variance = (
        part.repeat_interleave(group_channels, dim=1).flatten()
        for part in (moments.mean, moments.variance)
    )
    weight, bias = (part.float().repeat(passes) for part in (norm.weight, norm.bias))
    flat = x.reshape(1, passes * channels, *x.shape[2:])
    return F.batch_norm(flat, mean, variance, weight, bias, eps=norm.eps).view_as(x)
