"""The parameters of a Llama-like `transformers` module, as the lean decoder reads them.

Where dtype and device agree the tensors are the module's own. Another dtype takes one cast copy. On a CPU a small model
takes a merged copy, a larger bfloat16 model one in the layout that its kernels read. A copy is stamped with its
version, refreshed by `refresh` and proved by `find_stale`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.decoder.lean_layer import Layer, Norm, OutputHead, Projection, silu_in_place
from verl.models.decoder.merged_weights import (
    MAX_MERGED_BYTES,
    MergedHead,
    MergedLayer,
    MergedProjection,
    rotation_table,
)
from verl.models.decoder.onednn_weights import can_use_onednn_layout, to_onednn_layout
from verl.models.lora import is_adapted, merged_weight

LEAN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # tables that do not depend on the sequence length


def why_not_lean(model: nn.Module) -> str:
    """Why a model needs the generic path; empty when the lean one can run it."""
    config = model.config
    if config.model_type not in LEAN_FAMILIES:
        return f"model family {config.model_type!r} is not one of {', '.join(LEAN_FAMILIES)}"
    if not type(model).__name__.endswith("ForCausalLM"):
        return f"{type(model).__name__} wraps the model"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        return f"rope_type {rope!r} depends on the sequence length"
    unsupported = [
        f"{name} is a {type(module).__name__}"
        for name, module in model.model.layers.named_modules()
        if name.endswith("_proj")
        and type(module) is not nn.Linear
        and not is_adapted(module)
        and not type(module).__name__.startswith("FSDP")
    ]
    return unsupported[0] if unsupported else ""


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


class ParameterReader:
    """Takes parameters in one dtype on one device: the module's own tensors, or copies.

    Copies of an earlier reader are written over, so that captured graphs stay valid.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, previous_copies: dict[int, Tensor]):
        self.dtype, self.device, self._previous_copies = dtype, device, previous_copies
        self.copies: dict[int, Tensor] = {}  # by address of the source
        self.addresses: list[int] = []
        self.own_addresses: set[int] = set()  # addresses of the module's own tensors

    def read(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None:
            return None
        local = parameter.detach()
        if hasattr(local, "full_tensor"):  # DTensor: one rank holds it all, more must gather
            local = local.to_local() if local.device_mesh.size() == 1 else local.full_tensor()
        if local.dtype == self.dtype and local.device == self.device:
            self.addresses.append(local.data_ptr())
            self.own_addresses.add(local.data_ptr())
            return local
        return self._copy(local.data_ptr(), local)

    def _copy(self, key: int, values: Tensor) -> Tensor:
        if key not in self.copies:
            old = self._previous_copies.get(key)
            if old is not None and old.shape == values.shape:
                self.copies[key] = old.copy_(values)
            else:
                self.copies[key] = values.to(device=self.device, dtype=self.dtype)
            self.addresses.append(self.copies[key].data_ptr())
        return self.copies[key]

    def projection(self, linear: nn.Module) -> Projection:
        if is_adapted(linear):
            weight = self._copy(linear.base_layer.weight.data_ptr(), merged_weight(linear))
            return Projection(weight, self.read(linear.base_layer.bias))
        return Projection(self.read(linear.weight), self.read(linear.bias))

    def norm(self, norm: nn.Module) -> Norm:
        return Norm(self.read(norm.weight), norm.variance_epsilon)

    def head(self, model: nn.Module) -> OutputHead:
        return OutputHead(self.norm(model.model.norm), self.projection(model.get_output_embeddings()))

    def layer(self, block: nn.Module) -> Layer:
        attention, mlp = block.self_attn, block.mlp
        normed = "q_norm" in dict(attention.named_children())
        silu = isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation"
        return Layer(
            input_norm=self.norm(block.input_layernorm),
            post_norm=self.norm(block.post_attention_layernorm),
            q=self.projection(attention.q_proj),
            k=self.projection(attention.k_proj),
            v=self.projection(attention.v_proj),
            attention_out=self.projection(attention.o_proj),
            q_norm=self.norm(attention.q_norm) if normed else None,
            k_norm=self.norm(attention.k_norm) if normed else None,
            gate=self.projection(mlp.gate_proj),
            up=self.projection(mlp.up_proj),
            down=self.projection(mlp.down_proj),
            activation=silu_in_place if silu else mlp.act_fn,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            window=_sliding_window(attention),
        )


LayerOrHead = Layer | OutputHead | MergedLayer | MergedHead


class DecoderWeights:
    """Everything the lean decoder multiplies with. `copied_bytes` counts what is not the module's own."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, device: torch.device | None):
        first = model.get_input_embeddings().weight
        wanted = dtype or first.dtype
        self.device = torch.device(device) if device is not None else first.device
        self.shape = decoder_shape(model)
        size = sum(p.numel() for p in model.parameters())
        self.uses_onednn_layout = can_use_onednn_layout(wanted, self.device, size * wanted.itemsize)
        fast = self.uses_onednn_layout or (wanted == torch.float32 and self.device.type == "cpu")
        self.merges_projections = fast and size * torch.float32.itemsize <= MAX_MERGED_BYTES
        self.dtype = torch.float32 if self.merges_projections else wanted  # of what is not a matrix, the cache included
        self.version = -1
        self.copied_bytes = 0
        self._copies: dict[int, Tensor] = {}
        self.addresses: tuple[int, ...] = ()
        self.refresh(model, 0)

    @torch.no_grad()
    def refresh(self, model: nn.Module, version: int) -> None:
        """Take the parameters as they are now, as `version`."""
        reader = ParameterReader(self.dtype, self.device, self._copies)
        self._model, self.version = model, version
        self.embedding = reader.read(model.get_input_embeddings().weight)
        changes_layout = self.merges_projections or self.uses_onednn_layout
        scratch = (
            ParameterReader(self.dtype, self.device, {}) if changes_layout else reader
        )  # not kept besides what is made of it
        self.head = self._change_layout(scratch.head(model))
        self.layers = [self._change_layout(scratch.layer(block)) for block in model.model.layers]
        self._copies, self.addresses = reader.copies, tuple(reader.addresses)
        kept_tensors = {id(t): t for _, t in self._named_tensors()}.values()
        own = reader.own_addresses | scratch.own_addresses
        self.copied_bytes = sum(t.nbytes for t in kept_tensors if t.layout != torch.strided or t.data_ptr() not in own)

    def _change_layout(self, part: LayerOrHead) -> LayerOrHead:
        if self.merges_projections:
            if isinstance(part, OutputHead):
                return MergedHead(part, self.uses_onednn_layout)
            return MergedLayer(part, self.shape.heads, self.shape.kv_heads, self.uses_onednn_layout)
        if self.uses_onednn_layout:
            to_onednn_layout(part)
        return part

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, part in (("embed_tokens", self.embedding), ("lm_head", self.head)):
            yield from named_tensors(part, name)
        for number, layer in enumerate(self.layers):
            yield from named_tensors(layer, f"layers.{number}")

    def free_copies(self) -> None:
        """Drop copies; the next `refresh` takes them again."""
        if self.copied_bytes:
            self.layers, self._copies, self.copied_bytes, self.version = [], {}, 0, -1
            self.embedding = self.head = None

    @torch.no_grad()
    def find_stale(self, model: nn.Module) -> str:
        """The first tensor that is not what `model` holds now in this dtype and layout; empty if none.

        Every part is read a second time, one layer at a time, and compared bit for bit: oneDNN matrices in
        their plain layout, merged ones with their like.
        """
        current = dict(self._named_tensors())
        part_readers = [("embed_tokens", lambda reader: reader.read(model.get_input_embeddings().weight))]
        part_readers += [("lm_head", lambda reader: reader.head(model))]
        for number, block in enumerate(model.model.layers):
            part_readers.append((f"layers.{number}", lambda reader, block=block: reader.layer(block)))
        for name, read in part_readers:
            part = read(ParameterReader(self.dtype, self.device, {}))
            if self.merges_projections and not isinstance(part, Tensor):
                part = self._change_layout(part)
            for path, wanted in named_tensors(part, name):
                if not same_bytes(current[path], wanted):
                    return path
        return ""

    def rotary_tables(self, positions: int) -> tuple[Tensor, ...]:
        """What `layer.qkv` rotates with, one row per position, from the model's own rotary module."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self._model.model.rotary_emb(probe, torch.arange(positions, device=self.device).unsqueeze(0))
        if self.merges_projections:
            return (rotation_table(cos[0], sin[0], self.shape.heads + self.shape.kv_heads),)
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def logits(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., V); never a view of anything kept."""
        return self.head(x)


def named_tensors(part: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tensor, projection, norm, head or layer, with its path below `name`."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, Norm | Projection | MergedProjection | OutputHead | MergedHead | Layer | MergedLayer):
        for key, value in vars(part).items():
            yield from named_tensors(value, f"{name}.{key}")


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, whatever their layout: a nan equals itself, zero is not minus zero."""
    a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
    a, b = (t if t.layout == torch.strided else t.to_dense() for t in (a, b))
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape:
        return True
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))
