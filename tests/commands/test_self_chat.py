"""Self-chat: the header comes from the template, bad turns are dropped by reason, a stopped run continues exactly."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spectrain.commands import self_chat
from spectrain.commands.self_chat import SelfChat, SelfChatError, fault_of, user_headers, write_conversations
from spectrain.infer.request import FinishReason
from spectrain.infer.target import Target
from spectrain.tests.models import rand_llama

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<u>", "<a>", "<e>", *[f"w{i}" for i in range(90)]]
TEMPLATE = (
    "<s>{% for m in messages %}{{ ' <u> ' if m.role == 'user' else ' <a> ' }}{{ m.content }} <e>{% endfor %}"
    "{% if add_generation_prompt %} <a>{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=["<u>", "<a>", "<e>"],
    )
    made.chat_template = template
    return made


def make_target(template: str | None = TEMPLATE) -> Target:
    """Flat logits, with the end of a turn likely, so that turns close."""
    model = rand_llama(2, max_position_embeddings=128)
    head = model.get_output_embeddings().weight.data
    head.mul_(0.02)
    return Target.from_model(model, tokenizer(template))


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


SETTINGS = SelfChat(num=6, max_new_tokens=24, temperature=1.0, batch_size=4, seed=3)


@pytest.fixture(autouse=True)
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model closes few turns and puts markup inside; that is not what is tested here."""
    monkeypatch.setattr(self_chat, "LOWEST_YIELD", 0.0)
    monkeypatch.setattr(self_chat, "SHORTEST_TOKENS", 1)


def test_header_is_what_the_template_prints_before_a_users_content(target: Target) -> None:
    headers = user_headers(target)
    assert headers.before == [1, 4]
    assert headers.end_ids == (2, 6)


def test_model_without_a_template_is_refused() -> None:
    with pytest.raises(SelfChatError, match="chat template"):
        user_headers(make_target(None))


def test_template_that_hides_the_content_is_refused() -> None:
    with pytest.raises(SelfChatError, match="does not print"):
        user_headers(make_target("<s> <u> <e>"))


@pytest.mark.parametrize(
    "ids,finish,fault",
    [
        ([10, 11, 12], FinishReason.STOP, None),
        ([10, 11, 12], FinishReason.LENGTH, "unclosed"),
        ([], FinishReason.STOP, "too short"),
        ([10, 4, 12], FinishReason.STOP, "markup inside"),
        ([10, 11] * 30, FinishReason.STOP, "repetitive"),
        (list(range(10, 70)), FinishReason.STOP, None),
        ([10, 11] * 10, FinishReason.STOP, None),
    ],
    ids=["fine", "unclosed", "empty", "markup", "loop", "long", "short-loop"],
)
def test_faults_are_named(ids: list[int], finish: FinishReason, fault: str | None) -> None:
    assert fault_of(ids, finish, frozenset({4, 5, 6})) == fault


def test_rows_are_messages_and_counts_add_up(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "chat.jsonl"
    counts = write_conversations(target, SETTINGS, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == counts.kept == 6
    assert counts.kept + sum(counts.dropped.values()) == counts.next_index
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in rows)
    assert all(m["content"] and "<" not in m["content"] for row in rows for m in row["messages"])
    assert len({row["messages"][0]["content"] for row in rows}) == 6


def test_same_seed_same_rows_whatever_the_batch_size_and_another_seed_differs(target: Target, tmp_path: Path) -> None:
    texts = []
    for name, changes in (("a", {}), ("b", {"batch_size": 7}), ("c", {"seed": 4})):
        write_conversations(target, SelfChat(**{**vars(SETTINGS), **changes}), tmp_path / name)
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1] != texts[2]


def test_a_run_that_continues_ends_as_an_unbroken_one(target: Target, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    write_conversations(target, SETTINGS, whole)
    write_conversations(target, SelfChat(**{**vars(SETTINGS), "num": 2}), broken)
    # a row that was written when the process died before its progress was saved
    with open(broken, "a") as file:
        file.write('{"index": 99, "messages": [{"role": "us')
    write_conversations(target, SETTINGS, broken)
    assert broken.read_text() == whole.read_text()


def test_continuing_with_other_settings_is_refused_and_loses_nothing(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "chat.jsonl"
    write_conversations(target, SelfChat(**{**vars(SETTINGS), "num": 1}), out)
    before = out.read_bytes()
    with pytest.raises(SelfChatError, match="other settings"):
        write_conversations(target, SelfChat(**{**vars(SETTINGS), "seed": 9}), out)
    assert out.read_bytes() == before


def test_a_file_of_someone_else_is_not_touched(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "notes.jsonl"
    out.write_text("mine\n")
    with pytest.raises(SelfChatError, match="not begun by self-chat"):
        write_conversations(target, SETTINGS, out)
    assert out.read_text() == "mine\n"


def test_a_model_that_cannot_chat_is_given_up(target: Target, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(self_chat, "LOWEST_YIELD", 1.1)
    with pytest.raises(SelfChatError, match="real conversations"):
        write_conversations(target, SETTINGS, tmp_path / "chat.jsonl")


def test_settings_outside_their_range_are_refused() -> None:
    with pytest.raises(SelfChatError, match="num must be at least 1"):
        SelfChat(**{**vars(SETTINGS), "num": 0})


def test_global_random_state_is_untouched(target: Target, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    write_conversations(target, SelfChat(**{**vars(SETTINGS), "num": 1}), tmp_path / "chat.jsonl")
    assert torch.equal(torch.get_rng_state(), before)
