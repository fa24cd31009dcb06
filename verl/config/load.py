"""Presets and overrides to one typed configuration. The only file that reads presets (YAML, Hydra, OmegaConf)."""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl.config import schema
from verl.config.base import record_reads, recorded_reads
from verl.config.bounded_yaml import BoundedYAMLLoader
from verl.config.check import check
from verl.config.evaluation import EvalConfig
from verl.config.extra import is_extra
from verl.config.foreign_keys import is_own_section, is_section, key_in_extra, same
from verl.config.no_effect import no_effect_warnings, value_at
from verl.config.overrides import MAX_DEPTH, Override, parse_override
from verl.config.preference import DPOConfig, RewardModelConfig
from verl.config.run_config import RunConfig
from verl.config.settings import ConfigBuilder
from verl.config.sft import SFTConfig
from verl.config.special_files import refuse_special
from verl.config.user_keys import added_key_line, own_section_line, unread_user_keys
from verl.utils.errors import MISTAKES, ConfigError, Mistakes
from verl.utils.paths import expand_home
from verl.utils.suggest import closest, did_you_mean

ROOTS = {"sft": SFTConfig, "dpo": DPOConfig, "reward": RewardModelConfig, "evaluation": EvalConfig}
PRESETS = Path(__file__).parent.parent / "trainer" / "config"
_OPTIONS = {"--config-name": "name", "-cn": "name", "--config-path": "dir", "-cp": "dir"}
_OPTIONS |= {"--config-dir": "dir", "-cd": "dir"}

_HELP = """Arguments: key=value, +key=value, ++key=value, ~key; lists as [a,b], dictionaries as {k:v}.
Options:   --config-name NAME, --config-dir DIR (alias --config-path): a preset of your own.
Keys:      verl config explain KEY; verl config print key=value ...; docs/reference/config.md"""


class ConfigWarning(UserWarning):
    """An old spelling, or a key without effect."""


class _ConfigYAMLLoader(BoundedYAMLLoader):
    """YAML in which 1e-6 is a number, as users of OmegaConf expect."""

    yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}  # noqa: RUF012


_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$")
_ConfigYAMLLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def load_config(
    overrides: Sequence[str] = (),
    config_name: str = "ppo_trainer",
    config_dir: str | None = None,
    root: type | None = None,
) -> Any:
    """The configuration: of the class in ROOTS that the preset's name begins with, else RunConfig.

    `overrides` may contain --config-name, --config-path and --config-dir. Every mistake is a ConfigError; old spellings
    and keys without effect are warnings.
    """
    command_line = parse_command_line(overrides, config_name, config_dir=config_dir)
    file = _find_preset(command_line.config_name, command_line.config_dir)
    if root is None:
        root = next((root for name, root in ROOTS.items() if file.stem.startswith(name)), RunConfig)
    builder = ConfigBuilder(root)
    if command_line.program and file.parent != PRESETS:
        _put_preset(builder, PRESETS / f"{command_line.program}.yaml")
    _put_preset(builder, file)
    mistakes = Mistakes()
    for source in command_line.overrides:
        with mistakes:
            _put_override(builder, parse_override(source))
    record_reads(False)
    with mistakes:
        config = builder.build(_resolve_with_omegaconf)
        check(config, combinations=not mistakes.errors)
    mistakes.raise_if_any(MISTAKES)
    for text in (*builder.warnings, *no_effect_warnings(config)):
        warnings.warn(text, ConfigWarning, stacklevel=2)
    record_reads(True)
    return config


def _put_preset(builder: ConfigBuilder, file: Path) -> None:
    for path, value, origin in _read_preset(file):
        for key, part in _leaves(path, value, builder.root):
            target = key_in_extra(key, builder.root)
            if target is not None and is_own_section(key, part, builder.root):
                line = f"{own_section_line(target)} ({origin.partition(':')[0]})"
                builder.warnings += [line] * (line not in builder.warnings)
            else:
                target = None
            if not (isinstance(part, str) and part == "???"):
                builder.put(target or key, part, origin)


