"""Draw docs/pictures/: the rooms of `verl/` on their layers, and the columns of a batch through one step.

Run as `python -m scripts.draw_architecture` (`make docs` does). Both pictures follow from the code: rooms from
scripts/layers.py, lines and imports from the files, columns from `COLUMNS`. Texts of class `count` change with every
commit; the test that compares the pictures with the code leaves them out.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from scripts.layers import LAYERS, SHIMS, all_imports, covers, module_name, room_of
from verl.data.columns import COLUMNS, Column

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH = 1000
PURPOSES = {  # in a few words, what lives in each room
    "cli": "the console command",
    "experimental": "import paths that others use",
    "doors": "what other people's code imports",
    "commands": "quickstart, certify, serve, generate, eval, merge, doctor",
    "checks": "can this start? each question asked once",
    "trainer": "the step, the source of its trajectories, resume, metrics, fine-tuning",
    "weight_sync": "new weights to the rollout",
    "placement": "roles on devices, memory",
    "agent": "conversations and tools",
    "rewards": "reward functions, scorers",
    "workers": "Actor, Critic and Reference as the driver sees them",
    "workers.engine": "training: FSDP, optimiser, checkpoints",
    "workers.rollout": "sampling: native, vLLM, SGLang, TGI",
    "checkpoint_engine": "transports that carry weights between processes",
    "models": "loading, packed attention, the head, LoRA, decoding",
    "algorithms": "advantages, losses, KL",
    "runtime": "a class on many ranks",
    "observe": "timers, trackers, ledger, report",
    "data": "Trajectory, Batch and its columns, prompts, chat, micro-batches",
    "config": "the typed schema, loading, checks",
    "plugin": "plug-ins and hardware platforms",
    "utils": "registry, errors, seeds, paths: standard library only",
}
STYLE = """
  svg { --ground: #ffffff; --ink: #1f2328; --faint: #59636e; --line: #c4ccd4; --floor: #f3f5f8; --room: #ffffff;
        --accent: #0969da; --write: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    svg { --ground: #0d1117; --ink: #e6edf3; --faint: #9aa4af; --line: #3d444d; --floor: #151b23; --room: #1f2630;
          --accent: #58a6ff; --write: #f0883e }
  }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink) }
  .title { font-size: 20px; font-weight: 600 } .name { font-size: 15px; font-weight: 600 }
  .code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; font-weight: 600 }
  .faint, .count { fill: var(--faint) } .small { font-size: 12px }
  .end { text-anchor: end } .mid { text-anchor: middle } .bar { fill: var(--accent); opacity: 0.55 }
  .ground { fill: var(--ground) } .floor { fill: var(--floor) } .rule { stroke: var(--line); fill: none }
  .room { fill: var(--room); stroke: var(--line) } .arrow { stroke: var(--faint); fill: none; stroke-width: 1.5 }
  .life { stroke: var(--accent); stroke-width: 2; opacity: 0.45 } .write { fill: var(--write) }
  .read { fill: var(--ground); stroke: var(--accent); stroke-width: 2 }
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, corner: float = 6) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{corner:g}" class="{kind}"/>'


def picture(height: float, label: str, parts: Iterable[str]) -> str:
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">'
    body = [f"<title>{escape(label)}</title>", f"<style>{STYLE}</style>", box(0, 0, WIDTH, height, "ground", 0), *parts]
    return "\n".join([opening, *body, "</svg>"]) + "\n"


# ---- the house


def lines_per_room(root: Path) -> Counter[str]:
    """Lines of the Python files of each room, shims excepted."""
    out: Counter[str] = Counter()
    for path in sorted((root / "verl").rglob("*.py")):
        room = room_of(module_name(path, root))
        if room is not None and not covers(SHIMS, module_name(path, root)):
            out[room] += len(path.read_text().splitlines())
    return out


def imports_between_rooms(root: Path) -> Counter[tuple[str, str]]:
    """Import statements by (importing room, imported room), shims excepted."""
    found = {
        (module, line, here, there)
        for _, (module, line, target) in all_imports(root)
        if target.startswith("verl.") and not covers(SHIMS, module)
        if (here := room_of(module)) and (there := room_of(target)) and here != there
    }
    return Counter((here, there) for _, _, here, there in found)


