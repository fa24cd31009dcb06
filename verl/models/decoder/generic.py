"""Prefill and decode passes through a model's own `forward` and cache: any causal LM of `transformers`.

Sequences run in waves: the next wave begins when no row of the last one is left. Models with recurrent layers take
prompts of one length per wave, because padding would change their state.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from verl.models.decoder.lean import CacheTarget, CacheWindow
from verl.models.decoder.lean_weights import same_bytes
from verl.plugin.library_versions import cache_argument


class GenericDecoder:
    """A decoder for every family, slower than the lean one."""

    supports_continuous_batching = supports_mixed_batches = supports_shared_prompts = False

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None, device: torch.device | None = None):
        first = next(model.parameters())
        self.dtype = dtype or first.dtype
        self.device = torch.device(device) if device is not None else first.device
        self.cache: DynamicCache | None = None
        self.first_column = 0  # column of the cache's first entry
        self._copy: nn.Module | None = None
        self.refresh(model, 0)
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model.forward)
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self.supports_padded_prompts = self._takes_positions and not any(DynamicCache(config=model.config).is_linear)

    @property
    def copied_bytes(self) -> int:
        return 0 if self._copy is None else sum(p.nbytes for p in self._copy.parameters())

    def bytes_per_token(self) -> int:
        """Keys and values of one token, from the config's head counts."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * heads * size * self.dtype.itemsize

    @torch.no_grad()
    def refresh(self, model: nn.Module, version: int) -> None:
        """Sample from `model` as policy `version`: the module itself, or a copy in the rollout dtype."""
        first = next(model.parameters())
        self.weights_version = version
        if first.dtype == self.dtype and first.device == self.device:
            self.model, self._copy = model, None
        elif self._copy is None:
            self.model = self._copy = copy.deepcopy(model).to(device=self.device, dtype=self.dtype).eval()
        else:
            for target, source in zip(self._copy.parameters(), model.parameters(), strict=True):
                target.copy_(source)

    @torch.no_grad()
    def find_stale(self, model: nn.Module) -> str:
        """The first parameter whose copy differs from the model's bit for bit; empty if none."""
        if self._copy is None:
            return ""
        copies = dict(self._copy.named_parameters())
        expected = ((name, p.to(self.device, self.dtype)) for name, p in model.named_parameters())
        return next((name for name, tensor in expected if not same_bytes(copies[name], tensor)), "")

    def allocate(self, rows: int, columns: int) -> None:
        """Nothing to do: the cache grows with its sequences."""

    def free_cache(self) -> None:
        self.cache = None

    def free_copies(self) -> None:
        """Drop the copy; the next `refresh` makes it again."""
        if self._copy is not None:
            self.model, self._copy = None, None

    def prefill(self, prompts: list[list[int]], target: CacheTarget) -> Tensor:
        """Logits (N, V) float32 after each prompt; the cache then has a row for each sequence that continues it."""
        repeats, column = target.repeats, target.column
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)
        pads = torch.tensor([width - len(p) for p in prompts], device=self.device)
        self.cache, self.first_column = DynamicCache(config=self.model.config), column - width
        columns = torch.arange(width, device=self.device)
        logits = self._forward(ids, columns >= pads.unsqueeze(1), (columns - pads.unsqueeze(1)).clamp(min=0))
        if max(repeats) > 1:
            index = torch.arange(len(prompts)).repeat_interleave(torch.tensor(repeats))
            self.cache.reorder_cache(index.to(self.device))
        return logits

    def decode(self, tokens_B: Tensor, window: CacheWindow) -> Tensor:
        """Logits (B, V) after `tokens_B`."""
        columns = torch.arange(self.first_column, window.column + 1, device=self.device)
        visible = columns >= window.starts_B.unsqueeze(1)
        return self._forward(tokens_B.unsqueeze(1), visible, (window.column - window.starts_B).unsqueeze(1))

    def _forward(self, ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        kwargs: dict[str, Any] = {self._cache_argument: self.cache}
        if self._takes_positions:
            kwargs["position_ids"] = positions
        if self._takes_logits_to_keep:
            kwargs["logits_to_keep"] = 1
        if self.supports_padded_prompts:
            kwargs["attention_mask"] = visible.long()
        training = self.model.training
        self.model.train(False)
        try:
            out = self.model(input_ids=ids, use_cache=True, **kwargs)
        finally:
            self.model.train(training)
        return out.logits[:, -1].float().clone()

    def move_rows(self, sources: list[int], targets: list[int], count: int, window: CacheWindow) -> None:
        """Copy rows `sources` to rows `targets`; afterwards rows 0..count-1 are in use."""
        if not count:
            self.cache = None
            return
        index = torch.arange(count, device=self.device)
        index[targets] = torch.tensor(sources, dtype=torch.int64, device=self.device)
        self.cache.reorder_cache(index)

    def shift_columns(self, count: int, first_column: int, column: int, by: int) -> None:
        """Only the numbering of columns changes."""
        self.first_column += by
