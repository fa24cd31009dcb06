"""The parameters of a Llama-like `transformers` module, as the lean decoder reads them.

If dtype and device agree, the tensors are the module's own; another dtype needs one cast copy. On a CPU the fastest of
the layouts that `possible_layouts` names is used, and all but the plain one are copies. `refresh` updates a copy and
records its policy version; `find_stale` verifies it.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.decoder.lean_layer import Layer, Norm, OutputHead, Projection, silu_in_place
from verl.models.decoder.merged_weights import MergedHead, MergedLayer, MergedProjection
from verl.models.decoder.weight_layouts import DecoderShape, LayerOrHead, WeightLayout, possible_layouts
from verl.models.fastest import fastest
from verl.models.lora import is_adapted, merged_weight

LEAN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TIMED_ROWS = 64
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # tables that do not depend on the sequence length


def why_not_lean(model: nn.Module) -> str:
    """Why a model needs the generic decoder; empty if the lean one can run it."""
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
    """Reads parameters in one dtype on one device: the module's own tensors, or copies.

    Copies of an earlier reader are overwritten in place, so that captured graphs stay valid.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, previous_copies: dict[int, Tensor]):
        self.dtype, self.device, self._previous_copies = dtype, device, previous_copies
        self.copies: dict[int, Tensor] = {}  # by address of the source
        self.addresses: list[int] = []
        self.own_addresses: set[int] = set()  # addresses of the module's own tensors

    def read(self, parameter: Tensor | None) -> Tensor | None:
        """The whole parameter, or a copy. A collective where it is sharded over ranks."""
        if parameter is None:
            return None
        local = parameter.detach()
        if hasattr(local, "full_tensor"):  # a DTensor: whole on one rank, all-gathered from several
            local = local.to_local() if local.device_mesh.size() == 1 else local.full_tensor()
        if local.dtype == self.dtype and local.device == self.device:
            self.addresses.append(local.data_ptr())
            self.own_addresses.add(local.data_ptr())
            return local
        return self._copy(local.data_ptr(), local)

    def _copy(self, source_address: int, values: Tensor) -> Tensor:
        """A copy of `values`; one for each source, so tied tensors share it."""
        if source_address not in self.copies:
            old = self._previous_copies.get(source_address)
            if old is not None and old.shape == values.shape:
                self.copies[source_address] = old.copy_(values)
            else:
                self.copies[source_address] = values.to(device=self.device, dtype=self.dtype)
            self.addresses.append(self.copies[source_address].data_ptr())
        return self.copies[source_address]

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


