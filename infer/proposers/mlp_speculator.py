"""Drafting with an MLP speculator: each head reads the state of the head before it and the token drafted last."""

from .per_step import PerStepProposer


class MLPSpeculatorProposer(PerStepProposer):
    """Draft k is drawn given the drafts before it, so sampled drafts carry the law of their own chain."""
