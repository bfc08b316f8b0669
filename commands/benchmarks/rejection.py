"""The rejection pipeline against one read of its logits and against its PyTorch twin, in every mode."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import dispatch, reference
from ...kernels.records import RejectionInputs, VerifyMode
from .record import Check, Record
from .timing import time_calls

ODDS = 17.0  # logit of a point-mass draft: likely to be kept


class Case(NamedTuple):
    """A rule and the kind of drafts it judges."""

    mode: VerifyMode
    law: bool  # drafts carry the full law they were drawn from
    temperature: float

    @property
    def name(self) -> str:
        drafts = "full laws" if self.law else "point masses"
        return "greedy" if self.temperature == 0 else f"{self.mode.value}, {drafts}"


CASES = (
    Case(VerifyMode.STANDARD, False, 1.0),
    Case(VerifyMode.STANDARD, False, 0.0),
    Case(VerifyMode.STANDARD, True, 1.0),
    Case(VerifyMode.BLOCK, True, 1.0),
    Case(VerifyMode.SYNTHETIC, False, 1.0),
)


def run(record: Record, batch: int, num_draft_tokens: int, vocab_size: int, dtype: torch.dtype) -> None:
    """Adds a row a case; raises BenchError at the first whose tokens differ from the twin's."""
    device = record.device
    size = batch * (num_draft_tokens + 1) * vocab_size * dtype.itemsize
    for case in CASES:
        inputs = [_draw(i, case, batch, num_draft_tokens, vocab_size, dtype, device) for i in range(3)]
        check = _compare(case, inputs)
        record.require(check)
        read_ms = _one_read_ms([one.target_logits for one in inputs])
        pipeline = time_calls([lambda x=x: dispatch.verify(x) for x in inputs], device)
        twin = time_calls([lambda x=x: reference.rejection.verify(x) for x in inputs], device, calls=3, recorded=False)
        row: dict[str, Any] = {
            "rejection": case.name,
            "batch": batch,
            "num_draft_tokens": num_draft_tokens,
            "vocab_size": vocab_size,
            "logits": str(dtype).removeprefix("torch."),
            "us": pipeline.ms * 1000,
            "spread": pipeline.spread,
            "one_read_us": read_ms * 1000,
            "to_one_read": pipeline.ms / read_ms,
            "twin_us": twin.ms * 1000,
            "twin_to_pipeline": twin.ms / pipeline.ms,
            "read_tb_per_s": size / read_ms / 1e9,
        }
        record.add(row, [check])
        del inputs
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _one_read_ms(logits: list[Tensor]) -> float:
    """The faster, and so the harder measure, of summing them and of half a copy."""
    device, spare = logits[0].device, torch.empty_like(logits[0])
    copy = time_calls([lambda x=x: spare.copy_(x) for x in logits], device)
    total = time_calls([lambda x=x: x.sum(dtype=torch.float32) for x in logits], device)
    return min(copy.ms / 2, total.ms)


def _compare(case: Case, inputs: list[RejectionInputs]) -> Check:
    """Sums in another order differ in their last bit, so that one request in very many may draw another token."""
    wrong = emitted = 0
    for one in inputs:
        ours, twin = dispatch.verify(one), reference.rejection.verify(one)
        same = (ours.token_ids == twin.token_ids).all(1) & (ours.num_emitted == twin.num_emitted)
        wrong += int((~same).sum()) + int((ours.failed != twin.failed).sum())
        emitted += int(twin.num_emitted.sum())
    total = sum(len(one.positions) for one in inputs)
    passed = wrong <= (0 if inputs[0].target_logits.device.type == "cpu" else 1)
    return Check(
        f"rejection, {case.name} = twin",
        passed,
        f"{total - wrong} of {total} requests equal, {emitted / total:.2f} tokens each",
    )


def _draw(
    seed: int, case: Case, batch: int, k: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> RejectionInputs:
    generator = torch.Generator(device).manual_seed(seed)
    logits = 3 * torch.randn(batch, k + 1, vocab_size, generator=generator, device=device)
    requests = torch.arange(batch, device=device)
    drafts, laws = torch.empty(batch, k, dtype=torch.int64, device=device), []
    for j in range(k):
        if case.law:
            nearby = logits[:, j] + 0.3 * torch.randn(batch, vocab_size, generator=generator, device=device)
            laws.append(nearby.log_softmax(-1))
            drafts[:, j] = torch.multinomial(laws[-1].exp(), 1, generator=generator)[:, 0]
        else:
            drafts[:, j] = torch.randint(vocab_size, (batch,), generator=generator, device=device)
            logits[requests, j, drafts[:, j]] = ODDS
    rates: Tensor | None = None
    if case.mode is VerifyMode.SYNTHETIC:
        rates = torch.full((k,), 0.8, device=device)
    return RejectionInputs(
        logits.view(-1, vocab_size).to(dtype),
        drafts,
        torch.arange(batch + 1, device=device, dtype=torch.int32) * (k + 1),
        torch.randint(4000, (batch,), generator=generator, device=device),
        torch.full((batch,), case.temperature, device=device),
        torch.randint(2**60, (batch,), generator=generator, device=device),
        torch.stack(laws, dim=1) if case.law else None,
        mode=case.mode,
        rates=rates,
    )
