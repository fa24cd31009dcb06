"""The parameters of a Llama-like `transformers` module, as the lean decoder reads them.

Where dtype and device agree the tensors are the module's own. Another dtype takes one cast copy. On a CPU a small model
takes a packed copy, a larger bfloat16 model one in the layout that its kernels read. A copy is stamped with its
version, refreshed by `refresh` and proved by `stale`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.decoder_layer import Head, Layer, Norm, Projection, silu_in_place
from verl.models.decoder_packed import PACKED_BYTES, Packed, PackedHead, PackedLayer, rotation_table
from verl.models.decoder_reordered import can_reorder, reorder
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


class Reader:
    """Takes parameters in one dtype on one device: the module's own tensors, or copies.

    Copies of an earlier reader are written over, so that captured graphs stay valid.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, earlier: dict[int, Tensor]):
        self.dtype, self.device, self._earlier = dtype, device, earlier
        self.copies: dict[int, Tensor] = {}  # by address of the source
        self.taken: list[int] = []
        self.own: set[int] = set()  # addresses of the module's own tensors

    def take(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None:
            return None
        local = parameter.detach()
        if hasattr(local, "full_tensor"):  # DTensor: one rank holds it all, more must gather
            local = local.to_local() if local.device_mesh.size() == 1 else local.full_tensor()
        if local.dtype == self.dtype and local.device == self.device:
            self.taken.append(local.data_ptr())
            self.own.add(local.data_ptr())
            return local
        return self._copy(local.data_ptr(), local)

    def _copy(self, key: int, values: Tensor) -> Tensor:
        if key not in self.copies:
            old = self._earlier.get(key)
            if old is not None and old.shape == values.shape:
                self.copies[key] = old.copy_(values)
            else:
                self.copies[key] = values.to(device=self.device, dtype=self.dtype)
            self.taken.append(self.copies[key].data_ptr())
        return self.copies[key]

    def projection(self, linear: nn.Module) -> Projection:
        if is_adapted(linear):
            weight = self._copy(linear.base_layer.weight.data_ptr(), merged_weight(linear))
            return Projection(weight, self.take(linear.base_layer.bias))
        return Projection(self.take(linear.weight), self.take(linear.bias))

    def norm(self, norm: nn.Module) -> Norm:
        return Norm(self.take(norm.weight), norm.variance_epsilon)

    def head(self, model: nn.Module) -> Head:
        return Head(self.norm(model.model.norm), self.projection(model.get_output_embeddings()))

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


Part = Layer | Head | PackedLayer | PackedHead


class DecoderWeights:
    """Everything the lean decoder multiplies with. `copied_bytes` counts what is not the module's own."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, device: torch.device | None):
        first = model.get_input_embeddings().weight
        wanted = dtype or first.dtype
        self.device = torch.device(device) if device is not None else first.device
        self.shape = decoder_shape(model)
        size = sum(p.numel() for p in model.parameters())
        self.reorders = can_reorder(wanted, self.device, size * wanted.itemsize)
        fast = self.reorders or (wanted == torch.float32 and self.device.type == "cpu")
        self.packs = fast and size * torch.float32.itemsize <= PACKED_BYTES
        self.dtype = torch.float32 if self.packs else wanted  # of what is not a matrix, the cache included
        self.version = -1
        self.copied_bytes = 0
        self._copies: dict[int, Tensor] = {}
        self.addresses: tuple[int, ...] = ()
        self.refresh(model, 0)

    @torch.no_grad()
    def refresh(self, model: nn.Module, version: int) -> None:
        """Take the parameters as they are now, as `version`."""
        reader = Reader(self.dtype, self.device, self._copies)
        self._model, self.version = model, version
        self.embedding = reader.take(model.get_input_embeddings().weight)
        laid_out = self.packs or self.reorders
        passing = Reader(self.dtype, self.device, {}) if laid_out else reader  # not kept besides what is made of it
        self.head = self._lay_out(passing.head(model))
        self.layers = [self._lay_out(passing.layer(block)) for block in model.model.layers]
        self._copies, self.addresses = reader.copies, tuple(reader.taken)
        held = {id(t): t for _, t in self._held()}.values()
        own = reader.own | passing.own
        self.copied_bytes = sum(t.nbytes for t in held if t.layout != torch.strided or t.data_ptr() not in own)

    def _lay_out(self, part: Part) -> Part:
        if self.packs:
            if isinstance(part, Head):
                return PackedHead(part, self.reorders)
            return PackedLayer(part, self.shape.heads, self.shape.kv_heads, self.reorders)
        if self.reorders:
            reorder(part)
        return part

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        for name, part in (("embed_tokens", self.embedding), ("lm_head", self.head)):
            yield from tensors(part, name)
        for number, layer in enumerate(self.layers):
            yield from tensors(layer, f"layers.{number}")

    def free_copies(self) -> None:
        """Drop copies; the next `refresh` takes them again."""
        if self.copied_bytes:
            self.layers, self._copies, self.copied_bytes, self.version = [], {}, 0, -1
            self.embedding = self.head = None

    @torch.no_grad()
    def stale(self, model: nn.Module) -> str:
        """The first tensor that is not what `model` holds now in this dtype and layout; empty if none.

        Every part is read a second time, one layer at a time, and compared bit for bit: reordered matrices in their
        plain layout, packed ones with their like.
        """
        held = dict(self._held())
        readings = [("embed_tokens", lambda reader: reader.take(model.get_input_embeddings().weight))]
        readings += [("lm_head", lambda reader: reader.head(model))]
        for number, block in enumerate(model.model.layers):
            readings.append((f"layers.{number}", lambda reader, block=block: reader.layer(block)))
        for name, read in readings:
            part = read(Reader(self.dtype, self.device, {}))
            if self.packs and not isinstance(part, Tensor):
                part = self._lay_out(part)
            for path, wanted in tensors(part, name):
                if not same_bytes(held[path], wanted):
                    return path
        return ""

    def rotary_tables(self, positions: int) -> tuple[Tensor, ...]:
        """What `layer.qkv` rotates with, one row per position, from the model's own rotary module."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self._model.model.rotary_emb(probe, torch.arange(positions, device=self.device).unsqueeze(0))
        if self.packs:
            return (rotation_table(cos[0], sin[0], self.shape.heads + self.shape.kv_heads),)
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def logits(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., V); never a view of anything kept."""
        return self.head(x)


def tensors(part: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tensor, projection, norm, head or layer, with its path below `name`."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, Norm | Projection | Packed | Head | PackedHead | Layer | PackedLayer):
        for key, value in vars(part).items():
            yield from tensors(value, f"{name}.{key}")


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, whatever their layout: a nan equals itself, zero is not minus zero."""
    a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
    a, b = (t if t.layout == torch.strided else t.to_dense() for t in (a, b))
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape:
        return True
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))