def _put_override(builder: ConfigBuilder, override: Override) -> None:
    origin = f"override {override.source!r}"
    for key, part in _leaves(override.path, override.value, builder.root):
        target = key_in_extra(key, builder.root)
        if target is not None and not builder.holds(target):
            if override.mode in ("+", "++"):
                builder.warnings.append(added_key_line(key, target, builder.root))
            elif ".engine_kwargs." not in key or not is_own_section(key, part, builder.root):
                target = None
        if override.mode == "~":
            builder.remove(target or key, origin)
        else:
            builder.put(target or key, part, origin, override.text if key == override.path else None)


def _leaves(path: str, value: Any, root: type) -> Iterator[tuple[str, Any]]:
    """The keys that `path=value` sets: several where it is a section with its values."""
    if isinstance(value, dict) and value and is_section(path, root):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner, root)
    else:
        yield path, value


def pop_unread_keys(config: Any) -> list[str]:
    """Keys that were set but not read since load_config, the user's own included. Ends the recording of reads."""
    keys = unread_keys(config) + unread_user_keys(config)
    record_reads(False)
    return keys


def unread_keys(config: Any) -> list[str]:
    """The library's keys that ask for something and were not read since load_config.

    A key counts as read when a key that follows it was read. One at its default or "off" asks for nothing.
    """
    root: type = type(config)
    reads, table = recorded_reads(), schema.keys(root)
    set_keys = set(config._set)

    def is_read(path: str) -> bool:
        where, _, name = path.rpartition(".")
        if (where or "<root>", name) in reads or ("?" + table[path].section.__name__, name) in reads:
            return True
        return any(is_read(other) for other, key in table.items() if key.follows == path and other not in set_keys)

    checkpoint_keys = ("save_contents", "load_contents", "async_save", "verify", "save_lora_only")
    parts = ("gdpo_reward_keys", "gdpo_reward_weights")  # become reward.weights
    checked = ("parameter_sync_step", "trigger_parameter_sync_step", "require_batches", "total_rollout_steps")
    excepted = ("model_engine", *parts, *checked, *checkpoint_keys)  # read before the recording, or at the last step
    own = [path for path in config._set if is_extra(path) or path.rpartition(".")[2] in excepted]
    unread = [path for path in config._set if path not in own and not is_read(path)]
    nothing: tuple[Any, ...] = (None, False, -1, [], {}, "")
    return [p for p in unread if not any(same(value_at(config, p), off) for off in (*nothing, table[p].default))]


@dataclass(frozen=True)
class CommandLine:
    """Parsed arguments of a command: overrides, and the name and folder of its preset."""

    overrides: list[str]
    config_name: str
    config_dir: str | None
    program: str = ""
    """The preset of the program itself, where another was named."""


def parse_command_line(
    arguments: Sequence[str], config_name: str, doc: str | None = None, config_dir: str | None = None
) -> CommandLine:
    """Options and overrides, separated. With `doc`, -h and --help print `doc` and general help, and exit."""
    remaining, strings, program = list(arguments), [], ""
    options: dict[str, str | None] = {"name": config_name, "dir": config_dir}
    while remaining:
        head, has_value, value = remaining.pop(0).partition("=")
        if doc is not None and head in ("-h", "--help"):
            print(f"{doc.strip()}\n\n{_HELP}")
            raise SystemExit(0)
        if head in _OPTIONS:
            if not has_value and not remaining:
                raise ConfigError(f"{head} needs a value")
            if _OPTIONS[head] == "name":
                program = str(options["name"])
            options[_OPTIONS[head]] = value if has_value else remaining.pop(0)
        elif head.startswith("-"):
            raise ConfigError(_unknown_option(head, value or (remaining or [""])[0]))
        else:
            strings.append(head + has_value + value)
    return CommandLine(strings, str(options["name"]), options["dir"], program)


