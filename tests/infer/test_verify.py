"""Verification as the engine calls it: drafts of unequal lengths, processed rows, plain decoding without drafts."""

import pytest
import torch
from torch import Tensor

from spectrain.infer.sampling import LogitsRows, SamplingParams, SamplingTable, features_of, process_logits
from spectrain.infer.verify import verify_drafts


def processed(logits: Tensor, params: SamplingParams) -> Tensor:
    """Rows that all belong to one request; nothing is known but one prompt token."""
    settings = SamplingTable(2, logits.shape[1], torch.device("cpu"))
    settings.set(0, params, ())
    nowhere = torch.zeros(len(logits), dtype=torch.int64)
    tokens, lens = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int64)
    return process_logits(logits, LogitsRows(nowhere, nowhere), settings, tokens, lens, features_of([params]))


def rows_of(lengths: list[int]) -> Tensor:
    """cu_rows of requests with the given numbers of drafts."""
    return torch.tensor([0, *(length + 1 for length in lengths)]).cumsum(0).int()


def decode_chain(table: Tensor, params: SamplingParams, n: int, length: int, num_drafts: int, wrong: bool) -> Tensor:
    """n sampled sequences [n, length] of a Markov target, drafted for with its likeliest (or least likely) tokens."""
    chains, filled = torch.zeros(n, length + num_drafts + 1, dtype=torch.int64), torch.ones(n, dtype=torch.int64)
    best = table.argmin(-1) if wrong else table.argmax(-1)
    while int(filled.min()) < length:
        tokens = [chains.gather(1, filled[:, None] - 1)[:, 0]]
        for _ in range(num_drafts):
            tokens.append(best[tokens[-1]])
        rows = table[torch.stack(tokens, dim=1)].flatten(0, 1)
        drafts, temperature = torch.stack(tokens, dim=1)[:, 1:], torch.full((n,), params.temperature)
        cu_rows = rows_of([num_drafts] * n)
        out = verify_drafts(processed(rows, params), drafts, cu_rows, filled, temperature, torch.arange(n))
        for column in range(num_drafts + 1):
            takes = ((column < out.num_emitted) & (filled < chains.shape[1])).nonzero()[:, 0]
            chains[takes, filled[takes]] = out.token_ids[takes, column]
            filled[takes] += 1
    return chains[:, :length]


def table_of(vocab: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("wrong", [False, True], ids=["good drafts", "bad drafts"])
def test_greedy_equals_plain_decoding(wrong: bool) -> None:
    table = table_of(50)
    plain = decode_chain(table, SamplingParams(), 1, 20, 0, wrong)
    assert torch.equal(plain, decode_chain(table, SamplingParams(), 1, 20, 3, wrong))
    expected = [0]
    for _ in range(19):
        expected.append(int(table[expected[-1]].argmax()))
    assert plain[0].tolist() == expected


@pytest.mark.parametrize("wrong", [False, True], ids=["good drafts", "bad drafts"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.4, top_k=3),
        SamplingParams(temperature=1.2, top_p=0.7),
    ],
    ids=["temperature", "top-k", "top-p"],
)
def test_sampled_pairs_follow_the_processed_law(params: SamplingParams, wrong: bool) -> None:
    """Joint law of tokens 2 and 3 of the sequence, both inside drafted blocks, by chi-square over all cells."""
    n, table = 22_500, table_of(4)
    law = processed(table, params).softmax(-1)
    chains = decode_chain(table, params, n, 4, 2, wrong)
    joint = ((law[0] @ law)[:, None] * law).flatten()
    counts = torch.bincount(chains[:, 2] * 4 + chains[:, 3], minlength=16)
    assert counts[joint == 0].sum() == 0
    expected = joint[joint > 0].double() * n
    statistic = ((counts[joint > 0] - expected) ** 2 / expected).sum()
    p = float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))
    print(f"n={n} cells={len(expected)} p={p:.4f}")
    assert p > 1e-4


def test_unequal_lengths_use_their_own_rows() -> None:
    logits = torch.full((6, 5), 0.0)
    for row, token in enumerate((1, 2, 3, 4, 0, 2)):
        logits[row, token] = 1.0
    drafts, zeros = torch.tensor([[1, 2], [-1, -1], [0, 4]]), torch.zeros(3, dtype=torch.int64)
    out = verify_drafts(logits, drafts, rows_of([2, 0, 1]), zeros, torch.zeros(3), zeros)
    assert out.token_ids.tolist() == [[1, 2, 3], [4, -1, -1], [0, 2, -1]]
