"""Drafts as a record: some requests of it, and buffers that take over others' values."""

import torch

from spectrain.infer.proposers.base import Drafts


def drafts(batch: int, seed: int) -> Drafts:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(9, (batch, 3), generator=generator)
    laws = torch.rand(batch, 3, 5, generator=generator)
    return Drafts(ids, ids.sum(1), laws, torch.arange(5), laws.amax(-1), at_most=ids.sum(1).tolist())


def test_some_requests_keep_all_that_is_theirs() -> None:
    every, places = drafts(4, 0), [3, 1]
    some = every.of(torch.tensor(places))
    for i, place in enumerate(places):
        for name in ("token_ids", "lengths", "log_probs", "confidence"):
            assert torch.equal(getattr(some, name)[i], getattr(every, name)[place]), name
    assert some.token_map is every.token_map and some.at_most is None
    bare = every._replace(log_probs=None, confidence=None).of(torch.tensor(places))
    assert bare.log_probs is None and bare.confidence is None


def test_buffers_take_over_every_value_and_stay() -> None:
    kept, other = drafts(4, 0), drafts(4, 1)
    places = [kept.token_ids.data_ptr(), kept.lengths.data_ptr(), kept.log_probs.data_ptr(), kept.confidence.data_ptr()]
    kept.copy_(other)
    values = (kept.token_ids, kept.lengths, kept.log_probs, kept.confidence)
    assert [value.data_ptr() for value in values] == places
    for value, new in zip(values, (other.token_ids, other.lengths, other.log_probs, other.confidence), strict=True):
        assert torch.equal(value, new)
