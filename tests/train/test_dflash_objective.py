"""DFlash's objective against a drafter that shares no code with it: logits, losses, leaks, anchors, reduction."""

import math
import warnings

import pytest
import torch

from spectrain.heads.dflash import DFlashHead
from spectrain.tests.fresh import loud_head
from spectrain.tests.train.blocks import BlockDrafter, block_batch, block_config
from spectrain.tests.train.formulas import assert_acceptance, influences, law_of, row_loss
from spectrain.tests.train.toys import (
    Document,
    counted,
    gradients,
    numbered_documents,
    pack,
    random_document,
    random_target,
    seeded,
    share,
)
from spectrain.train import attention, losses
from spectrain.train.attention import BlockAttend
from spectrain.train.batch import TrainBatch
from spectrain.train.objectives.base import predicted_acceptance_length
from spectrain.train.objectives.dflash import DFlashObjective, DFlashSettings

STYLES = {
    "plain": {},
    "from the anchor": {"sample_from_anchor": True},
    "causal": {"causal": True},
    "window": {"sliding_window": 5},
    "causal window, two layers": {"causal": True, "sliding_window": 4, "num_layers": 2},
    "one draft": {"block_size": 2},
    "two layers": {"num_layers": 2, "block_size": 6},
}
LENGTHS = [[7], [4, 2], [1, 5]]


def packed_case(generator: torch.Generator) -> list[list[Document]]:
    return [[random_document(n, 16, 16, generator) for n in row] for row in LENGTHS]


def documents_of(rows: list[list[Document]], width: int) -> list[tuple[int, Document]]:
    """Each document and where it begins in batch * width."""
    found = []
    for line, row in enumerate(rows):
        start = line * width
        for document in row:
            found.append((start, document))
            start += len(document.token_ids)
    return found


