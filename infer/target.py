"""The target: a transformers model run on one packed row of tokens from many requests, on our own paged cache.

The only code of the project that runs the target model; extraction and the engine both call it. It holds no scheduler,
no sampling and no transformers cache.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..heads.target_tensors import TargetTensors
from . import fingerprint, fusion, loading, parity, recurrent
from .attention import PAGED, SITE, AttentionSite, StepState, bind_site, register
from .batch import PackedBatch, request_rows
from .mixers import find_recurrent_layers
from .planes import Planes, PlaneSpec, target_plane
from .probe import AttentionLayer, TargetError, find_layers, first_output, first_tensor, probe_attention
from .recurrent import MixerForward, States
from .rope import pin_rope
from .trace import Trace, trace_forward, trace_tensors

__all__ = ["Target", "TargetError", "TargetOutput"]


class TargetOutput(NamedTuple):
    """One step's results; the tensors are the caller's own and stay valid after the next step."""

    logits: Tensor  # [len(logits_rows), vocab] float32
    states: Tensor | None  # [num_tokens, len(layer_ids), hidden] in the model's dtype; None before `capture`


class Target:
    """A probed model. It owns the model's attention: one model serves one Target, the newest one made from it."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, name: str, max_length: int | None
    ) -> None:
        self.name, self.model, self.config, self.tokenizer = name, model, model.config, tokenizer
        model.eval().requires_grad_(False)
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            raise TargetError(
                f"{name} is on {self.device} while cuda:{torch.cuda.current_device()} is the current device, where "
                f"kernels and graphs would run; call torch.cuda.set_device({self.device.index}) first"
            )
        facts = loading.facts_of(model)
        self.max_length = loading.context_length(model, facts, max_length)
        self.hidden_size, self.num_layers = facts.hidden_size, facts.num_layers
        self.eos_token_ids = loading.eos_token_ids(model)
        self.layer_ids: tuple[int, ...] = ()
        self._step = StepState()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        fusion.unfuse(model)
        recurrent.restore(model)
        pin_rope(model, self.max_length)
        self._documents = documents = self._draw_documents(facts.vocab_size)
        if self.config._attn_implementation == PAGED:
            model.set_attn_implementation("eager")
        self._recurrent = find_recurrent_layers(model)
        paths = {layer.index: layer.path for layer in self._recurrent}
        self._attention = probe_attention(model, documents[1], self.num_layers, self.max_length, paths)
        paths |= {layer.index: layer.path for layer in self._attention}
        self._layers = find_layers(model, self.num_layers, paths)
        model.set_attn_implementation("eager")  # others drop arguments: sdpa knows no softcap in transformers 5.17
        traces = [trace_forward(model, self._layers, document) for document in documents]
        self.vocab_size = traces[0].logits.shape[-1]
        self.facts = loading.with_vocab(facts, self.vocab_size)
        self._streams = _residual_streams(traces[1], len(documents[1]), self.hidden_size)
        self._tensors = self._trace_tensors(traces[1], documents[1])
        self.plane_specs = tuple(_plane_spec(layer) for layer in self._attention)
        self.state_specs = tuple(layer.mixer.spec(f"target.{layer.index}") for layer in self._recurrent)
        self._mixers: tuple[MixerForward, ...] = ()
        self._take_over()
        self._alone = [trace.logits for trace in traces]
        with self._own_planes():
            self._check_parity()

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        max_length: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Loads and probes a local folder or a hub id; raises TargetError with one line for what cannot be used."""
        loaded = loading.load_model(model, torch.device(device), dtype, revision, trust_remote_code)
        tokenizer = loading.load_tokenizer(model, revision, trust_remote_code)
        name = Path(model).resolve().name if Path(model).is_dir() else str(model)
        return cls(loaded, tokenizer, name=name, max_length=max_length)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_length: int | None = None,
    ) -> Self:
        """Probes a model that is already in memory and takes over its attention."""
        return cls(model, tokenizer, name=type(model).__name__, max_length=max_length)

    def tensors(self) -> TargetTensors:
        """Embeddings, final norm and output head, verified against the model's own logits.

        The matrices are the model's own storage. Raises TargetError naming what a plain record cannot express.
        """
        if isinstance(self._tensors, TargetError):
            raise self._tensors
        return self._tensors

    def capture(self, layer_ids: Iterable[int]) -> None:
        """Asks every later `forward` for the states at `layer_ids`, returned in ascending order.

        Call it before compiling anything: hooks added later are ignored by compiled code. Raises TargetError for ids
        outside 0..num_layers and for families with several residual streams.
        """
        ids = tuple(sorted(set(layer_ids)))
        wrong = [i for i in ids if not 0 <= i <= self.num_layers]
        if wrong:
            raise TargetError(
                f"layer ids must lie between 0 (embeddings) and {self.num_layers} (after the last layer) for "
                f"{self.name}, found {', '.join(map(str, wrong))}; change the asked layers"
            )
        if ids and self._streams is not None:
            raise TargetError(
                f"{self.name} cannot give hidden states: its residual stream is {self._streams} where [1, tokens, "
                f"{self.hidden_size}] is expected (several streams); use another target"
            )
        for handle in self._hooks:
            handle.remove()
        self.layer_ids = ids
        self._hooks = [self._hook(column, layer_id) for column, layer_id in enumerate(ids)]

    def bind(self, planes: Planes, states: States | None = None) -> None:
        """Gives each layer what it keeps: `planes` must hold every one of `plane_specs`, `states` of `state_specs`."""
        if self.state_specs and states is None:
            raise TargetError(f"{self.name} has recurrent layers; bind states of its `state_specs` beside the planes")
        for layer in self._attention:
            bind_site(layer.module, planes)
        for mixer in self._mixers:
            mixer.bind(states)

    @torch.no_grad()
    def forward(self, batch: PackedBatch) -> TargetOutput:
        """Runs one packed batch, writing its keys and values to their slots.

        Raises TargetError when no planes are bound or the model was taken over by a newer Target.
        """
        site: AttentionSite = getattr(self._attention[0].module, SITE)
        if site.step is not self._step:
            raise TargetError(f"{self.name} was taken over by a newer Target of the same model; use that one")
        if site.plane is None:
            raise TargetError(f"{self.name} has no cache yet; call bind(planes) before forward")
        states = None
        if self.layer_ids:
            shape = (len(batch.token_ids), len(self.layer_ids), self.hidden_size)
            states = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._step.batch, self._step.states = batch, states
        self._step.rows = request_rows(batch) if self.state_specs else None
        try:
            out = self.model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logits_rows,
            )
        finally:
            self._step.batch = self._step.states = self._step.rows = None
        return TargetOutput(out.logits[0].float(), states)

    def fuse(self) -> str | None:
        """Runs every decoder layer as a few fused kernels from now on, within the rounding of the model's own code.

        Returns None, or one line that says why this model cannot be run so; it is then left as it was. Weights are
        packed in place; hooks and planes stay. Doing it again changes nothing.
        """
        if self.state_specs:
            return f"{self.name} has recurrent layers, which run their own code"
        if fusion.is_fused(self.model):
            return None
        batch = parity.far_batch([document.tolist() for document in self._documents], self.max_length, self.device)
        run = partial(self._logits_of, batch)
        with self._own_planes():
            calls = parity.record_layers(self._layers, run)
            try:
                fusion.fuse_layers(self.model, self._layers, self._attention, self.model.get_output_embeddings())
                parity.compare_layers(self.name, self._layers, calls, run)
                self._check_parity()
            except ValueError as error:
                fusion.unfuse(self.model)
                return str(error)
            except BaseException:
                fusion.unfuse(self.model)
                raise
        return None

    def unfuse(self) -> None:
        """Puts the model's own code back and unpacks its weights; does nothing where nothing was fused."""
        fusion.unfuse(self.model)

    def fingerprint(self) -> dict[str, Any]:
        """JSON-ready identity: another `shape` cannot be used with what was made here, other `weights` should warn."""
        return fingerprint.of_model(self.model, self.facts)

    def _hook(self, column: int, layer_id: int) -> torch.utils.hooks.RemovableHandle:
        step = self._step

        def keep(hidden: Tensor) -> None:
            if step.states is not None:
                step.states[:, column].copy_(hidden[0])

        if layer_id == self.num_layers:
            return self._layers[-1].register_forward_hook(lambda module, args, output: keep(first_output(output)))
        return self._layers[layer_id].register_forward_pre_hook(
            lambda module, args, kwargs: keep(first_tensor(args, kwargs)), with_kwargs=True
        )

    def _take_over(self) -> None:
        register()
        self.model.set_attn_implementation(PAGED)
        for spec, layer in zip(self.plane_specs, self._attention, strict=True):
            setattr(layer.module, SITE, AttentionSite(spec.name, layer.window, layer.chunk, self._step))
        self._mixers = tuple(
            recurrent.take_over(layer.module, layer.mixer, spec, self._step)
            for spec, layer in zip(self.state_specs, self._recurrent, strict=True)
        )

    def _draw_documents(self, vocab_size: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randint(0, vocab_size, (length,), generator=generator).to(self.device) for length in parity.LENGTHS
        ]

    def _trace_tensors(self, trace: Trace, document: Tensor) -> TargetTensors | TargetError:
        if self._streams is not None:
            return TargetError(
                f"{self.name} is refused for draft heads: it keeps several residual streams ({self._streams}), "
                f"expected [1, tokens, {self.hidden_size}]; use another target"
            )
        try:
            return trace_tensors(self.model, trace, document, self.hidden_size)
        except TargetError as error:
            return error

    def _check_parity(self) -> None:
        parity.check_parity(self.name, self._logits_of, self._documents, self._alone, self.dtype)

    def _logits_of(self, batch: PackedBatch) -> Tensor:
        return self.forward(batch).logits

    @contextmanager
    def _own_planes(self) -> Iterator[None]:
        """Small planes and states of our own for a check, in place of those bound at present."""
        sites = [getattr(layer.module, SITE) for layer in self._attention]
        kept = [mixer.state for mixer in self._mixers]
        states = States(self.state_specs, len(parity.LENGTHS) + 1, parity.NUM_DRAFT_TOKENS, self.device)
        self.bind(Planes(self.plane_specs, parity.NUM_BLOCKS, parity.BLOCK_SIZE, self.device), states)
        try:
            yield
        finally:
            for layer, site in zip(self._attention, sites, strict=True):
                setattr(layer.module, SITE, site)
            for mixer, state in zip(self._mixers, kept, strict=True):
                mixer.state = state


def _plane_spec(layer: AttentionLayer) -> PlaneSpec:
    return PlaneSpec(target_plane(layer.index), layer.kv_heads, layer.width_k, layer.width_v, layer.dtype)


def _residual_streams(trace: Trace, num_tokens: int, hidden_size: int) -> list[int] | None:
    """The shape of the first state that is not one stream [1, num_tokens, hidden]; None when all are."""
    for state in [*trace.layer_inputs, trace.last_state]:
        if tuple(state.shape) != (1, num_tokens, hidden_size):
            return list(state.shape)
    return None
