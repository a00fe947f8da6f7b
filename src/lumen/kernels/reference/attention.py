"""Causal attention over rows that hold one or several examples, in plain torch made for a compiler.

For one head with queries Q, keys K and values V [T, D]:

    P = softmax(scale · Q Kᵀ + mask),  O = P V

Query *i* sees key *j* where j ≤ i, both belong to the same example, and i − j < window in a sliding-window layer.

Three choices make it cheap on a processor without a fused kernel of its own:

* **Blocks of queries.**  A block of queries [s, e) needs the keys [0, e) only; what lies right of it is never computed.
  With T / block blocks that leaves (1 + block / T) / 2 of the square: 62 % for 512 and 128.
* **Grouped heads by shape, not by copying.**  With G query heads per key head the G · block queries that share keys are
  rows of one product, so keys and values are never repeated.
* **The mask is arithmetic.**  It is written as comparisons of positions and of `segment_ids`, which a compiler fuses
  into the softmax; a [T, T] mask of the whole row never exists.

Softmax is fp32 whatever the dtype of the products.  Under torch.compile the block loop unrolls, so the number of tokens
must be fixed; where it varies, `block=None` takes the row in one piece.  Uncompiled it computes the same, slower than
SDPA.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_ids: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    block: int | None = 128,
) -> Tensor:
    """Attention output [B, H, T, D] in the query's dtype.

    query:       [B, H, T, D]; key, value: [B, K, T, D] with H a multiple of K (grouped heads).
    segment_ids: [B, T] integers, equal inside an example (padding sees padding); None: one example a row.
    scale:       multiplies the scores.  window: tokens that a sliding-window layer sees, itself included.
    softcap:     c · tanh(score / c) after scaling (Gemma 2).  block: queries of a block; None: all.
    """
    batch, heads, length, size = query.shape
    groups = key.shape[1]
    share = heads // groups
    grouped = query.reshape(batch, groups, share, length, size)
    place = torch.arange(length, device=query.device)
    step = length if block is None else block
    outputs = []
    for start in range(0, length, step):
        stop = min(length, start + step)
        first = 0 if window is None else max(0, start - window + 1)
        rows, columns = stop - start, stop - first
        q = grouped[:, :, :, start:stop].reshape(batch * groups, share * rows, size)
        k = key[:, :, first:stop].reshape(batch * groups, columns, size)
        v = value[:, :, first:stop].reshape(batch * groups, columns, size)
        scores = torch.bmm(q, k.transpose(1, 2)).view(batch, groups, share, rows, columns).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        i, j = place[start:stop, None], place[None, first:stop]
        seen = j <= i
        if window is not None:
            seen = seen & (i - j < window)
        if segment_ids is not None:
            same = segment_ids[:, start:stop, None] == segment_ids[:, None, first:stop]
            seen = (seen & same)[:, None, None]
        # every query sees itself, so no row is empty and the softmax stays finite
        p = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1).to(query.dtype)
        out = torch.bmm(p.view(batch * groups, share * rows, columns), v)
        outputs.append(out.view(batch, groups, share, rows, size))
    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)
    return whole.reshape(batch, heads, length, size)
