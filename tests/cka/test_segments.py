"""Two tokenizers are aligned by the characters at which tokens of both end."""

from __future__ import annotations

import pytest
import torch

from cka import InputError, align_tokens, cka_from_features


def tokens(text: str, sizes: list[int], special: int = 1) -> torch.Tensor:
    """Return offsets of tokens with these lengths, with special tokens in front."""
    ends = torch.tensor(sizes).cumsum(0)
    assert ends[-1] <= len(text)
    offsets = torch.stack([ends - torch.tensor(sizes), ends], 1)
    return torch.cat([torch.zeros(special, 2, dtype=torch.long), offsets])


def features_of(offsets: torch.Tensor, of_characters: torch.Tensor) -> torch.Tensor:
    """Return the sum of the features of a token's characters."""
    return torch.stack([of_characters[start:end].sum(0) for start, end in offsets.tolist()])


def test_pieces_end_where_tokens_of_both_end():
    """Special tokens, padding and what follows the last common end are left out."""
    text = "characterwise"
    one, other = tokens(text, [4, 5, 2, 2]), tokens(text, [2, 7, 4, 0], special=2)
    x, y = torch.arange(5.0)[None, :, None], torch.arange(6.0)[None, :, None]
    rows_x, rows_y = align_tokens(x, one[None], y, other[None])
    # Both end at 9 and at 13: tokens 1, 2 and 3, 4 of one; tokens 2, 3 and 4 of the other.
    assert rows_x.flatten().tolist() == [1.5, 3.5]
    assert rows_y.flatten().tolist() == [2.5, 4.0]
    cut = align_tokens(x[:, :4], one[None, :4], y, other[None])
    assert [each.flatten().tolist() for each in cut] == [[1.5], [2.5]]


def test_equal_tokenizers_keep_every_token():
    """With one tokenizer on both sides each token is a sample, and CKA is that of the tokens."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.stack([tokens("x" * 40, [3] * 10), tokens("x" * 40, [2] * 10)])
    x = torch.randn(2, 11, 6, generator=generator)
    y = torch.tanh(x @ torch.randn(6, 5, generator=generator))
    rows = align_tokens(x, offsets, y, offsets)
    assert torch.equal(rows[0], x[:, 1:].flatten(0, 1))
    expected = cka_from_features(x[:, 1:].flatten(0, 1), y[:, 1:].flatten(0, 1))
    assert float(cka_from_features(*rows)) == pytest.approx(float(expected))


def test_related_models_are_similar_in_spite_of_their_tokenizers():
    """Features that are sums over characters agree in common pieces, not in tokens by number."""
    generator = torch.Generator().manual_seed(1)
    characters = torch.randn(240, 8, generator=generator)
    text = "x" * 240
    one, other = tokens(text, [2] * 120), tokens(text, [3] * 80)
    x, y = features_of(one, characters)[None], features_of(other, characters)[None]
    aligned = align_tokens(x, one[None], y, other[None])
    assert len(aligned[0]) == 40
    assert float(cka_from_features(*aligned)) > 0.99
    assert float(cka_from_features(x[0, :81], y[0])) < 0.5


@pytest.mark.parametrize(
    ("x", "offsets", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3, 2), r"must have shape \(n, t, d\) and offsets"),
        (torch.zeros(1, 3, 4), torch.zeros(1, 2, 2), r"got \(1, 3, 4\) and \(1, 2, 2\)"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, 2), "got 2 and 1 texts; pass"),
        (torch.zeros(1, 3, 4), torch.zeros(1, 3, 2), "no token of one model ends at the same"),
    ],
)
def test_texts_that_do_not_belong_together_are_an_error(x, offsets, message):
    """Shapes, numbers of texts and characters must fit."""
    with pytest.raises(InputError, match=message):
        align_tokens(x, offsets, torch.zeros(1, 3, 4), torch.tensor([[[0, 1], [1, 2], [2, 3]]]))
