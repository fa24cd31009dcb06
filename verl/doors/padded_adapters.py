"""Adapters for functions written for padded (bs, T) tensors, so that they run on packed batches.

Part of the door `verl.trainer.ppo.core_algos`, which says what an outside function gets and may do.
Shapes: N sequences, W the longest response of them, T packed tokens.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch import Tensor

from verl.algorithms.policy_loss import ReducingLoss, Reduction, TokenMetrics
from verl.config import ActorConfig, AlgorithmConfig
from verl.config.algorithm import PADDED_AGG_MODES
from verl.config.user_keys import check_types, with_typed_extra, with_value
from verl.data.batch import Batch
from verl.data.columns import REWARD_PART
from verl.utils.errors import ConfigError
from verl.utils.suggest import did_you_mean

PaddedFunction = Callable[..., Any]
PADDED_COLUMNS = {"values": "values", "old_log_probs": "old_logprobs"}  # arguments of estimators and their columns
BATCH_COLUMNS = {  # names in the argument `batch` of an estimator, and the columns
    "responses": "tokens",
    "token_level_rewards": "token_rewards",
    "rollout_log_probs": "rollout_logprobs",
    "old_log_probs": "old_logprobs",
    "ref_log_prob": "ref_logprobs",
    "values": "values",
    "sum_pi_squared": "sum_pi_squared",
    "rollout_is_weights": "rollout_is_weights",
}
LOSS_ARGUMENTS = (
    "old_log_prob",
    "log_prob",
    "advantages",
    "response_mask",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
)


class PaddedView:
    """The response regions of a packed batch as rows (N, W): from the first sampled token, padded on the right."""

    def __init__(self, batch: Batch):
        mask = batch["loss_mask"]
        position = torch.arange(batch.num_tokens, device=mask.device)
        ends = batch.cu_seqlens[1:].to(mask.device).long()
        sequence = batch.sequence_ids().to(mask.device)
        sampled = torch.where(batch.sampled_mask(), position, batch.num_tokens)
        starts = ends.clone().scatter_reduce_(0, sequence, sampled, reduce="amin")  # a row of width 0 if none
        width = max(int((ends - starts).max()), 1)
        index = starts[:, None] + torch.arange(width, device=mask.device)
        self.num_tokens = batch.num_tokens
        self.valid = index < ends[:, None]
        self.index = torch.where(self.valid, index, 0)
        self.response_mask = self.to_padded(mask.long())

    def to_padded(self, column: Tensor) -> Tensor:
        """(T,) -> (N, W), 0 in the padding."""
        return torch.where(self.valid, column[self.index], torch.zeros((), dtype=column.dtype, device=column.device))

    def to_packed(self, rows: Tensor) -> Tensor:
        """(N, W) -> (T,), 0 before the response."""
        return rows.new_zeros(self.num_tokens).index_put((self.index[self.valid],), rows[self.valid])


class NamedArrays(dict[str, Any]):
    """The `batch` or `non_tensor_batch` of an estimator; a KeyError says what there is."""

    def __missing__(self, name: str) -> Any:
        advice = "parts of the reward are those in algorithm.gdpo_reward_keys"
        raise KeyError(f"there is no {name!r} for an advantage estimator, but {', '.join(sorted(self))}; {advice}")


class ActorView(ActorConfig):
    """The actor's section plus `extra`, that of its policy loss, and `global_batch_info`, for `agg_loss`."""

    global_batch_info: ClassVar[dict[str, Any]]  # set per instance; no keys of the configuration

    def __init__(self, section: ActorConfig):
        # the loss weights contain the mini-batch's counts; agg_loss does not need them
        counts = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
        info = {**counts, "loss_scale_factor": section.loss_scale_factor}
        own = {"extra": section.policy_loss.extra, "_of_actor": section.extra}
        self.__dict__.update(section.__dict__, global_batch_info=info, **own)

    def __contains__(self, name: object) -> bool:
        return name in ("global_batch_info", *self.__dict__["_of_actor"]) or super().__contains__(name)

    def __getattr__(self, name: str) -> Any:
        of_actor = self.__dict__.get("_of_actor", {})
        return of_actor[name] if name in of_actor else super().__getattr__(name)  # type: ignore[misc]


