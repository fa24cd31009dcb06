"""The parameters of a Llama-like `transformers` module, as the lean decoder reads them.

Where dtype and device agree the tensors are the module's own. Another dtype takes one cast copy, and a small float32
model on a CPU one packed copy. A copy is stamped with the version it was taken at and refreshed by `refresh`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.decoder_layer import Layer, Norm, Projection
from verl.models.decoder_packed import PACKED_BYTES, Packed, PackedLayer, rotation_table, unit_norm
from verl.models.lora import is_adapted, merged_weight

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # tables that do not depend on the sequence length


def why_not_lean(model: nn.Module) -> str:
    """Why a model needs the generic path; empty when the lean one can run it."""
    config = model.config
    if config.model_type not in FAMILIES:
        return f"model family {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    if not type(model).__name__.endswith("ForCausalLM"):
        return f"{type(model).__name__} wraps the model"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        return f"rope_type {rope!r} depends on the sequence length"
    odd = [
        f"{name} is a {type(module).__name__}"
        for name, module in model.model.layers.named_modules()
        if name.endswith("_proj")
        and type(module) is not nn.Linear
        and not is_adapted(module)
        and not type(module).__name__.startswith("FSDP")
    ]
    return odd[0] if odd else ""


@dataclass(frozen=True)
class DecoderShape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None  # tokens a sliding layer sees, the newest included
    vocab: int


def decoder_shape(model: nn.Module) -> DecoderShape:
    config = model.config
    attentions = [layer.self_attn for layer in model.model.layers]
    windows = {_sliding_window(attention) for attention in attentions} - {None}
    return DecoderShape(
        layers=len(attentions),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attentions[0].head_dim,
        sliding_window=windows.pop() if windows else None,
        vocab=config.vocab_size,
    )


def _sliding_window(attention: nn.Module) -> int | None:
    # Mistral keeps the window in the config, Qwen on the layers that slide, Llama has none.
    if "sliding_window" in vars(attention):
        return attention.sliding_window
    return attention.config.sliding_window if attention.config.model_type == "mistral" else None


class DecoderWeights:
    """Everything the lean decoder multiplies with. `copied_bytes` counts what is not the module's own."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, device: torch.device | None):
        first = model.get_input_embeddings().weight
        self.dtype = dtype or first.dtype
        self.device = torch.device(device) if device is not None else first.device
        self.shape = decoder_shape(model)
        size = sum(p.numel() for p in model.parameters()) * self.dtype.itemsize
        self.packs = self.dtype == torch.float32 and self.device.type == "cpu" and size <= PACKED_BYTES
        self.version = -1
        self.copied_bytes = 0
        self._packed_head: Packed | None = None
        self._copies: dict[int, Tensor] = {}  # by address of the source
        self.addresses: tuple[int, ...] = ()
        self.refresh(model, 0)

    def refresh(self, model: nn.Module, version: int) -> None:
        """Take the parameters as they are now, as `version`."""
        self._model, self.version, self.copied_bytes = model, version, 0
        self._old_copies, self._copies = self._copies, {}
        self._taken: list[int] = []
        self.embedding = self._take(model.get_input_embeddings().weight)
        self.head = self._projection(model.get_output_embeddings())
        self.final_norm = self._norm(model.model.norm)
        self.layers = [self._layer(block) for block in model.model.layers]
        self._old_copies = {}
        self.addresses = tuple(self._taken)
        if self.packs:
            self._pack()

    @torch.no_grad()
    def _pack(self) -> None:
        self._packed_head = Packed.join([self.head], self.final_norm)
        self._final_eps = torch.tensor(self.final_norm.eps)
        self.layers = [PackedLayer(layer, self.shape.heads, self.shape.kv_heads) for layer in self.layers]
        self.copied_bytes = self._packed_head.nbytes + sum(layer.nbytes for layer in self.layers)

    def free_copies(self) -> None:
        """Drop copies; the next `refresh` takes them again."""
        if self.copied_bytes:
            self.layers, self._copies, self.copied_bytes, self.version = [], {}, 0, -1
            self.embedding = self.head = self.final_norm = self._packed_head = None

    def _take(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None:
            return None
        local = parameter.detach()
        if hasattr(local, "full_tensor"):  # DTensor: one rank holds it all, more must gather
            local = local.to_local() if local.device_mesh.size() == 1 else local.full_tensor()
        if local.dtype == self.dtype and local.device == self.device:
            self._taken.append(local.data_ptr())
            return local
        return self._copy(local.data_ptr(), local)

    def _copy(self, key: int, values: Tensor) -> Tensor:
        if key not in self._copies:
            old = self._old_copies.get(key)
            if old is not None and old.shape == values.shape:  # same place, so captured graphs stay valid
                self._copies[key] = old.copy_(values)
            else:
                self._copies[key] = values.to(device=self.device, dtype=self.dtype)
            self.copied_bytes += self._copies[key].nbytes
            self._taken.append(self._copies[key].data_ptr())
        return self._copies[key]

    def _projection(self, linear: nn.Module) -> Projection:
        if is_adapted(linear):
            weight = self._copy(linear.base_layer.weight.data_ptr(), merged_weight(linear))
            return Projection(weight, self._take(linear.base_layer.bias))
        return Projection(self._take(linear.weight), self._take(linear.bias))

    def _norm(self, norm: nn.Module) -> Norm:
        return Norm(self._take(norm.weight), norm.variance_epsilon)

    def _layer(self, block: nn.Module) -> Layer:
        attention, mlp = block.self_attn, block.mlp
        normed = "q_norm" in dict(attention.named_children())
        silu = isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation"
        return Layer(
            input_norm=self._norm(block.input_layernorm),
            post_norm=self._norm(block.post_attention_layernorm),
            q=self._projection(attention.q_proj),
            k=self._projection(attention.k_proj),
            v=self._projection(attention.v_proj),
            attention_out=self._projection(attention.o_proj),
            q_norm=self._norm(attention.q_norm) if normed else None,
            k_norm=self._norm(attention.k_norm) if normed else None,
            gate=self._projection(mlp.gate_proj),
            up=self._projection(mlp.up_proj),
            down=self._projection(mlp.down_proj),
            activation=_silu_in_place if silu else mlp.act_fn,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            window=_sliding_window(attention),
        )

    def rotary_tables(self, positions: int) -> tuple[Tensor, ...]:
        """What `layer.qkv` rotates with, one row per position, from the model's own rotary module."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self._model.model.rotary_emb(probe, torch.arange(positions, device=self.device).unsqueeze(0))
        return (rotation_table(cos[0], sin[0]),) if self.packs else (cos[0], sin[0])

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def logits(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., V) float32; never a view of anything kept."""
        if self.packs:
            return self._packed_head(unit_norm(x, self._final_eps))
        return self.head(self.final_norm(x)).float()


def _silu_in_place(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)