def _unknown_option(option: str, value: str) -> str:
    name = option.lstrip("-")
    if "." not in name and closest(option, _OPTIONS):
        return f"unknown option {option!r}; {did_you_mean(option, _OPTIONS)}"
    return f"{option}: settings are written without dashes; write {name}={value or 'VALUE'}"


def _find_preset(name: str, folder: str | None) -> Path:
    file_name = name if name.endswith((".yaml", ".yml")) else name + ".yaml"
    file_name = str(expand_home(file_name, "--config-name"))
    folders = [expand_home(folder, "--config-dir")] if folder else []
    for place in (*folders, PRESETS, Path()):
        if refuse_special(place / file_name, "--config-name").is_file():
            return (place / file_name).resolve()
    known = [file.stem for place in (*folders, PRESETS) for file in place.glob("*.yaml")]
    raise ConfigError(f"no preset {name!r} in {', '.join(map(str, (*folders, PRESETS)))}; {did_you_mean(name, known)}")


def _read_preset(file: Path) -> list[tuple[str, Any, str]]:
    try:
        loader = _ConfigYAMLLoader(file.read_text(encoding="utf-8"))
        loader.name = str(file)
        tree = loader.get_single_node()
        if tree is None:
            return []
        if not isinstance(tree, yaml.MappingNode):
            raise ConfigError(f"{file}: a preset is a mapping of keys to values")
        if any(key.value == "defaults" for key, _ in tree.value):
            return _compose_with_hydra(file)
        entries: list[tuple[str, Any, str]] = []
        _flatten(tree, "", file, loader, entries)
        return entries
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text (byte {error.start} is not UTF-8); a preset is a YAML file") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # an impossible date, or a number of thousands of digits
        raise ConfigError(f"{file} holds a value that cannot be read: {error}") from error


def _flatten(node: yaml.MappingNode, prefix: str, file: Path, loader: Any, entries: list[tuple[str, Any, str]]) -> None:
    seen: set[str] = set()
    for key_node, value_node in node.value:
        path, where = prefix + str(key_node.value), f"{file}:{key_node.start_mark.line + 1}"
        if path.count(".") > MAX_DEPTH:
            raise ConfigError(f"{where}: the key is more than {MAX_DEPTH} levels deep")
        if path in seen:
            raise ConfigError(f"{where}: {path} is set twice")
        seen.add(path)
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            _flatten(value_node, path + ".", file, loader, entries)
        else:
            entries.append((path, loader.construct_object(value_node, deep=True), where))


def _compose_with_hydra(file: Path) -> list[tuple[str, Any, str]]:
    try:
        import hydra
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
    except ImportError as error:
        raise ConfigError(f"{file} uses `defaults:`, which needs Hydra; pip install hydra-core") from error
    try:
        with hydra.initialize_config_dir(str(file.parent), version_base=None):
            composed = hydra.compose(file.stem, overrides=[f"hydra.searchpath=[file://{PRESETS}]"])
    except HydraException as error:
        raise ConfigError(f"{file} cannot be composed: {error}") from error
    content = OmegaConf.to_container(composed, resolve=False)
    return [(str(name), value, str(file)) for name, value in dict(content).items()]  # type: ignore[arg-type]


def _resolve_with_omegaconf(flat: dict[str, Any], path: str) -> Any:
    """The value at `path`, with every ${...} in it resolved by OmegaConf."""
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError as error:
        text = flat[path]
        raise ConfigError(f"{path}={text!r} needs OmegaConf; pip install hydra-core, or write it out") from error
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *heads, leaf = name.split(".")
        inner = tree
        for head in heads:
            inner = inner.setdefault(head, {})
        inner[leaf] = value
    try:
        value = OmegaConf.select(OmegaConf.create(tree), path)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}={flat[path]!r} cannot be resolved: {error}") from error
