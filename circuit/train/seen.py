"""Attention of rows over the true rows of their text and over a few rows of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Place = tuple[torch.Tensor, torch.Tensor]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def seen(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: Place, scale: float,
    own: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:  # fmt: skip
    """Attention [m, h, d] of rows `q` [m, h, d] at places `at` (text, index).

    Row i sees keys and values [s, l, g, d] up to its index, and its own rows [m, g, d].
    """
    flat = [tensor for pair in own for tensor in pair]
    return _Seen.apply(q, keys, values, at, scale, *flat)


class _Seen(torch.autograd.Function):
    """Attention over the true rows is torch's own; rows of chains are added to its result.

    The backward of that attention is a function of the result and of the mass (the logarithm of the
    sum of exponentials) of each row. Given those over all that a row sees, it yields the gradients
    of its part of it.
    """

    @staticmethod
    def forward(ctx, q, keys, values, at, scale, *own):
        rows, heads, dim = q.shape
        groups = keys.shape[2]
        dense = _dense(q, at, keys.shape[:2])
        wide = [x.transpose(1, 2).repeat_interleave(heads // groups, 1) for x in (keys, values)]
        out, mass = _forward(dense, *wide, is_causal=True, scale=scale)
        result, total = out.transpose(1, 2)[at], mass.transpose(1, 2)[at]
        grouped = q.view(rows, groups, -1, dim)
        for k, v in zip(own[::2], own[1::2]):
            score = (grouped * k[:, :, None]).sum(-1).view(rows, heads) * scale
            both = torch.logaddexp(total, score)
            spread = v[:, :, None].expand(grouped.shape).reshape(q.shape)
            part = (score - both).exp()[..., None]
            result = torch.lerp(result, spread, part)
            total = both
        ctx.at, ctx.scale, ctx.groups = at, scale, groups
        ctx.save_for_backward(q, dense, *wide, result, mass, total, *own)
        return result

    @staticmethod
    def backward(ctx, gradient):
        q, dense, keys, values, result, mass, total, *own = ctx.saved_tensors
        at, scale, (rows, _, dim) = ctx.at, ctx.scale, q.shape
        texts, _, length, _ = keys.shape
        out, asked = (_dense(x, at, (texts, length)) for x in (result, gradient))
        whole = mass.transpose(1, 2).clone()
        whole[at] = total
        parts = _backward(
            asked, dense, keys, values, out, whole.transpose(1, 2), 0.0, True, scale=scale
        )
        q_gradient = parts[0].transpose(1, 2)[at]
        shape = (texts, ctx.groups, -1, length, dim)
        true = [x.reshape(shape).sum(2).transpose(1, 2) for x in parts[1:]]
        grouped, wanted = (x.view(rows, ctx.groups, -1, dim) for x in (q, gradient))
        level = (gradient * result).sum(-1).view(rows, ctx.groups, -1)
        own_gradients = []
        for k, v in zip(own[::2], own[1::2]):
            score = (grouped * k[:, :, None]).sum(-1) * scale
            share = (score - total.view(score.shape)).exp()
            by_score = share * ((wanted * v[:, :, None]).sum(-1) - level) * scale
            q_gradient += (by_score[..., None] * k[:, :, None]).view(q.shape)
            own_gradients.append((by_score[..., None] * grouped).sum(2))
            own_gradients.append((share[..., None] * wanted).sum(2))
        return q_gradient, *true, None, None, *own_gradients


def _dense(x: torch.Tensor, at: Place, shape: Sequence[int]) -> torch.Tensor:
    """Rows of `x` [m, h, d] at their places in zeros, [s, h, l, d]."""
    dense = x.new_zeros(*shape, *x.shape[1:])
    dense[at] = x
    return dense.transpose(1, 2)
