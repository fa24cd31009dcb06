"""Collects values by key and builds the typed configuration: aliases, refused keys, derived defaults, origins."""

from typing import Any

from verl.config import derived_defaults, foreign_keys, schema
from verl.config.base import PATH, Section
from verl.config.extra import EXTRA, Extra
from verl.config.interpolation import Resolver, has_interpolation, interpolate, names_in, reference
from verl.config.overrides import parse_value
from verl.config.run_config import RunConfig
from verl.config.user_keys import values_by_path
from verl.config.value_rules import expand_home_folders
from verl.utils.errors import MISTAKES, ConfigError, Mistakes

_HYDRA_GROUPS = {"engine": "fsdp", "optim": "fsdp", "model": "hf_model", "profiler": "profiler"}


class ConfigBuilder:
    """Collects values by dotted path; later ones replace earlier ones."""

    def __init__(self, root: type):
        self.root = root
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []
        self._spellings: dict[str, dict[str, Any]] = {}
        self._refusals: dict[str, list[str]] = {}
        self._refused: dict[str, tuple[str, foreign_keys.KeyRule, Any]] = {}
        self._per_device: dict[str, tuple[str, Any, str]] = {}

    def put(self, path: str, value: Any, origin: str, text: str | None = None, spelling: str = "") -> None:
        """Set one key, or every key of a section given as a dictionary."""
        if self._accept_hydra_group(path, value):
            return
        rule, is_section = foreign_keys.classify(path, self.root), foreign_keys.is_section(path, self.root)
        owner = schema.owning_key(path, self.root)
        if isinstance(value, dict) and owner is None and (is_section or (value and rule.kind != "unknown")):
            for name, inner in value.items():
                self.put(f"{path}.{name}", inner, origin, spelling=f"{spelling}.{name}" if spelling else "")
        elif value is None and is_section:
            self.remove(path, origin)
        elif rule.kind == "unknown" and not is_section:
            raise ConfigError(foreign_keys.unknown_key_message(path, self.root))
        elif rule.kind == "alias":
            self._put_alias(path, rule, value, origin, text)
        elif rule.kind == "inert":
            self.warnings.append(f"{path} has no effect: {rule.reason} ({origin})")
        elif rule.kind == "refused":
            self._refused[path] = (spelling or path, rule, value)
        elif owner is None:
            known = [p for p, key in schema.keys(self.root).items() if key.doc]
            inside = [p[len(path) + 1 :] for p in known if p.startswith(path + ".")]
            raise ConfigError(f"{path} is a section, not a value; its keys: {', '.join(inside)}")
        else:
            self._set(owner, path, value, origin, text, spelling or path)

    def remove(self, path: str, origin: str) -> None:
        """Remove the values at and below `path`, an old section included; a key of the schema becomes null where
        allowed, else its default.
        """
        rule = foreign_keys.classify(path, self.root)
        if rule.kind == "unknown" and not foreign_keys.is_section(path, self.root):
            raise ConfigError(foreign_keys.unknown_key_message(path, self.root))
        for known in [p for p in self._refused if _is_within(p, path)]:
            del self._refused[known]
        for known in [p for p, (old, *_) in self._per_device.items() if _is_within(p, path) or _is_within(old, path)]:
            del self._per_device[known]
        path = rule.target or path
        for known in [p for p in self.values if _is_within(p, path) or _is_within(self._old_spelling(p), path)]:
            del self.values[known], self.origins[known]
            self._spellings.pop(known, None)
        owner = schema.owning_key(path, self.root)
        if owner is not None and owner.path == path and owner.default is not None:
            for tp in schema.union_members(owner.type):
                if tp is type(None):
                    self.values[path], self.origins[path] = None, origin
        if owner is not None and owner.path != path:
            inner, names = self.values.get(owner.path, {}), path[len(owner.path) + 1 :].split(".")
            for name in names[:-1]:
                inner = inner.get(name, {})
            inner.pop(names[-1], None)

    def _old_spelling(self, path: str) -> str:
        return self.origins[path].partition(" through ")[2].partition(" / ")[0]

    def holds(self, path: str) -> bool:
        """Whether `path`, in an open dictionary, is set."""
        owner = schema.owning_key(path, self.root)
        value: Any = self.values.get(owner.path) if owner else None
        for name in path[len(owner.path) + 1 :].split(".") if owner else ():
            value = value.get(name) if isinstance(value, dict) else None
        return value is not None

    def _accept_hydra_group(self, path: str, value: Any) -> bool:
        """Whether `path=value` chooses a section's file, as in scripts written for Hydra; a planned choice is noted."""
        only = _HYDRA_GROUPS.get(path)
        if only is None or path not in schema.sections(self.root) or not isinstance(value, str):
            return False
        names = self.planned_values("engine.strategy") if path in ("engine", "optim") else {}
        if value in names:
            self._refusals.setdefault(names[value], []).append(f"{path}={value}")
        elif value != only:
            raise ConfigError(f"{path}={value} is not one of {', '.join((only, *names))}")
        return True

    def planned_values(self, path: str) -> dict[Any, str]:
        """Values of a key of the schema whose feature is still to come."""
        return foreign_keys.load_foreign_keys(self.root).planned.get(path, {})

    def _put_alias(self, path: str, rule: foreign_keys.KeyRule, value: Any, origin: str, text: str | None) -> None:
        if value is None or (reference(value, path) or ("",))[0] == rule.target:
            return
        note = " (a share per device)" if rule.per_device else ""
        self.warnings.append(f"{path} is an old spelling of {rule.target}{note}; write {rule.target}=... ({origin})")
        if rule.per_device:
            self._per_device[rule.target] = (path, value, origin)
        else:
            self.put(rule.target, value, f"{origin} through {path}", text, spelling=path)

    def _raise_refusals(self) -> None:
        """ConfigError for refused keys that ask for something."""
        defaults, flat = foreign_keys.load_foreign_keys(self.root).defaults, self._flat_values()
        mistakes = Mistakes()
        for path, (spelling, rule, value) in self._refused.items():
            asked = self._foreign_value(path, value, flat)
            if foreign_keys.asks_for_nothing(
                asked, [self._foreign_value(path, d, flat) for d in defaults.get(path, [])]
            ):
                continue
            if not rule.planned:
                mistakes.add(ConfigError(f"{spelling}={value} is refused: {rule.reason}"))
                continue
            self._refusals.setdefault(rule.reason, []).append(f"{spelling}={value}")
        for feature, settings in self._refusals.items():
            more = f" (and {len(settings) - 1} more)" if len(settings) > 1 else ""
            mistakes.add(ConfigError(foreign_keys.not_yet_supported_message(settings[0] + more, feature)))
        mistakes.raise_if_any(MISTAKES)

    def _foreign_value(self, path: str, value: Any, flat: dict[str, Any], steps: int = 0) -> Any:
        """The value of a key outside the schema, followed through references to other keys."""
        found = reference(value, path) if steps < 20 else None
        if found is None:
            return value
        target, otherwise = found
        kind = foreign_keys.classify(target, self.root).kind
        if target in flat:
            return self._foreign_value(target, flat[target], flat, steps + 1)
        if target in self._refused:
            return self._foreign_value(target, self._refused[target][2], flat, steps + 1)
        if kind == "refused":  # not set, so at its default; a section is judged key by key
            default = foreign_keys.load_foreign_keys(self.root).defaults.get(target, [None])[0]
            return self._foreign_value(target, default, flat, steps + 1)
        return value if otherwise is None else self._foreign_value(path, parse_value(otherwise), flat, steps + 1)

    def _set(self, key: schema.Key, path: str, value: Any, origin: str, text: str | None, spelling: str) -> None:
        renamed_values = foreign_keys.load_foreign_keys(self.root).values.get(key.path, {})
        if isinstance(value, str | None) and value in renamed_values:
            value = renamed_values[value]
        if path != key.path:
            tree = self.values[key.path] = _copy(self.values.get(key.path) or key.default or {})
            names = path[len(key.path) + 1 :].split(".")
            for name in names[:-1]:
                tree = tree.setdefault(name, {})
                if not isinstance(tree, dict):
                    raise ConfigError(f"{path}: {name!r} is already set to {tree!r}, which is not a dictionary")
            tree[names[-1]] = value
        elif isinstance(value, dict) and key.is_open:
            self.values[path] = _merge(self.values.get(path) or _copy(key.default) or {}, value)
        else:
            value = value if has_interpolation(value) else schema.convert(value, key, text)
            self._record_spelling(path, spelling, value)
            self.values[path] = value
        self.origins[key.path] = origin

    def _record_spelling(self, path: str, spelling: str, value: Any) -> None:
        if has_interpolation(value):
            return
        seen = self._spellings.setdefault(path, {})
        seen[spelling] = value
        for other, other_value in seen.items():
            if other_value != value:
                raise ConfigError(
                    f"{other}={other_value} and {spelling}={value} say the same thing differently; keep only {path}"
                )

    def _divide_per_device(self, flat: dict[str, Any]) -> None:
        for target, (path, value, origin) in self._per_device.items():
            role = target.rsplit(".", 1)[0].replace("rollout", "actor").replace("actor_actor_ref", "actor_rollout_ref")
            devices = flat["trainer.nnodes"] * (_devices_per_node(target, flat) or 1)
            trained: Any = _build(schema.sections(self.root)[role], f"{role}.", flat)
            groups = max(devices // trained.engine.ranks_per_data_group, 1)
            value = self._foreign_value(path, value, flat)
            if value is None:
                continue
            if not isinstance(value, int) or value <= 0:
                raise ConfigError(
                    f"{path}={value} must be a whole number of sequences, at least 1; it is an old spelling, "
                    f"for all devices together, of {target}"
                )
            if value % groups:
                raise ConfigError(f"{path}={value} cannot be shared by {groups} ranks; set {target} instead")
            key = schema.keys(self.root)[target]
            self._set(key, target, value // groups, f"{origin} through {path} / {groups} ranks", None, path)

    def build(self, resolve: Resolver) -> Any:
        """The typed configuration; ConfigError for refused keys and values of the wrong type."""
        self._raise_refusals()
        if self._per_device:
            self._divide_per_device(self._flat_values())
        self._pack_shared_prompts()
        explicit = tuple(self.values)
        for path, (value, why) in derived_defaults.derive(self.values, self.root).items():
            self.values[path], self.origins[path] = value, why
        flat = self._flat_values()
        own, referenced = values_by_path(flat), {name for value in flat.values() for name in names_in(value)}
        for path, value in flat.items():
            if has_interpolation(value):
                resolved = interpolate(value, own | flat, path, resolve)
                flat[path] = schema.convert(resolved, schema.keys(self.root)[path])
            flat[path] = expand_home_folders(path, flat[path])
        config = _build(self.root, "", flat)
        object.__setattr__(config, "_origins", {p: self.origins.get(p, "default") for p in flat})
        object.__setattr__(config, "_set", explicit)
        object.__setattr__(config, "_referenced", set(own) & referenced)
        if isinstance(config, RunConfig):  # published losses read it
            arr = config.actor_rollout_ref
            for trained in (arr.actor, config.critic):
                object.__setattr__(trained, "rollout_n", arr.rollout.n)
        undivided = {
            old: target for target, (old, _, _) in self._per_device.items() if not _devices_per_node(target, flat)
        }
        object.__setattr__(config, "_undivided_totals", undivided)
        return config

    def _pack_shared_prompts(self) -> None:
        """Shared prompts need packed sequences: a script that asks for both runs packed, with a warning."""
        shared, packed = "actor_rollout_ref.actor.use_prefix_grouper", "actor_rollout_ref.model.use_remove_padding"
        if self.values.get(shared) is True and self.values.get(packed) is False:
            self.warnings.append(f"{packed}=False has no effect: {shared}=True shares prompts in packed sequences")
            self.values[packed], self.origins[packed] = True, f"{shared}=True runs packed"

    def _flat_values(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for path in schema.keys(self.root):
            self._fill_default(path, flat)
        return {path: flat[path] for path in schema.keys(self.root)}

    def _fill_default(self, path: str, flat: dict[str, Any]) -> Any:
        if path not in flat:
            key = schema.keys(self.root)[path]
            if path in self.values and not (self.values[path] is None and key.follows):
                flat[path] = self.values[path]
            elif key.follows:
                flat[path] = _copy(self._fill_default(key.follows, flat))
                self.origins[path] = f"follows {key.follows}"
            else:
                flat[path] = _copy(key.default)
        return flat[path]


def _is_within(path: str, section: str) -> bool:
    return path == section or path.startswith(section + ".")


def _devices_per_node(target: str, flat: dict[str, Any]) -> int | None:
    """The devices that share a total, as far as it is configured: the role's own, or the trainer's."""
    role = target.removesuffix(target.rsplit(".", 1)[1])
    devices: int | None = flat.get(f"{role}n_gpus_per_node") or flat["trainer.n_gpus_per_node"]
    return devices


def _build(cls: type, prefix: str, flat: dict[str, Any]) -> Section:
    arguments = {}
    for name, item in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        inner = item.metadata.get("section")
        path = prefix + name
        arguments[name] = _build(inner, path + ".", flat) if inner else flat[path]
    result: Section = cls(**arguments)
    object.__setattr__(result, PATH, prefix[:-1] or "<root>")
    if isinstance(own := result.__dict__.get(EXTRA), Extra):
        own.place(prefix + EXTRA)
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy(inner) for name, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    result = dict(old)
    for name, value in new.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = _merge(result[name], value) if both else value
    return result