@pytest.mark.parametrize("query_block", [8, 256])
@pytest.mark.parametrize("style", STYLES)
def test_training_logits_equal_a_drafter_of_single_blocks(
    style: str, query_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "QUERY_BLOCK", query_block)
    config, target = block_config(**STYLES[style]), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    rows = packed_case(torch.Generator().manual_seed(1))
    batch = block_batch(rows, target, config, seq=8)
    objective = DFlashObjective(config, DFlashSettings())
    # every row that has a token behind it in its document
    starts = [start + t for start, d in documents_of(rows, 8) for t in range(len(d.token_ids) - 1)]
    found, moved = (
        head.logits(objective.draft(head, target, b, torch.tensor(starts)), target)
        for b in (batch, batch._replace(positions=batch.positions + 7))
    )
    index = 0
    for _, document in documents_of(rows, 8):
        drafter = BlockDrafter(head, target, document.aux)
        for t in range(len(document.token_ids) - 1):
            expected = drafter.logits(t + 1, int(document.token_ids[t + 1]))
            torch.testing.assert_close(found[index], expected, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(moved[index], expected, atol=2e-5, rtol=1e-5)
            index += 1
    assert index == len(starts) == 14


def test_columns_each_row_sees_equal_the_table_of_the_method() -> None:
    """Zero queries attend evenly, so values that are unit vectors spell out what each slot sees."""
    tables = {
        (False, 0): ["1.....111...", "1.....111...", "1.....111...", "111......111", "111......111", "111......111"],
        (True, 0): ["1.....1.....", "1.....11....", "1.....111...", "111......1..", "111......11.", "111......111"],
        (False, 4): ["1.....111...", "1.....111...", "1.....111...", "111......111", ".11......111", "..1......111"],
    }
    # six context rows, blocks of three behind rows 0 and 2: the anchors are tokens 1 and 3
    for (causal, window), table in tables.items():
        values, zeros = torch.eye(12), torch.zeros(1, 6, 1, 12)
        attend = BlockAttend(
            torch.zeros(1, 6, dtype=torch.int32),
            torch.tensor([0, 2]),
            3,
            [(zeros, values[:6].view(1, 6, 1, 12))],
            "dense",
            causal=causal,
            window=window,
        )
        blocks = torch.zeros(2, 3, 1, 12)
        out = attend(0, blocks, blocks, values[6:].view(2, 3, 1, 12)).view(6, 12)
        assert ["".join("1" if x > 0 else "." for x in row) for row in out] == table


def test_flex_equals_dense_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)  # its plain form runs on CPU
    generator = torch.Generator().manual_seed(0)
    document_ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1, -1], [0, 0, 0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    rows = torch.tensor([0, 1, 4, 9, 11, 12, 15, 16])
    for causal, window in ((False, 0), (True, 4)):
        q, k, v = (torch.randn(8, 3, heads, 8, generator=generator) for heads in (4, 2, 2))
        context = [tuple(torch.randn(2, 9, 2, 8, generator=generator) for _ in range(2))]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flex, dense = (
                BlockAttend(document_ids, rows, 3, context, backend, causal=causal, window=window)(0, q, k, v)
                for backend in ("flex", "dense")
            )
        torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_equals_dense_on_cuda_in_value_and_gradient(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    document_ids = (torch.arange(300, device="cuda") // 70).to(torch.int32).repeat(2, 1)
    rows = torch.arange(0, 600, 7, device="cuda")
    shapes = [(len(rows), 8, 4, 16), (len(rows), 8, 2, 16), (len(rows), 8, 2, 16), (2, 300, 2, 16), (2, 300, 2, 16)]
    inputs = [torch.randn(shape, generator=generator).cuda().requires_grad_() for shape in shapes]
    results = []
    for backend in ("flex", "dense"):
        attend = BlockAttend(document_ids, rows, 8, [(inputs[3], inputs[4])], backend, causal=causal, window=40)
        out = attend(0, *inputs[:3])
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", ["ce", "kl", "tv", "lk_alpha"])
@pytest.mark.parametrize("from_anchor", [False, True])
def test_loss_equals_the_formula_on_the_drafters_logits(kind: losses.LossKind, from_anchor: bool) -> None:
    """Labels are x_{t+2+k}, soft ones the law after row t+1+k, the norm exactly once; weights e^{-k/gamma}."""
    config, target = block_config(sample_from_anchor=from_anchor), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    rows = packed_case(torch.Generator().manual_seed(1))
    objective = DFlashObjective(config, DFlashSettings(loss=kind, slot_decay=1.7))
    batch = counted(objective, head, block_batch(rows, target, config))
    sums, counts = [0.0] * config.num_drafts, [0] * config.num_drafts
    for document in (d for row in rows for d in row):
        laws, text = law_of(target, document.final), document.token_ids.tolist()
        drafter = BlockDrafter(head, target, document.aux)
        for t in range(len(text) - 2):
            logits = drafter.logits(t + 1, text[t + 1])
            for k in range(min(config.num_drafts, len(text) - 2 - t)):
                loss = row_loss(kind, logits[k if from_anchor else k + 1], laws[t + 1 + k], text[t + 2 + k])
                assert loss is not None
                sums[k] += loss
                counts[k] += 1
    assert batch.denominators.tolist() == counts and min(counts) > 0
    decay = [math.exp(-k / 1.7) for k in range(config.num_drafts)]
    expected = sum(w * s for w, s in zip(decay, sums, strict=True)) / sum(
        w * n for w, n in zip(decay, counts, strict=True)
    )
    output = objective(head, target, batch)
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-5)
    for k in range(config.num_drafts):
        assert share(output, f"loss_{k}") == pytest.approx(sums[k] / counts[k], rel=1e-5)


def test_confidence_weights_equal_the_formula() -> None:
    config, target = block_config(block_size=5), random_target(16, 16)
    head = loud_head(config, target)
    document = random_document(9, 16, 16, torch.Generator().manual_seed(2))
    objective = DFlashObjective(config, DFlashSettings(slot_weights="dpace", dpace_floor=0.5))
    batch = counted(objective, head, block_batch([[document]], target, config))
    drafter, total, count = BlockDrafter(head, target, document.aux), 0.0, 0
    for t in range(7):
        probs = drafter.logits(t + 1, int(document.token_ids[t + 1])).softmax(-1)[1:]
        gold = [float(probs[k, document.token_ids[t + 2 + k]]) for k in range(4) if t + 2 + k < 9]
        chances = [math.prod(0.5 + 0.5 * q for q in gold[: k + 1]) for k in range(len(gold))]
        total += sum(-math.log(q) * sum(chances[k:]) for k, q in enumerate(gold))
        count += len(gold)
    output = objective(head, target, batch)
    assert float(output.loss.detach()) == pytest.approx(total / count, rel=1e-5)
    # without gradient: the same weights held fixed give the same gradient
    output.loss.backward()
    found = gradients(head)
    head.zero_grad()
    chunked = DFlashObjective(config, DFlashSettings(slot_weights="dpace", chunk_elements=1))
    chunked(head, target, batch).loss.backward()
    for name, grad in gradients(head).items():
        torch.testing.assert_close(grad, found[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("floor", "expected"), [(1.0, [[3.0, 2.0, 1.0], [2.0, 1.0]]), (0.0, [[0.75, 0.25, 0.125], [0.3, 0.06]])]
)
def test_confidence_weights_of_known_probabilities(floor: float, expected: list[list[float]]) -> None:
    """Floor 1 counts the slots that follow; floor 0 sums the chances of reaching them."""
    config = block_config()
    objective = DFlashObjective(config, DFlashSettings(dpace_floor=floor))
    probs = torch.tensor([0.5, 0.25, 1.0, 0.24, 0.25])
    blocks, drafts = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1])
    if floor == 0.0:
        expected = [[0.5 + 0.125 + 0.125, 0.125 + 0.125, 0.125], [0.24 + 0.06, 0.06]]
    found = objective._confidence_weights(probs, blocks, drafts, 2)
    torch.testing.assert_close(found, torch.tensor([w for block in expected for w in block]))


@pytest.mark.parametrize("style", ["plain", "from the anchor", "causal", "two layers"])
def test_each_slot_depends_on_exactly_what_the_drafter_knows(style: str) -> None:
    """States 0..a-1 and the token x_a of its own document: all of them, nothing else; with causal slots too."""
    config, target = block_config(vocab=32, **STYLES[style]), random_target(32, 16)
    head = loud_head(config, target)
    generator = torch.Generator().manual_seed(0)
    batch = block_batch([numbered_documents([6, 5], 16, generator)], target, config, seq=13)
    aux = batch.aux_states.requires_grad_()
    embeds = target.embed_tokens.requires_grad_()
    rows = torch.tensor([*range(5), *range(6, 10)])
    objective = DFlashObjective(config, DFlashSettings())
    states = objective.draft(head, target, batch._replace(aux_states=aux), rows)
    probe = torch.randn(16, generator=generator)
    for i, row in enumerate(rows.tolist()):
        first = 0 if row < 6 else 6
        for slot in range(config.block_size):
            by_state, by_token = torch.autograd.grad(states[i, slot] @ probe, [aux, embeds], retain_graph=True)
            seen = by_state[0].abs().sum((-1, -2)).nonzero().squeeze(1).tolist()
            tokens = by_token.abs().sum(-1).nonzero().squeeze(1).tolist()
            masks = [] if config.causal and slot == 0 else [config.mask_token_id]
            assert seen == list(range(first, row + 1))
            assert tokens == [row + 1, *masks]


def test_only_the_table_of_counted_slots_can_change_the_loss() -> None:
    """Mask 00111011 counts (t, k) = (1,0) (2,0) (5,0) (1,1): anchors x_2, x_3, x_6; final rows 2, 3 and 6."""
    config, target = block_config(), random_target(16, 16)
    head = loud_head(config, target)
    mask = torch.tensor([c == "1" for c in "00111011"])
    document = random_document(8, 16, 16, torch.Generator().manual_seed(3))._replace(loss_mask=mask)
    # x_2, x_3, x_6 are anchors, and labels of ce as are x_4 and x_7
    for kind, tokens, finals in (("ce", {2, 3, 4, 6, 7}, set()), ("kl", {2, 3, 6}, {2, 3, 6})):
        found = influences(DFlashObjective(config, DFlashSettings(loss=kind)), head, target, document)
        assert found == (tokens, {0, 1, 2, 3, 4, 5}, finals)


def drawn(objective: DFlashObjective, head: DFlashHead, batch: TrainBatch) -> list[list[int]]:
    """The rows that begin a block, per batch row."""
    first = objective.supervise(head, batch).valid[0].view_as(batch.token_ids)
    return [line.nonzero().squeeze(1).tolist() for line in first]


def test_anchors_are_drawn_per_document_anew_each_epoch_and_whatever_shares_the_batch() -> None:
    config, target = block_config(), random_target(16, 16)
    head = loud_head(config, target)
    generator = torch.Generator().manual_seed(0)
    long, short, other = (random_document(n, 16, 16, generator, prompt=p) for n, p in ((40, 10), (9, 4), (20, 0)))
    objective = DFlashObjective(config, DFlashSettings(anchors=6))
    packed = block_batch([[long, short, other]], target, config)
    [rows] = drawn(objective, head, packed)
    in_long, in_short, in_other = (
        [row - start for row in rows if start <= row < start + n] for start, n in ((0, 40), (40, 9), (49, 20))
    )
    assert len(in_long) == 6 and all(9 <= row <= 37 for row in in_long)  # x_10 is the first anchor, x_39 the last label
    assert in_short == [3, 4, 5, 6] and len(in_other) == 6  # fewer rows than the budget: all of them
    again = drawn(objective, head, block_batch([[other], [short, long]], target, config))
    assert again == [in_other, in_short + [9 + row for row in in_long]]
    epochs = [drawn(objective, head, seeded(packed, epoch))[0] for epoch in range(40)]
    assert len({tuple(rows) for rows in epochs}) == 40
    # every eligible row has its turn, evenly: 40 draws of 6 of 29
    counts = torch.zeros(40)
    for rows in epochs:
        counts[[row for row in rows if row < 40]] += 1
    assert (counts[9:38] > 0).all() and counts[9:38].max() < 20
    assert objective.count(head, packed)[0] == len(rows)


def test_a_batch_without_seeds_is_refused() -> None:
    config, target = block_config(), random_target(16, 16)
    head = loud_head(config, target)
    batch = pack([[random_document(9, 16, 16, torch.Generator().manual_seed(0))]], target, 3)
    with pytest.raises(ValueError, match="without document_seeds"):
        DFlashObjective(config, DFlashSettings()).count(head, batch._replace(document_seeds=None))


@pytest.mark.parametrize("kind", ["ce", "kl", "tv", "lk_lambda", "lk_alpha"])
@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("mask", ["000000", "000010"])
def test_a_response_of_no_or_one_token_gives_finite_zeros_for_every_parameter(
    kind: losses.LossKind, weights: str, mask: str
) -> None:
    config, target = block_config(num_layers=2), random_target(16, 16)
    head = loud_head(config, target)
    document = random_document(6, 16, 16, torch.Generator().manual_seed(0))
    document = document._replace(loss_mask=torch.tensor([c == "1" for c in mask]))
    objective = DFlashObjective(config, DFlashSettings(loss=kind, slot_weights=weights))
    batch = block_batch([[document]], target, config, seq=9)
    assert objective.count(head, batch).tolist() == [0, 0, 0]
    output = objective(head, target, batch._replace(denominators=torch.zeros(3)))
    output.loss.backward()
    assert output.loss == 0 and predicted_acceptance_length(output.metrics) == 1.0
    assert all((grad == 0).all() for grad in gradients(head).values())


def test_acceptance_metrics_equal_counts_on_the_drafters_logits() -> None:
    config, target = block_config(vocab=3, hidden=8), random_target(3, 8)
    head = loud_head(config, target)
    documents = [random_document(n, 3, 8, torch.Generator().manual_seed(n)) for n in (25, 11, 4)]
    objective = DFlashObjective(config, DFlashSettings())
    output = objective(head, target, block_batch([[d] for d in documents], target, config))
    hits: list[dict[tuple[int, int], bool]] = []
    for document in documents:
        hits.append({})
        tops, text = target.logits(document.final).argmax(-1), document.token_ids.tolist()
        drafter = BlockDrafter(head, target, document.aux)
        for t in range(len(text) - 2):
            drafts = drafter.drafts(t + 1, text[t + 1])
            hits[-1] |= {(t, k): drafts[k] == int(tops[t + 1 + k]) for k in range(3) if t + 2 + k < len(text)}
    assert_acceptance(output, hits, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"anchors": 0}, "objective.anchors must be 1 or more"),
        ({"slot_weights": "even"}, "objective.slot_weights must be decay or dpace"),
        ({"slot_decay": 0.0}, "objective.slot_decay must be above 0"),
        ({"dpace_floor": 1.5}, "objective.dpace_floor must lie between 0 and 1"),
        ({"loss": "mse"}, "objective.loss must be one of"),
        ({"attention": "fast"}, "objective.attention must be"),
    ],
)
def test_wrong_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DFlashSettings(**settings)
