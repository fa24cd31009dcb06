"""Which modules of a model are sharded as one unit."""

from torch import nn

from verl.config.engine import WrapPolicyConfig
from verl.utils.errors import ConfigError


def sharding_units(model: nn.Module, policy: WrapPolicyConfig) -> list[nn.Module]:
    """The modules that are FSDP units, outer ones first; parameters outside of them belong to the root.

    Modules of at least `min_num_params` parameters if that is set, else of the layer classes named by the policy, else
    of those named by the model's family.
    """
    if policy.min_num_params > 0:
        chosen = _units_of_size(model, policy.min_num_params)
        return [module for module in model.modules() if id(module) in chosen]
    wanted = tuple(policy.transformer_layer_cls_to_wrap or getattr(model, "_no_split_modules", None) or ())
    units = [module for module in model.modules() if type(module).__name__ in wanted]
    if not units:
        classes = sorted({type(module).__name__ for module in model.modules() if list(module.children())})
        raise ConfigError(
            f"{type(model).__name__} has no modules of class {', '.join(wanted) or '(none is named)'}; name "
            f"some of these in wrap_policy.transformer_layer_cls_to_wrap: {', '.join(classes)}"
        )
    return units


def _units_of_size(model: nn.Module, min_params: int) -> set[int]:
    """ids of the smallest modules with at least `min_params` parameters outside of the units inside them.

    Embedding and heads stay with the root: the engine uses their weights without calling them.
    """
    excluded = [model, model.get_input_embeddings(), model.get_output_embeddings(), getattr(model, "score", None)]
    chosen: set[int] = set()

    def visit(module: nn.Module) -> tuple[int, bool]:
        num_free, blocked = sum(p.numel() for p in module.parameters(recurse=False)), any(module is m for m in excluded)
        for child in module.children():
            child_free, child_blocked = visit(child)
            num_free, blocked = num_free + child_free, blocked or child_blocked
        if blocked or num_free < min_params or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return num_free, blocked
        chosen.add(id(module))
        return 0, False

    visit(model)
    return chosen
