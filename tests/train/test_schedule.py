"""The learning rate by optimizer step, in closed form."""

from typing import Any

import pytest

from spectrain.train.schedule import learning_rate, warmup_steps
from spectrain.train.settings import OptimizerSettings, SettingsError


def rates(total: int, **changes: object) -> list[float]:
    settings = OptimizerSettings(lr=1.0, **changes)
    return [learning_rate(settings, step, total) for step in range(total)]


def test_cosine_after_linear_warm_up() -> None:
    found = rates(10, warmup_steps=2)
    assert found[:2] == [0.5, 1.0]
    assert found[5] == pytest.approx(0.5)
    assert found[-1] == pytest.approx(0.0)
    assert found[1:] == sorted(found[1:], reverse=True)


def test_the_last_step_has_the_end_value() -> None:
    for schedule, end in (("cosine", 0.1), ("linear", 0.1), ("constant", 1.0)):
        assert rates(7, schedule=schedule, final_lr_share=0.1)[-1] == pytest.approx(end)
    assert rates(4, schedule="linear", warmup_share=0.0) == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_warm_up_counts_optimizer_steps() -> None:
    assert warmup_steps(OptimizerSettings(warmup_share=0.1), 25) == 3
    assert warmup_steps(OptimizerSettings(warmup_share=0.1, warmup_steps=0), 25) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"clip_norm": 0.0},
        {"warmup_share": 1.0},
        {"warmup_steps": -1},
        {"final_lr_share": 2.0},
    ],
)
def test_settings_out_of_range_name_their_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"optimizer.{next(iter(wrong))}"):
        OptimizerSettings(**wrong)