class AdvantageAdapter:
    """Runs a padded estimator on a packed batch. `extra` is the dataclass of its own keys, if it has one."""

    def __init__(self, name: str, function: PaddedFunction, extra: type | None = None):
        self.name, self.function, self.extra = name, function, extra
        check_types(extra, f"advantage estimator {name!r}")

    def typed(self, config: AlgorithmConfig) -> AlgorithmConfig:
        """`config` with the types and defaults of the estimator's own keys; ConfigError where they do not fit."""
        return with_typed_extra(config, self.extra, "algorithm", f"advantage estimator {self.name!r}")

    def check(self, config: AlgorithmConfig) -> None:
        """ConfigError, before the first step, for keys of its own that do not fit."""
        self.typed(config)

    @property
    def required(self) -> list[str]:
        """The arguments without a default."""
        return [n for n, p in inspect.signature(self.function).parameters.items() if p.default is p.empty]

    def columns(self, config: AlgorithmConfig) -> tuple[str, ...]:
        """The columns that its arguments without a default name; parts of rewards for `non_tensor_batch`."""
        names = {**PADDED_COLUMNS, "reward_baselines": "reward_baselines", "rollout_is_weights": "rollout_is_weights"}
        columns = tuple(column for argument, column in names.items() if argument in self.required)
        takes_parts = "non_tensor_batch" in inspect.signature(self.function).parameters
        return columns + tuple(REWARD_PART + name for name in config.gdpo_reward_keys or () if takes_parts)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of the policy that its arguments without a default name."""
        return ("sum_pi_squared",) if "sum_pi_squared" in self.required else ()

    def __call__(self, batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
        config, padded = self.typed(config), PaddedView(batch)
        mask = padded.response_mask
        with torch.no_grad():
            result = self.function(**self.arguments(batch, padded, config))
        if not isinstance(result, tuple) or [getattr(r, "shape", None) for r in result] != [mask.shape, mask.shape]:
            seen = [tuple(getattr(r, "shape", ())) for r in result] if isinstance(result, tuple) else type(result)
            raise ConfigError(
                f"advantage estimator {self.name!r} returned {seen}; it must return (advantages, returns), "
                f"each of the shape of response_mask, {tuple(mask.shape)}"
            )
        advantages, returns = (padded.to_packed(torch.where(mask.bool(), r, 0.0)) for r in result)
        return advantages, returns

    def arguments(self, batch: Batch, padded: PaddedView, config: AlgorithmConfig) -> dict[str, Any]:
        """The available keyword arguments that the function takes."""
        rewards = batch.require("token_rewards", "with_token_rewards or apply_kl_in_reward")
        standard: dict[str, Any] = {
            "token_level_rewards": padded.to_padded(rewards),
            "response_mask": padded.response_mask,
            "config": config,
        }
        if "group_ids" in batch:
            standard["index"] = batch["group_ids"].cpu().numpy()
        if "reward_baselines" in batch:
            standard["reward_baselines"] = batch["reward_baselines"]
        named: dict[str, Any] = {"gamma": config.gamma, "lam": config.lam}
        optional_columns = {name: name for name in ("sum_pi_squared", "rollout_is_weights")}
        for padded_name, column in {**PADDED_COLUMNS, **optional_columns}.items():
            if column in batch:
                named[padded_name] = padded.to_padded(batch[column])
        parts = {n.removeprefix(REWARD_PART): n for n in batch.sequence_columns if n.startswith(REWARD_PART)}
        arrays = {"uid": "group_ids"} | parts
        named["non_tensor_batch"] = NamedArrays({k: batch[n].cpu().numpy() for k, n in arrays.items() if n in batch})
        rows = {k: padded.to_padded(batch[n]) for k, n in BATCH_COLUMNS.items() if n in batch}
        named["batch"] = NamedArrays(rows, response_mask=padded.response_mask)
        parameters = inspect.signature(self.function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        chosen = {k: v for k, v in (standard | named).items() if k in parameters or (takes_all and k in standard)}
        optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        required = {n for n, p in parameters.items() if p.default is p.empty and p.kind not in optional}
        if required - chosen.keys():
            raise ConfigError(
                f"advantage estimator {self.name!r} needs {sorted(required - chosen.keys())}, which this run does not "
                f"have; available: {sorted(standard | named)}"
            )
        return chosen


class AggLossCapture:
    """Records the calls of `agg_loss` during one call of an outside loss.

    `agg_loss` returns leaf scalars, which cut the graph: the loss must depend on nothing else. Its gradient by them
    gives the coefficient of each call.
    """

    def __init__(self, weights: Tensor, mode: str, trial_means: list[float] | None = None):
        self.weights, self.mode, self.trial_means = weights, mode, trial_means  # replaces the true means in a trial
        self.matrices: list[Tensor] = []
        self.leaves: list[Tensor] = []

    def record(self, loss_mat: Tensor, loss_mask: Tensor, mode: str) -> Tensor:
        """Keep the losses (N, W); a leaf scalar with the value of their weighted mean, or of a trial."""
        if mode != self.mode:
            raise ConfigError(
                f"it asks agg_loss for {mode!r} while actor.loss_agg_mode={self.mode}; set the key to {mode}"
            )
        if loss_mat.shape != self.weights.shape:
            raise ConfigError(
                f"it gave agg_loss a matrix of shape {tuple(loss_mat.shape)}; one loss per token is needed, "
                f"{tuple(self.weights.shape)}"
            )
        matrix = torch.where(loss_mask != 0, loss_mat * loss_mask, 0.0)
        mean = (matrix.detach() * self.weights).sum() / self.weights.sum().clamp(min=1e-12)
        if self.trial_means is not None:
            mean = mean.new_tensor(self.trial_means[len(self.leaves) % len(self.trial_means)])
        self.matrices.append(matrix)
        self.leaves.append(mean.requires_grad_())
        return self.leaves[-1]

    def call_coefficients(self, loss: Tensor, log_prob: Tensor) -> list[float]:
        """The coefficient of each captured matrix in `loss`; ConfigError if `loss` depends on anything else."""
        inputs = self.leaves + ([log_prob] if log_prob.requires_grad else [])
        if not self.leaves or not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            raise ConfigError("the loss it returns does not come from agg_loss")
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        if log_prob.requires_grad and gradients[-1] is not None:
            raise ConfigError("the loss it returns depends on log_prob in another way than through agg_loss")
        return [0.0 if g is None else float(g) for g in gradients[: len(self.leaves)]]

    def combined_losses(self, coefficients: list[float]) -> Tensor:
        """(N, W) per-token losses: the sum of the captured matrices times `coefficients`."""
        pairs = zip(coefficients, self.matrices, strict=True)
        return sum((c * m for c, m in pairs if c), torch.zeros_like(self.weights))


_REDUCTION: ContextVar[Reduction | None] = ContextVar("reduction", default=None)  # what agg_loss does in a loss


class PolicyLossAdapter(ReducingLoss):
    """Runs a padded loss on a packed micro-batch and returns its per-token losses; `extra` as above."""

    def __init__(self, name: str, function: PaddedFunction, extra: type | None = None):
        self.name, self.function, self.extra = name, function, extra
        check_types(extra, f"policy loss {name!r}")

    def typed(self, config: ActorConfig) -> ActorConfig:
        """`config` with the types and defaults of the loss's own keys; ConfigError where they do not fit."""
        path = "actor_rollout_ref.actor.policy_loss"
        section = with_typed_extra(config.policy_loss, self.extra, path, f"policy loss {self.name!r}")
        return with_value(config, "policy_loss", section)

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
    ) -> tuple[Tensor, TokenMetrics]:
        padded = PaddedView(batch)
        mask = padded.response_mask
        weights = padded.to_padded(batch["rollout_is_weights"]) if "rollout_is_weights" in batch else None
        capture = AggLossCapture(padded.to_padded(batch.require("loss_weights", "loss_weights")), config.loss_agg_mode)
        log_prob, old_log_prob, adv = (padded.to_padded(column) for column in (logprobs, old_logprobs, advantages))
        with self.explain_errors(), torch.enable_grad():
            loss, metrics = self.call(capture.record, config, log_prob, old_log_prob, adv, mask, weights)
            coefficients = capture.call_coefficients(loss, log_prob)
        losses = padded.to_packed(capture.combined_losses(coefficients))
        numbers = {key.removeprefix("actor/"): losses.new_tensor(float(value)) for key, value in metrics.items()}
        return losses, {key: number.expand_as(losses) for key, number in numbers.items()}

    def call(
        self,
        reduce: Reduction,
        config: ActorConfig,
        log_prob: Tensor,
        old: Tensor,
        advantages: Tensor,
        mask: Tensor,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """One call of the outside function, in which `agg_loss` is `reduce`. All tensors are (N, W)."""
        token = _REDUCTION.set(reduce)
        try:
            result = self.function(
                old_log_prob=old,
                log_prob=log_prob,
                advantages=advantages,
                response_mask=mask,
                loss_agg_mode=config.loss_agg_mode,
                config=ActorView(self.typed(config)),
                rollout_is_weights=rollout_is_weights,
            )
        finally:
            _REDUCTION.reset(token)
        if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[1], Mapping):
            seen = [type(p).__name__ for p in result] if isinstance(result, tuple | list) else type(result).__name__
            raise ConfigError(
                f"it returned {seen}; it must return (loss, metrics), the scalar of agg_loss and a dict of numbers "
                "by name ({} for none)"
            )
        return result[0], dict(result[1])

    def reduced(self, reduce: Reduction, config: ActorConfig, columns: dict[str, Tensor]) -> Tensor:
        return self.call(reduce, config, **columns)[0]

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Adds the name of the loss and what to do to a ConfigError."""
        try:
            yield
        except ConfigError as e:
            raise ConfigError(
                f"policy loss {self.name!r} cannot be used: {e}. Build one loss per token, (bs, T), and reduce it with "
                f"verl.trainer.ppo.core_algos.agg_loss (several results may be added up); otherwise the gradient "
                f"would change with the micro-batch size (docs/extend/own_algorithm.md)"
            ) from e

    def check_signature(self) -> None:
        """ConfigError for a function that does not take the seven arguments that a loss gets, by name."""
        signature = inspect.signature(self.function)
        try:
            signature.bind(**dict.fromkeys(LOSS_ARGUMENTS))
        except TypeError as error:
            raise ConfigError(
                f"policy loss {self.name!r} cannot be called: {error}. It takes {signature}, and is called by name "
                f"with {', '.join(LOSS_ARGUMENTS)}; add what is missing (rollout_is_weights=None, or **kwargs)"
            ) from error

    def check(self, config: ActorConfig) -> None:
        """Refuses, before the first step, a loss whose gradient depends on the split; tries it on random numbers."""
        self.check_signature()
        self.typed(config)
        with self.explain_errors():
            whole, with_other_means = (
                self.trial_gradient(config, slice(0, 4), trial_means)
                for trial_means in ([1.7, -0.6, 2.9], [-3.1, 0.4, 0.8])
            )
            if not torch.allclose(whole, with_other_means, rtol=1e-4, atol=1e-6):
                raise ConfigError("the loss it returns is not linear in what agg_loss returned")
            halves = [self.trial_gradient(config, rows, [1.7, -0.6, 2.9]) for rows in (slice(0, 2), slice(2, 4))]
            if not torch.allclose(whole, torch.cat(halves), rtol=1e-4, atol=1e-6):
                raise ConfigError("the loss of a sequence changes with its micro-batch, or is random")

    def ignores_weights(self, config: ActorConfig) -> bool:
        plain, weighted = (self.trial_gradient(config, slice(0, 4), [1.0], weight) for weight in (None, 0.5))
        return torch.equal(plain, weighted)

    def trial_gradient(
        self, config: ActorConfig, part: slice, trial_means: list[float], weight: float | None = None
    ) -> Tensor:
        """(rows of `part`, 6) gradient of the per-token losses at fixed inputs, `agg_loss` returning `trial_means`.

        With a `weight` it is the importance weight of every token.
        """
        log_prob, old, advantages = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
        mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
        width = int(mask[part].any(0).nonzero().max()) + 1
        log_prob, old, advantages, mask = (x[part, :width].clone() for x in (log_prob, old, advantages, mask))
        capture = AggLossCapture(mask.float(), config.loss_agg_mode, trial_means)
        log_prob.requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            weights = None if weight is None else torch.full_like(old, weight)
            loss, _ = self.call(capture.record, config, log_prob, old, advantages * mask, mask, weights)
            coefficients = capture.call_coefficients(loss, log_prob)
            value = sum(c * leaf.item() for c, leaf in zip(coefficients, capture.leaves, strict=True))
            if abs(value - loss.item()) > 1e-4 * (1 + abs(value)):
                raise ConfigError("the loss it returns is not a sum of multiples of what agg_loss returned")
            total = capture.combined_losses(coefficients).sum() + 0.0 * log_prob.sum()
            (gradient,) = torch.autograd.grad(total, log_prob)
        return torch.nn.functional.pad(gradient * mask, (0, 6 - width))


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    """(bs, T) per-token losses to a scalar.

    Inside a registered loss the trainer's weights apply instead of the last four arguments (see the top of this file).
    """
    reduce = _REDUCTION.get()
    if reduce is not None:
        return reduce(loss_mat, loss_mask, loss_agg_mode)
    matrix = torch.where(loss_mask != 0, loss_mat * loss_mask, 0.0)
    tokens = loss_mask.sum(-1)
    sequences = global_batch_size or (tokens > 0).sum().clamp(min=1)
    if loss_agg_mode == "token-mean":
        return matrix.sum() / (batch_num_tokens or tokens.sum().clamp(min=1)) * dp_size
    if loss_agg_mode == "token-sum":
        return matrix.sum() * dp_size
    if loss_agg_mode == "seq-mean-token-sum":
        return matrix.sum() / sequences * dp_size
    if loss_agg_mode == "seq-mean-token-mean":
        return (matrix.sum(-1) / tokens.clamp(min=1)).sum() / sequences * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return matrix.sum() / (loss_scale_factor or loss_mat.shape[-1]) / sequences * dp_size
    raise ConfigError(
        f"loss_agg_mode={loss_agg_mode!r} has no padded form; {did_you_mean(loss_agg_mode, PADDED_AGG_MODES)}"
    )
