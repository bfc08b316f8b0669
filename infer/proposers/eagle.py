"""EAGLE drafting: as EAGLE-3, from the target's last state after its final norm and with the target's output matrix."""

from .feature import AutoregressiveProposer


class EagleProposer(AutoregressiveProposer):
    """A draft row is conditioned on the head's prediction of the state that the target has not computed yet."""
