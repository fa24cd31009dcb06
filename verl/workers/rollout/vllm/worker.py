"""Loads published weights in vLLM's own workers; vLLM mixes `WeightReceiver` into its worker class.

Weights arrive in the checkpoint's names and layout, bucket by bucket, between `verl_begin` and `verl_finish`; vLLM's
layerwise reload converts each layer as soon as it is complete. This module does what the reload leaves out: it renews
a tied head, which has its own converted copy of the embedding on some platforms; it packs joined experts for the CPU;
it reports parameters that received nothing, as names that match no parameter are not errors to vLLM; and it reads every
layer back.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import verl.workers.rollout.vllm.logprobs  # noqa: F401 - it changes vLLM's samplers
from verl.checkpoint_engine.endpoint import TransportEndpoint
from verl.models.fingerprint import fingerprint
from verl.runtime.wire import deserialize, serialize
from verl.workers.rollout.base import ReadBack
from verl.workers.rollout.vllm.adapters import load_adapters, plain_layers
from verl.workers.rollout.vllm.experts import repack_experts
from verl.workers.rollout.vllm.weight_readback import WeightReader

# It warns at each publish of layers that get nothing, such as tied heads. `verl_finish` reports missing parameters.
logging.getLogger(finalize_layerwise_reload.__module__).setLevel(logging.ERROR)


class WeightReceiver:
    """Methods for `collective_rpc`; `self` is vLLM's worker."""

    model_runner: Any
    rank: int
    vllm_config: Any

    def verl_over_wire(self, message: bytes) -> bytes:
        """Call a method of this class where vLLM's own messages between processes hold plain values only."""
        method, args = deserialize(message)
        assert method.startswith("verl_")
        return serialize(getattr(self, method)(*args))

    def verl_begin(self) -> None:
        """Discard what a failed update left open."""
        self._verl_adapters: dict[str, Tensor] = {}
        if getattr(self, "_verl_loading", False):
            self._finish_reload()

    @contextmanager
    def _plain_model(self) -> Iterator[Any]:
        """The model without its layers for adapters, in a layerwise reload of all its weights."""
        with plain_layers(self.model_runner.get_model()) as model, set_current_vllm_config(self.vllm_config):
            if not getattr(self, "_verl_loading", False):
                self._verl_loading = True
                if not hasattr(self, "_verl_reader"):
                    self._verl_reader = WeightReader(model)
                self._verl_reader.expected = {}
                initialize_layerwise_reload(model)
                self._verl_loaded: set[str] = set()
            yield model

    def verl_load(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Load some of the tensors; keep adapters until all have come. Returns the fingerprint of each as received."""
        weights = list(weights)
        arrived = {name: fingerprint(tensor) for name, tensor in weights}
        self._verl_adapters |= {name: tensor.clone() for name, tensor in weights if ".lora_" in name}
        weights = [(name, tensor) for name, tensor in weights if name not in self._verl_adapters]
        if weights:
            with self._plain_model() as model, torch.no_grad():
                for name, tensor in weights:
                    self._verl_reader.record_expected(name, tensor, arrived[name])
                self._verl_loaded |= set(model.load_weights(iter(weights)) or ())
        return arrived

    def verl_transport_step(self, step: str, argument: Any) -> Any:
        """Run a step of this worker's transport endpoint; "receive" returns each tensor's fingerprint as received."""
        if not hasattr(self, "_verl_endpoint"):
            self._verl_endpoint = TransportEndpoint()
        if step != "receive":
            layout = self.vllm_config.parallel_config
            number = layout.data_parallel_index * layout.world_size + self.rank
            return getattr(self._verl_endpoint, step)(argument[number] if step == "connect" else argument)
        self.verl_begin()
        arrived: dict[str, str] = {}
        with closing(self._verl_endpoint.receive(argument)) as arriving:
            for bucket in arriving:
                arrived |= self.verl_load(bucket)
        return arrived

    def verl_finish(self) -> ReadBack:
        """End the update. Returns what the layers now compute with, compared with what arrived."""
        adapters, self._verl_adapters = self._verl_adapters, {}
        held = self._finish_reload() if getattr(self, "_verl_loading", False) or not adapters else ReadBack(0)
        if not adapters or held.missing:
            return held
        more = load_adapters(self.model_runner.get_model().lora_manager, adapters)
        num_tensors, wrong = held.num_tensors + more.num_tensors, held.wrong + more.wrong
        return ReadBack(num_tensors, wrong, (), held.unread + more.unread, more.num_adapters)

    def _finish_reload(self) -> ReadBack:
        with self._plain_model() as model:
            with torch.no_grad():
                finalize_layerwise_reload(model, self.model_runner.model_config)
                refresh_tied_weights(model)
                repack_experts(model)
            self._verl_loading = False
            self.model_runner.reset_encoder_cache()
            missing = sorted({name for name, _ in model.named_parameters()} - self._verl_loaded)
            if missing:  # nothing to compare with
                return ReadBack(0, (), tuple(missing), ())
            return self._verl_reader.compare_and_reset()


def refresh_tied_weights(model: nn.Module) -> None:
    """Refresh layers that use another layer's weight: a tied head may have a converted copy of the embedding."""
    owners: set[int] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        quantization = getattr(module, "quant_method", None)
        if id(weight) in owners and quantization is not None:
            quantization.process_weights_after_loading(module)
        owners.add(id(weight))
