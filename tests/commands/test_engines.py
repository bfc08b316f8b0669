"""What commands share of devices and engines: the current device, and why an engine is slower than it could be."""

import pytest
import torch

from spectrain.commands import engines
from spectrain.commands.devices import DeviceError, device_of
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.target import Target
from spectrain.tests.models import succ_llama


def test_the_named_gpu_becomes_the_current_device(monkeypatch) -> None:
    """Triton, graphs and events use the current device, wherever the tensors are."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert device_of("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
    assert device_of("cuda") == torch.device("cuda") and device_of("cpu") == torch.device("cpu")
    assert len(current) == 1
    with pytest.raises(DeviceError, match="not there"):
        device_of("cuda:2")
    assert len(current) == 1


def test_why_an_engine_is_slow_is_said_once(monkeypatch, capsys) -> None:
    class Slow(Engine):
        def _record(self) -> None:
            self.not_recorded = "its target stage cannot be recorded"

    monkeypatch.setattr(engines, "Engine", Slow)
    target = Target.from_model(succ_llama())
    for _ in range(2):
        engines.build_engine(target, NoneProposer(), num_draft_tokens=0, batch_size=1, longest=8)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].endswith("runs slower than it could: its target stage cannot be recorded")
