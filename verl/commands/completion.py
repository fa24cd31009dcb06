"""`verl completion bash|zsh`: a script by which the shell completes verbs, options, keys, values and presets.

eval "$(verl completion bash)"     in ~/.bashrc
eval "$(verl completion zsh)"      in ~/.zshrc, after compinit
"""

import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from verl.commands.verbs import VERBS
from verl.config import schema
from verl.config.explain import PRESET_OF_VERB, ROOTS
from verl.config.load import PRESETS
from verl.config.run_config import RunConfig
from verl.utils.errors import ConfigError
from verl.utils.suggest import did_you_mean

BASH = """_verl() {
  local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\\n'
  local word="${line##*[[:space:]]}"
  COMPREPLY=($(verl completion words "$line" 2>/dev/null))
  [[ "${COMPREPLY[0]}" == *[.=] ]] && compopt -o nospace 2>/dev/null
  [[ "$word" == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")  # bash begins a word behind "="
}
complete -o default -F _verl verl"""
ZSH = """_verl() {
  local -a candidates
  candidates=(${(f)"$(verl completion words "${(j: :)words[1,CURRENT]}" 2>/dev/null)"})
  if (( $#candidates )); then compadd -S '' -- $candidates; else compset -P '*='; _files; fi
}
compdef _verl verl"""
SCRIPTS = {"bash": BASH, "zsh": ZSH}
WITHOUT_KEYS = ("quickstart", "merge", "report", "show", "check-template", "completion")
ROLLOUT = "actor_rollout_ref."  # `verl serve` takes these keys without it


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script of a shell, or the words that may stand at the end of a line: `words LINE`."""
    shell, *line = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if shell in ("-h", "--help"):
        print(__doc__)
    elif shell == "words":
        print("\n".join(candidates(" ".join(line))))
    elif shell in SCRIPTS:
        print(SCRIPTS[shell])
    else:
        raise ConfigError(f"no completion for {shell!r}; {did_you_mean(shell, SCRIPTS)}")
    return 0


def candidates(line: str) -> list[str]:
    """Completions of the last word of `line` (empty after a space), sorted; none where it may be a file."""
    *words, last = [*line.split(), ""] if not line or line[-1].isspace() else line.split()
    if len(words) < 2:
        return matching(VERBS, last)
    verb, before = words[1], words[-1]
    if verb == "completion":
        return matching(SCRIPTS, last)
    if before == "--config-name":
        return matching((file.stem for file in PRESETS.glob("*.yaml")), last)
    if last.startswith("-"):
        return matching(options_of(verb), last)
    if verb == "config" and len(words) == 2:
        return matching(("explain", "print", "markdown"), last)
    named = matching(PRESET_OF_VERB, last) if verb == "config" and len(words) == 3 else []
    return named + keys_or_values(words[3] if verb == "config" and len(words) > 3 else verb, verb, last)


def matching(names: Iterable[str], start: str) -> list[str]:
    """The names that begin with `start`, sorted."""
    return sorted(name for name in names if name.startswith(start))


def options_of(verb: str) -> list[str]:
    """The options of a verb, from the source of its module: to import it may take seconds."""
    module, _, function = VERBS.get(verb, ("verl.commands.completion:main", ""))[0].partition(":")
    spec = importlib.util.find_spec(module)
    file = Path(spec.origin if spec and spec.origin else __file__)
    files = list(file.parent.glob("*.py")) if file.name == "__init__.py" else [file]
    if function != "main":  # of `mains`, which reads its arguments by `parsers`
        files = [file.with_name("parsers.py")]
    parts = re.split(r"^(?=def )", "\n".join(one.read_text(encoding="utf-8") for one in files), flags=re.M)
    mine = [part for part in parts if part.startswith("def " + function.removesuffix("main"))]
    own = set(re.findall(r'[("\s]"(--[a-z][\w-]+)"', "".join(mine)))
    return sorted(own | {"--help"} | (set() if verb in WITHOUT_KEYS else {"--config-name", "--config-dir"}))


def keys_or_values(named: str, verb: str, last: str) -> list[str]:
    """Keys up to their next dot, with `=` at their end; behind the `=`, the values that the key allows."""
    if verb in WITHOUT_KEYS or verb not in VERBS:
        return []
    root = ROOTS.get(PRESET_OF_VERB.get(named, ""), RunConfig)
    sign = last[: len(last) - len(last.lstrip("+~"))]
    short = ROLLOUT if verb == "serve" else ""
    keys = {path.removeprefix(short): key for path, key in schema.keys(root).items() if path.startswith(short)}
    path, equals, value = last.removeprefix(sign).partition("=")
    if equals:
        key = keys.get(path)
        switch = key is not None and bool in schema.union_members(key.type)
        values = (() if key is None else key.choices) or (("true", "false") if switch else ())
        return [f"{sign}{path}={one}" for one in matching(map(str, values), value)]
    ends = {name: name.find(".", len(path)) + 1 for name in keys if name.startswith(path)}
    return sorted({sign + (name[:end] or name + "=") for name, end in ends.items()})
