"""What proposers share whose head has decoder layers of its own: a plane of the paged cache for each of them."""

from ...heads.decoder import DecoderHead
from ...heads.target_tensors import TargetTensors
from ..attention import PagedAttend
from ..batch import PackedBatch
from ..planes import Planes
from .drafting import DraftSampling, layer_planes
from .head import HeadProposer


class LayeredProposer(HeadProposer):
    """Keys and values of the head's layers stand in planes beside the target's, under the same block tables."""

    head: DecoderHead

    def __init__(
        self, head: DecoderHead, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        super().__init__(head, target, num_draft_tokens, draft_sampling)
        self.layer_planes = layer_planes(head)
        self._plane_names = [plane.name for plane in self.layer_planes]
        self._planes: Planes | None = None

    def bind(self, planes: Planes, num_rows: int) -> None:
        self._planes = planes

    @property
    def planes(self) -> Planes:
        """Those of the engine the proposer is bound to."""
        assert self._planes is not None, "a proposer is bound before it drafts"
        return self._planes

    def _attend(self, batch: PackedBatch, *, window: int = 0, causal: bool = True) -> PagedAttend:
        """Attention of the head's layers over what their planes hold of the requests in `batch`."""
        return PagedAttend(self.planes, self._plane_names, batch, window=window, causal=causal)
