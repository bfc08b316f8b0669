"""Trainings inside a test draw no plots, which take longer than they do; those of module fixtures do."""

import pytest


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spectrain.train.run.plot", lambda folder: [])