class ShapeReader(ParameterReader):
    """Makes tensors of the parameters' shapes to time products with: no rank has to gather anything."""

    def read(self, parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else torch.full(parameter.shape, 0.01, dtype=self.dtype, device=self.device)

    def projection(self, linear: nn.Module) -> Projection:
        return super().projection(linear.base_layer if is_adapted(linear) else linear)


def fastest_layout(model: nn.Module, dtype: torch.dtype, device: torch.device) -> WeightLayout:
    """The layout in which one block decodes `TIMED_ROWS` tokens fastest on this machine."""
    num_weights, block = sum(p.numel() for p in model.parameters()), first_block(model)
    layouts = possible_layouts(num_weights, dtype, device)
    matrices = ", ".join("x".join(map(str, p.shape)) for p in block.parameters() if p.dim() == 2)
    ways = {layout.name: partial(timed_block, model, layout, device) for layout in layouts}
    choice = fastest(f"decoder weights {dtype}, {matrices}, {', '.join(ways)}", ways)
    return next(layout for layout in layouts if layout.name == choice)


def first_block(model: nn.Module) -> nn.Module:
    return next(iter(model.model.layers))


def timed_block(model: nn.Module, layout: WeightLayout, device: torch.device) -> Callable[[], Tensor]:
    """The work of one block around its attention, over made-up weights."""
    shape, reader = decoder_shape(model), ShapeReader(layout.activation_dtype, device, {})
    layer = layout.apply(reader.layer(first_block(model)), shape)
    tables = layout.rotary_tables(model, shape, TIMED_ROWS, device)
    rotation = tables if len(tables) > 1 else tables[0]
    x = torch.ones(TIMED_ROWS, model.config.hidden_size, dtype=layout.activation_dtype, device=device)
    attended = torch.ones(TIMED_ROWS, shape.heads * shape.head_dim, dtype=x.dtype, device=device)

    def block() -> Tensor:
        layer.qkv(x, rotation)
        return layer.add_mlp(layer.add_attention(x.clone(), attended))

    return block


class DecoderWeights:
    """All weights of the lean decoder. `copied_bytes` counts those that are not the module's own tensors."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        device: torch.device | None,
        layout: WeightLayout | None = None,
    ):
        first = model.get_input_embeddings().weight
        weight_dtype = dtype or first.dtype
        self.device = torch.device(device) if device is not None else first.device
        self.shape = decoder_shape(model)
        self.layout = layout or fastest_layout(model, weight_dtype, self.device)
        self.dtype = self.layout.activation_dtype  # of the cache and all but matrices
        self.version = -1
        self.copied_bytes = 0
        self._copies: dict[int, Tensor] = {}
        self.addresses: tuple[int, ...] = ()
        self.refresh(model, 0)

    @torch.no_grad()
    def refresh(self, model: nn.Module, version: int) -> None:
        """Read the current parameters as policy `version`."""
        reader = ParameterReader(self.dtype, self.device, self._copies)
        self._model, self.version = model, version
        self.embedding = reader.read(model.get_input_embeddings().weight)
        # tensors that are only read to make another layout are not stored
        scratch = reader if self.layout.is_plain else ParameterReader(self.dtype, self.device, {})
        self.head = self._change_layout(scratch.head(model))
        self.layers = [self._change_layout(scratch.layer(block)) for block in model.model.layers]
        self._copies, self.addresses = reader.copies, tuple(reader.addresses)
        stored = {id(t): t for _, t in self._named_tensors()}.values()
        own = reader.own_addresses | scratch.own_addresses
        self.copied_bytes = sum(t.nbytes for t in stored if t.layout != torch.strided or t.data_ptr() not in own)

    def _change_layout(self, part: LayerOrHead) -> LayerOrHead:
        return self.layout.apply(part, self.shape)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, part in (("embed_tokens", self.embedding), ("lm_head", self.head)):
            yield from named_tensors(part, name)
        for number, layer in enumerate(self.layers):
            yield from named_tensors(layer, f"layers.{number}")

    def free_copies(self) -> None:
        """Drop copies; the next `refresh` makes them again."""
        if self.copied_bytes:
            self.layers, self._copies, self.copied_bytes, self.version = [], {}, 0, -1
            self.embedding = self.head = None

    @torch.no_grad()
    def find_stale(self, model: nn.Module) -> str:
        """The first tensor that differs from the model's current one in this dtype and layout; empty if none.

        Every part is read a second time, one layer at a time, and compared bit for bit: oneDNN matrices in their plain
        layout, merged matrices with merged ones.
        """
        current = dict(self._named_tensors())
        part_readers = [("embed_tokens", lambda reader: reader.read(model.get_input_embeddings().weight))]
        part_readers += [("lm_head", lambda reader: reader.head(model))]
        for number, block in enumerate(model.model.layers):
            part_readers.append((f"layers.{number}", lambda reader, block=block: reader.layer(block)))
        for name, read in part_readers:
            part = read(ParameterReader(self.dtype, self.device, {}))
            if self.layout.merged and not isinstance(part, Tensor):
                part = self._change_layout(part)
            for path, expected in named_tensors(part, name):
                if not same_bytes(current[path], expected):
                    return path
        return ""

    def rotary_tables(self, positions: int) -> tuple[Tensor, ...]:
        """The tables that `layer.qkv` rotates with, one row per position, from the model's own rotary module."""
        return self.layout.rotary_tables(self._model, self.shape, positions, self.device)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def logits(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., V); never a view of a stored tensor."""
        return self.head(x)


def named_tensors(part: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tensor, projection, norm, head or layer, with its path below `name`."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, Norm | Projection | MergedProjection | OutputHead | MergedHead | Layer | MergedLayer):
        for key, value in vars(part).items():
            yield from named_tensors(value, f"{name}.{key}")


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit in any layout: NaN equals NaN, zero differs from minus zero."""
    a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
    a, b = (t if t.layout == torch.strided else t.to_dense() for t in (a, b))
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape:
        return True
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))