def wrapped(words: Iterable[str], characters: int) -> list[str]:
    """The words, joined by commas, in lines of at most so many characters."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) + 2 <= characters:
            lines[-1] += f", {word}"
        else:
            if lines:
                lines[-1] += ","
            lines.append(word)
    return lines


def draw_house(root: Path = ROOT) -> str:
    lines, imports = lines_per_room(root), imports_between_rooms(root)
    left, right, gap = 72, WIDTH - 24, 10
    parts = [
        text(24, 38, "The house: packages of verl/ on their layers", "title"),
        text(24, 60, "A room imports only from rooms below it. Rooms on one floor do not import each other.", "faint"),
        text(right, 38, f"{sum(lines.values()):,} lines", "count end"),
    ]
    y = 78.0
    for number, rooms in reversed(list(enumerate(LAYERS))):
        width = (right - left - gap * (len(rooms) + 1)) / len(rooms)
        uses = {room: room_uses(room, imports, width) for room in rooms}
        height = 46 + 15 * max(len(found) for found in uses.values())
        parts += [
            box(left, y, right - left, height + 12, "floor", 0),
            text(left - 14, y + 28, str(number), "faint end"),
        ]
        for place, room in enumerate(rooms):
            x = left + gap + place * (width + gap)
            parts.append(f'<g data-room="{room}" data-layer="{number}">')
            parts += [*draw_room(room, lines[room], uses[room], (x, y + 6, width, height)), "</g>"]
        y += height + 18
    parts.append(f'<path class="arrow" d="M30 84 V{y - 8:g} m-6 -9 l6 9 l6 -9"/>')
    parts += [
        text(left, y + 14, "Numbers after a name: import statements that reach into that room.", "faint"),
        text(right, y + 14, "bars: lines of code; drawn by make docs", "faint end"),
    ]
    return picture(y + 32, "The packages of verl on their layers", parts)


def room_uses(room: str, imports: Counter[tuple[str, str]], width: float) -> list[str]:
    """The rooms that a room imports from, most often first, in lines that fit its width."""
    counts = sorted(((n, there) for (here, there), n in imports.items() if here == room), key=lambda c: (-c[0], c[1]))
    return wrapped([f"{there}\u00a0{n}" for n, there in counts], int((width - 24 - 36) / 6.3)) or ["nothing"]


def draw_room(room: str, lines: int, uses: list[str], place: tuple[float, float, float, float]) -> list[str]:
    x, y, width, height = place
    out = [
        box(x, y, width, height, "room"),
        text(x + 12, y + 20, room, "name"),
        text(x + width - 12, y + 20, f"{lines:,} lines" if lines else "import paths only", "count small end"),
        box(x + width - 12 - lines / 40, y, lines / 40, 4, "bar", 0),  # along the edge, where no text is
        text(x + 12, y + 37, PURPOSES[room], "small"),
        text(x + 12, y + 54, "uses", "count small"),
    ]
    return out + [text(x + 44, y + 54 + 15 * i, line, "count small") for i, line in enumerate(uses)]


# ---- the columns of a batch through one step


@dataclass(frozen=True)
class Stage:
    """A stage of the step, who does it, and the functions of the legend that run in it."""

    name: str
    does: tuple[str, str]
    width: int
    functions: tuple[str, ...]


MODEL_INPUT = ("MicroBatch.of", "head_input", "micro_batches", "write_outputs", "prompt_groups")
STAGES = (
    Stage(
        "collect",
        ("rollout, reward,", "Batch.pack"),
        100,
        ("Batch.pack", "PPOTrainer.pack", "with_reward_columns"),
    ),
    Stage(
        "evaluate",
        ("actor, reference,", "critic: forward"),
        115,
        (
            "PPOTrainer.evaluate",
            "OnePass.fill",
            "OnePass.with_outputs",
            "FromUpdate.find",
            "Recorded.find",
            "Teachers.annotate",
            *MODEL_INPUT,
        ),
    ),
    Stage(
        "compute_advantages",
        ("rewards per token,", "then advantages"),
        150,
        (
            "correct",
            "Batch.sampled_mask",
            "with_token_rewards",
            "apply_kl_in_reward",
            "last_sampled_positions",
            "compute_advantages",
            "resample_by_score",
            "gae",
            "on_sampled_tokens",
            "sequence_scores",
            "group_numbers",
            "conversation_numbers",
            "reward_parts_of_gdpo",
            "remax",
            "_subtract_baselines",
            "AdvantageAdapter.arguments",
        ),
    ),
    Stage(
        "update",
        ("losses per token,", "optimiser steps"),
        125,
        (
            "PPOTrainer.update",
            "ReturnScale.update_and_normalize",
            "Actor.update",
            "Actor.with_chosen_tokens",
            "token_covariances",
            "choose_for_clip_cov",
            "with_chosen_tokens",
            "clip_cov",
            "kl_cov",
            "MiniBatches.split",
            "with_loss_weights",
            "loss_weights",
            "ActorLoss.__call__",
            "DistillationTerm.__call__",
            "TorchEngine._outputs",
            "ValueLoss.__call__",
            "TokenMetricSums.add",
            *MODEL_INPUT,
        ),
    ),
    Stage("publish", ("weights only,", "no column"), 95, ()),
    Stage(
        "record",
        ("metrics,", "ledger on disk"),
        105,
        (
            "PPOTrainer.step_metrics",
            "OnePass.mismatch",
            "data_metrics",
            "trained_mask",
            "variance_proxy_metrics",
            "entropy_metrics",
            "mismatch_metrics",
            "off_policy_metrics",
            "Ledger.append",
            "trajectory_columns",
        ),
    ),
)
OUTSIDE_THE_STEP = {  # fine-tuning and preferences
    "LikelihoodLoss.__call__",
    "DPOLoss.rewards",
    "PairLoss.pair_losses",
    "Pairs.prepare",
    "SFTTrainer.prepared",
    "pair_indices",
    "sequence_groups",
}
FIRST_X, ROW = 288, 30
CENTRES = [FIRST_X + sum(s.width for s in STAGES[:i]) + STAGES[i].width / 2 for i in range(len(STAGES))]


def stages_of(functions: Iterable[str]) -> list[int]:
    """Numbers of the stages in which these functions run; KeyError for a function that no stage has."""
    out: set[int] = set()
    for function in functions:
        found = {i for i, stage in enumerate(STAGES) if function in stage.functions}
        if not found and function not in OUTSIDE_THE_STEP:
            raise KeyError(f"COLUMNS names {function}, which is in no stage; add it to STAGES in {Path(__file__).name}")
        out |= found
    return sorted(out)


def draw_columns() -> str:
    parts = [
        text(24, 38, "The columns of a batch through one step", "title"),
        text(24, 60, "N sequences, T tokens in all. Entry t of a token column is about token t.", "faint"),
        '<circle cx="690" cy="33" r="6" class="write"/>',
        text(702, 38, "the stage adds it"),
        '<circle cx="842" cy="33" r="5" class="read"/>',
        text(854, 38, "the stage reads it"),
    ]
    bottom = 170 + ROW * len(COLUMNS) + 44
    for i, stage in enumerate(STAGES):
        x = CENTRES[i]
        if i % 2 == 0:
            parts.append(box(x - stage.width / 2, 78, stage.width, bottom - 78, "floor", 0))
        parts.append(text(x, 100, stage.name, "code mid"))
        parts += [text(x, 118 + 15 * line, words, "faint small mid") for line, words in enumerate(stage.does)]
    y = 160.0
    for heading, is_token in (("one entry per token", True), ("one entry per sequence", False)):
        parts.append(text(24, y, heading, "faint"))
        parts.append(f'<path class="rule" d="M24 {y + 8:g} H{WIDTH - 24}"/>')
        y += 28
        for name, column in COLUMNS.items():
            if column.shape.startswith("(T") == is_token:
                parts += draw_column(name, column, y)
                y += ROW
        y += 14
    return picture(bottom + 20, "Which stage of a step adds and reads which column", parts)


CODE_WIDTH = 8  # of a letter of a column's name


def draw_column(name: str, column: Column, y: float) -> list[str]:
    """One line: its name and type, a dot in every stage that adds or reads it, a line from the first to the last.

    What only a mini-batch or micro-batch has does not outlive the stage: no line.
    """
    writes, reads = stages_of(column.written_by), stages_of(column.read_by)
    kind = column.dtype + (" x 2" if column.shape == "(N, 2)" else "")
    kind += "" if column.scope in ("step", "preference pairs") else f", {column.scope}"
    out = [f"<g><title>{escape(name)}: {escape(column.meaning)}</title>", text(24, y + 5, name, "code")]
    out.append(text(max(164, 30 + CODE_WIDTH * len(name)), y + 5, kind, "faint small"))
    if not writes:
        out.append(text(CENTRES[0], y + 5, column.scope if column.written_by else "your own code", "faint small mid"))
    elif column.scope == "step":
        x = [CENTRES[stage] for stage in (*writes, *reads)]
        out.append(f'<path class="life" d="M{min(x):g} {y:g} H{max(x):g}"/>')
    out += [f'<circle cx="{CENTRES[i]:g}" cy="{y:g}" r="5" class="read"/>' for i in reads]
    for i in writes:  # beside the dot of a reader: before it, or after it where an earlier stage added the column too
        aside = 0 if i not in reads else -15 if i == writes[0] or column.scope != "step" else 15
        out.append(f'<circle cx="{CENTRES[i] + aside:g}" cy="{y:g}" r="6" class="write"/>')
    return [*out, "</g>"]


def pictures() -> dict[str, str]:
    """File name -> content."""
    return {"house.svg": draw_house(), "batch_columns.svg": draw_columns()}


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    for file, content in pictures().items():
        (PICTURES / file).write_text(content, encoding="utf-8")
        print(f"wrote docs/pictures/{file}")
