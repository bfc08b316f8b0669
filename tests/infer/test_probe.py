import pytest
import torch

from spectrain.infer.probe import MaskPattern, TargetError, mask_shape, probe_attention
from spectrain.tests.models import COMMON, build, gemma3, rand_llama

MAX_LENGTH = 100


def causal(batch, head, query, key):
    return key <= query


def windowed(size):
    return lambda batch, head, query, key: (key <= query) & (key > query - size)


def chunked(size):
    return lambda batch, head, query, key: (key <= query) & (key // size == query // size)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64, 99])
def test_window_and_chunk_are_read_from_the_mask(size):
    window, chunk = mask_shape("x", MaskPattern(windowed(size)), MAX_LENGTH)
    assert (window, chunk) == (size, 0)
    window, chunk = mask_shape("x", MaskPattern(chunked(size)), MAX_LENGTH)
    assert (window, chunk) == ((1, 0) if size == 1 else (0, size))


def test_a_window_no_request_can_reach_is_none():
    assert mask_shape("x", MaskPattern(causal), MAX_LENGTH) == (0, 0)
    assert mask_shape("x", MaskPattern(windowed(MAX_LENGTH)), MAX_LENGTH) == (0, 0)


@pytest.mark.parametrize(
    "mask",
    [
        lambda batch, head, query, key: torch.tensor(True),
        lambda batch, head, query, key: (key <= query) & ((key > query - 5) | (key == 0)),
        lambda batch, head, query, key: (key <= query) & (query - key != 1),
        lambda batch, head, query, key: (key <= query) & (key % 2 == query % 2),
    ],
    ids=["bidirectional", "sink", "skips one", "strided"],
)
def test_other_masks_are_refused(mask):
    with pytest.raises(TargetError, match="layer 3 has a mask that is neither causal, windowed nor chunked"):
        mask_shape("M is refused: layer 3", MaskPattern(mask), MAX_LENGTH)


def layers_of(model, num_layers=4):
    return probe_attention(model, torch.tensor([5, 40, 6, 7, 8]), num_layers, 64)


def test_each_layer_is_described_in_order_and_the_model_left_as_it_was():
    model = gemma3()
    before = model.config._attn_implementation
    layers = layers_of(model)
    assert [layer.path for layer in layers] == [f"model.layers.{i}.self_attn" for i in range(4)]
    assert [layer.window for layer in layers] == [5, 5, 5, 0]
    assert model.config._attn_implementation == before
    assert not any("spectrain_calls" in vars(module) for module in model.modules())


def attention_with(model, **extra):
    """Makes layer 2 hand its attention extra keywords."""
    honest = model.model.layers[2].self_attn.forward
    model.model.layers[2].self_attn.forward = lambda *args, **kwargs: honest(*args, **kwargs, **extra)
    return model


def test_keywords_that_change_attention_are_refused_by_name():
    with pytest.raises(TargetError, match="layer 2 hands its attention position_bias, which"):
        layers_of(attention_with(rand_llama(4), position_bias=torch.zeros(1)))
    with pytest.raises(TargetError, match="layer 2 is not causal"):
        layers_of(attention_with(rand_llama(4), is_causal=False))
    assert len(layers_of(attention_with(rand_llama(4), position_bias=None, output_router_logits=True))) == 4


def test_a_window_keyword_must_agree_with_the_mask():
    with pytest.raises(TargetError, match="layer 2 is given sliding_window=7 but its mask shows window=0"):
        layers_of(attention_with(rand_llama(4), sliding_window=7))


def test_layers_without_attention_or_with_too_much_of_it_are_refused():
    model = rand_llama(4)
    with pytest.raises(TargetError, match="1 of its 5 layers .first: 4. call no attention"):
        layers_of(model, num_layers=5)
    with pytest.raises(TargetError, match="attention is called for layer 3, expected 0..2 only"):
        layers_of(model, num_layers=3)
    model.model.layers[3].self_attn.layer_idx = 1
    with pytest.raises(TargetError, match="layer 1 calls attention 2 times"):
        layers_of(model)


def test_a_model_that_needs_its_mask_is_refused_and_left_as_it_was():
    model = build("Doge", **COMMON)
    before = model.config._attn_implementation
    with pytest.raises(TargetError, match="DogeForCausalLM is refused: it needs more than attention"):
        layers_of(model)
    assert model.config._attn_implementation == before
