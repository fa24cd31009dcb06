"""What our weights need inside vLLM's own workers; vLLM mixes `WeightReceiver` into its worker class.

Weights arrive in the checkpoint's names and layout, bucket by bucket, between `begin` and `finish`; vLLM's layerwise
reload converts each layer as soon as it is whole. Two things it leaves to its caller are done here: a head tied to the
embedding keeps a packed copy of its own on some platforms, which nothing refreshes, and names that match no parameter
are not errors to it.
"""

import logging
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from verl.checkpoint_engine.endpoint import TransportEndpoint
from verl.models.fingerprint import fingerprint

# It warns at each publish of layers that get nothing, as tied heads and tables do. `verl_finish` tells what is missing.
logging.getLogger(finalize_layerwise_reload.__module__).setLevel(logging.ERROR)


class WeightReceiver:
    """Methods for `collective_rpc`; `self` is vLLM's worker."""

    model_runner: Any
    rank: int
    vllm_config: Any

    def verl_begin(self) -> None:
        """Take the layers apart, ready for a whole set of weights; what an update that failed left is thrown away."""
        if getattr(self, "_verl_loading", False):
            self.verl_finish()
        self._verl_loading = True
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())
        self._verl_loaded: set[str] = set()

    def verl_load(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Some of the tensors. Returns the fingerprint of each as it arrived."""
        weights = list(weights)
        arrived = {name: fingerprint(tensor) for name, tensor in weights}
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            loaded = self.model_runner.get_model().load_weights(iter(weights))
        self._verl_loaded |= set(loaded or ())
        return arrived

    def verl_transport_step(self, step: str, argument: Any) -> Any:
        """A step of this worker's transport endpoint; of "receive", the fingerprint of each tensor as it arrived."""
        if not hasattr(self, "_verl_endpoint"):
            self._verl_endpoint = TransportEndpoint()
        if step != "receive":
            return getattr(self._verl_endpoint, step)(argument[self.rank] if step == "connect" else argument)
        self.verl_begin()
        arrived: dict[str, str] = {}
        with closing(self._verl_endpoint.receive(argument)) as arriving:
            for bucket in arriving:
                arrived |= self.verl_load(bucket)
        return arrived

    def verl_finish(self) -> list[str]:
        """Put the layers together again. Returns the parameters that no tensor reached (empty when all is well)."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            finalize_layerwise_reload(model, self.model_runner.model_config)
            refresh_tied_weights(model)
        self._verl_loading = False
        self.model_runner.reset_encoder_cache()
        return sorted({name for name, _ in model.named_parameters()} - self._verl_loaded)


def refresh_tied_weights(model: nn.Module) -> None:
    """Refresh layers that compute with another layer's weight: a tied head may hold a packed copy of the embedding."""
    owners: set[int] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        quantization = getattr(module, "quant_method", None)
        if id(weight) in owners and quantization is not None:
            quantization.process_weights_after_loading(module)
        owners.add(id(weight))
