"""What a trainer rank must know before it starts. Standard library only, so that a driver can build it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from samebits.contract import digest_of
from samebits.contract.routes import ModuleRoutes
from samebits.into_megatron.plan import TrainLayout

CpLayout = Literal["zigzag", "allgather"]
TransportName = Literal["gloo", "shared_memory", "peer_memory"]
Device = Literal["cpu", "cuda"]
WeightTransfer = Literal["files", "cuda_ipc"]


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """One trainer: the same value goes to every rank.

    `model` and `reference` are directories in Hugging Face form; without a reference there is no KL term.
    `max_tp` is the largest tensor parallelism of either side of the run, `agreed` the run contract as data (empty on
    a trainer that serves none) and `contract` its digest, `rollout_contract` the one that rollout engines scored
    under (empty on native routes): every sample must carry it. `linear_logp_provider` computes log-probabilities
    where the case says R, and must promise `linear_logp_contract` unless that is None. `rendezvous` is a file path
    that does not exist yet and that all ranks can reach.

    The layout: `tp` tensor-, `cp` context-, `dp` data- and `pp` pipeline-parallel ranks, `vpp` model chunks on each
    pipeline rank (interleaved when more than one). `cp_layout` says how context-parallel ranks share packed samples:
    "zigzag" cuts each sample, "allgather" the packed rows. With `recompute` a layer keeps its input only, and runs
    again in the backward pass. The vocabulary is padded to a multiple of `vocab_multiple` * `max_tp` rows. The batch
    is cut into `gradient_segments` runs of samples (0: one for each data-parallel rank; 8 with `strict_gradients`,
    which makes gradients, their norm and the weights the same bits in every layout). `transport` carries
    what our collectives exchange. On `device` cuda rank r computes on card r modulo their number, so that ranks may
    share one; `threads` means nothing there. `optimizer_offload` is the fraction of Adam's moments that lies in
    the host's memory and visits the card in pieces (cuda only; the bits are the same). `weight_transfer` is how
    exported weights are handed on.
    """

    model: str
    reference: str | None = None
    device: Device = "cpu"
    case: ModuleRoutes = field(default_factory=ModuleRoutes)
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_layout: CpLayout = "zigzag"
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    recompute: bool = False
    optimizer_offload: float = 0.0
    vocab_multiple: int = 1
    strict_gradients: bool = False
    gradient_segments: int = 0
    max_tp: int = 1
    contract: str = ""
    agreed: Mapping[str, Any] = field(default_factory=dict)
    rollout_contract: str = ""
    linear_logp_provider: str | None = "samebits.linear_logp.provider.provider"
    linear_logp_provider_mode: Literal["auto", "strict", "audit"] = "strict"
    linear_logp_contract: str | None = None
    lr: float = 1e-5
    adam_betas: tuple[float, float] = (0.9, 0.98)
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    kl_coef: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    temperature: float = 1.0
    max_tokens_per_gpu: int = 4096
    threads: int = 1
    transport: TransportName = "gloo"
    weight_transfer: WeightTransfer = "files"
    rendezvous: str = ""
    timeout_seconds: int = 600

    def __post_init__(self) -> None:
        if self.gradient_segments == 0:
            object.__setattr__(self, "gradient_segments", max(8 if self.strict_gradients else 1, self.dp))
        self._check_sizes()
        self._check_numbers()
        self._check_contract()
        self._check_log_probability()
        if self.cp > 1 and self.case.attention == "P":
            raise ValueError(
                "attention: Megatron-Core's own attention has no context parallelism on a CPU; "
                "set cp = 1 or the attention case to R"
            )
        if self.sequence_parallel and not self.case.all_strict:
            raise ValueError(
                "norms: Megatron-Core's own norm refuses sequence parallelism on a CPU; "
                "switch sequence_parallel off or set all three cases to R"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel splits rows over tensor-parallel ranks; it needs tp > 1")
        if self.strict_gradients and not self.case.all_strict:
            raise ValueError("strict_gradients: Megatron-Core's own modules have no such order; set all cases to R")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError("vpp interleaves the chunks of pipeline ranks; it needs pp > 1")
        if self.cp_layout not in get_args(CpLayout):
            raise ValueError(f"cp_layout must be one of {', '.join(get_args(CpLayout))}, got {self.cp_layout!r}")
        if self.device not in get_args(Device):
            raise ValueError(f"device must be one of {', '.join(get_args(Device))}, got {self.device!r}")
        if self.weight_transfer not in get_args(WeightTransfer):
            raise ValueError(
                f"weight_transfer must be one of {', '.join(get_args(WeightTransfer))}, got {self.weight_transfer!r}"
            )
        if self.weight_transfer == "cuda_ipc" and self.device != "cuda":
            raise ValueError("weight_transfer cuda_ipc lends tensors of a card: set device to cuda, or use files")
        if not 0.0 <= self.optimizer_offload <= 1.0:
            raise ValueError(f"optimizer_offload must be in [0, 1], got {self.optimizer_offload}")
        if self.optimizer_offload and self.device != "cuda":
            raise ValueError("optimizer_offload: on a CPU moments are in the host's memory already; set it to 0")
        if self.device == "cuda" and self.transport == "shared_memory":
            raise ValueError("transport shared_memory carries tensors of the host; use gloo or peer_memory on cuda")
        if self.device == "cpu" and self.transport == "peer_memory":
            raise ValueError("transport peer_memory carries tensors of GPUs; use gloo or shared_memory on a CPU")
        if self.transport not in get_args(TransportName):
            raise ValueError(f"transport must be one of {', '.join(get_args(TransportName))}, got {self.transport!r}")

    def _check_sizes(self) -> None:
        for name in ("tp", "cp", "pp", "dp", "max_tp", "gradient_segments"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two (1, 2, 4, ...), got {size}")
        if self.tp > self.max_tp:
            raise ValueError(f"tp = {self.tp} is larger than max_tp = {self.max_tp}; raise max_tp to {self.tp}")
        if self.dp > self.gradient_segments:
            raise ValueError(f"gradient_segments = {self.gradient_segments} do not give dp = {self.dp} ranks one each")
        for name in ("vpp", "vocab_multiple", "max_tokens_per_gpu", "threads", "timeout_seconds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.world_size > 1 and not self.rendezvous:
            raise ValueError("rendezvous: more than one rank needs a file path that all ranks can reach")

    def _check_contract(self) -> None:
        if self.agreed and digest_of(self.agreed) != self.contract:
            raise ValueError(
                f"contract: {self.contract[:12] or 'none'} is not the digest of the agreed run contract, "
                f"{digest_of(self.agreed)[:12]}; give both from the same run contract"
            )

    def _check_log_probability(self) -> None:
        if self.contract and self.rollout_contract and self.contract != self.rollout_contract:
            raise ValueError(
                f"the trainer serves run contract {self.contract[:12]}, the engines {self.rollout_contract[:12]}"
            )
        if self.case.logp == "R" and not self.linear_logp_provider:
            raise ValueError(
                "log-probability on route R comes from a provider: set linear_logp_provider, or its case to P"
            )
        if self.case.logp == "R" and self.linear_logp_provider_mode == "audit":
            raise ValueError(
                "audit returns Megatron-Core's own log-probabilities: set the case of logp to P, or use strict"
            )

    def _check_numbers(self) -> None:
        if not self.temperature > 0.0 or self.temperature == float("inf"):
            raise ValueError(f"temperature must be positive and finite, got {self.temperature}")
        for name in ("lr", "weight_decay", "kl_coef", "clip_low", "clip_high", "grad_clip"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def world_size(self) -> int:
        """Ranks of one trainer; the tensor-parallel number runs fastest, then context, data and pipeline."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def layout(self) -> TrainLayout:
        """The parallel sizes alone."""
        return TrainLayout(
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            cp=self.cp,
            pp=self.pp,
            vpp=self.vpp,
            dp=self.dp,
        )
