"""Tokens of two tokenizers as samples: features of the pieces of text that both cut out alike."""

from __future__ import annotations

import torch
from torch import Tensor

from cka.errors import InputError


def align_tokens(
    x: Tensor, offsets_x: Tensor, y: Tensor, offsets_y: Tensor
) -> tuple[Tensor, Tensor]:
    """Return features of the same pieces of text from two models with different tokenizers.

    Where tokens of both end at the same character, a piece of text ends. The features of a piece
    are the mean of the tokens in it, so that its rows in both results are the same sample.

    >>> x, y = torch.tensor([[[1.0], [3.0], [5.0]]]), torch.tensor([[[7.0], [9.0]]])
    >>> un_do_able = torch.tensor([[[0, 2], [2, 4], [4, 8]]])  # "un" "do" "able"
    >>> undo_able = torch.tensor([[[0, 4], [4, 8]]])  # "undo" "able"
    >>> rows_x, rows_y = align_tokens(x, un_do_able, y, undo_able)
    >>> rows_x.flatten().tolist(), rows_y.flatten().tolist()
    ([2.0, 5.0], [7.0, 9.0])

    Args:
        x: features of tokens of n texts, (n, t, d).
        offsets_x: first character of each token and the one behind its last, (n, t, 2), as
            tokenizers return with ``return_offsets_mapping=True``. Tokens without a character
            (special tokens, padding) have two equal numbers, and are left out.
        y: features of the other model's tokens of the same texts, (n, u, e).
        offsets_y: their characters, (n, u, 2).

    Returns:
        Rows (s, d) and (s, e) of the s pieces of all texts, for :func:`cka.cka_from_features` and
        :func:`cka.measure_from_features`.

    Raises:
        InputError: if shapes do not belong together, or no piece is common to both.
    """
    for features, offsets in ((x, offsets_x), (y, offsets_y)):
        if features.ndim != 3 or tuple(offsets.shape) != (*features.shape[:2], 2):
            raise InputError(
                f"features of tokens must be (n, t, d) and offsets (n, t, 2), got "
                f"{tuple(features.shape)} and {tuple(offsets.shape)}"
            )
    if len(x) != len(y):
        raise InputError(
            f"got {len(x)} and {len(y)} texts; pass the tokens of the same texts in the same order"
        )
    pieces = [_pieces_of_text(*texts) for texts in zip(x, offsets_x, y, offsets_y, strict=True)]
    rows_x, rows_y = (torch.cat(side) for side in zip(*pieces, strict=True))
    if not len(rows_x):
        raise InputError(
            "no token of one model ends at the same character as one of the other; pass offsets "
            "of the same texts, as from return_offsets_mapping=True"
        )
    return rows_x, rows_y


def _pieces_of_text(
    x: Tensor, offsets_x: Tensor, y: Tensor, offsets_y: Tensor
) -> tuple[Tensor, Tensor]:
    ends = [
        offsets[:, 1].masked_fill(offsets[:, 0] >= offsets[:, 1], -1).to("cpu")
        for offsets in (offsets_x, offsets_y)
    ]
    common = ends[0][torch.isin(ends[0], ends[1])].unique()
    common = common[common >= 0]
    means = [_means(*side, common) for side in zip((x, y), ends, strict=True)]
    return means[0], means[1]


def _means(features: Tensor, ends: Tensor, common: Tensor) -> Tensor:
    """Return the mean of the tokens of each piece, (s, d): those that end behind the one before."""
    piece = torch.searchsorted(common, ends)
    # A token behind the last common end, as in a truncated text, is in no piece.
    inside = (ends >= 0) & (piece < len(common))
    piece, tokens = piece[inside].to(features.device), features[inside.to(features.device)]
    dtype = torch.float32 if features.itemsize < 4 else features.dtype
    sums = torch.zeros(len(common), features.shape[1], dtype=dtype, device=features.device)
    sums.index_add_(0, piece, tokens.to(dtype))
    counts = torch.bincount(piece, minlength=len(common)).clamp(min=1)
    return sums / counts[:, None]
