"""The loss of supervised fine-tuning: negative log-likelihood per token."""

from torch import Tensor


class LikelihoodLoss:
    """-log p of each trained token, times its loss weight."""

    per_token = True
    outputs: tuple[str, ...] = ("logprobs",)
    columns: tuple[str, ...] = ("loss_mask", "loss_weights")
    optional_columns: tuple[str, ...] = ()

    def __call__(
        self, outputs: dict[str, Tensor], columns: dict[str, Tensor], cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -outputs["logprobs"] * columns["loss_weights"], {}
