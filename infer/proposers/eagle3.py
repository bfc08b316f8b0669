"""EAGLE-3 drafting: the head's layers run on the target's rows as they come, then k - 1 times on their own output."""

from .feature import AutoregressiveProposer


class Eagle3Proposer(AutoregressiveProposer):
    """Aux states are combined once, for the target's rows; a draft row is conditioned on the head's own feedback."""
