"""The profiler of a rank and of the driver, with a tool that writes down what it is told."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from verl.config.profiler import NPUToolConfig, ProfilerConfig, ToolConfig, TorchToolConfig
from verl.observe.profiling import rank_profiler, tools
from verl.observe.profiling.rank_profiler import RankProfiler
from verl.observe.profiling.step_profiler import StepProfiler
from verl.observe.timers import StageTimer
from verl.utils.errors import ConfigError


class Diary(tools.ProfilerTool):
    def __init__(self):
        self.lines = []

    def start(self, target):
        self.lines.append(f"start {target.name}")

    def stop(self, driver):
        self.lines.append(f"stop {[name for name, _, _ in driver]}")
        return [Path("written")]

    @contextmanager
    def stage(self, name):
        self.lines.append(f"> {name}")
        yield
        self.lines.append(f"< {name}")


def profiler(monkeypatch, tmp_path, rank=0, discrete=False, **settings):
    """A rank's profiler, and what its tool is told."""
    diary = Diary()
    monkeypatch.setattr(rank_profiler, "build_tool", lambda *_: diary)
    config = ToolConfig(torch=TorchToolConfig(discrete=discrete))
    chosen = {"tool": "torch", "enable": True, "all_ranks": True, "save_path": str(tmp_path)} | settings
    return RankProfiler(ProfilerConfig(tool_config=config, **chosen), "actor", rank), diary.lines


def run(rank: RankProfiler, steps, *, profiled, together=False):
    """Steps of two nested stages; returns what was noted."""
    notes = []

    def broadcast(method, *args):
        return [getattr(rank, method.removeprefix("profiler."))(*args)]

    driver = StepProfiler(profiled, together, broadcast, notes.append)
    for step in steps:
        timer = StageTimer()
        with driver.recorded(step, timer), timer("step"):
            with timer.slice("collect"):
                timer.add("gen", 0.0)
            with timer("update"):
                pass
    driver.finish()
    return notes


def test_only_chosen_steps_are_recorded_with_stages_of_rank_and_driver(monkeypatch, tmp_path):
    rank, lines = profiler(monkeypatch, tmp_path)
    notes = run(rank, [1, 2, 3], profiled=[2])
    inner = ["> step", "> collect", "< collect", "> update", "< update", "< step"]
    assert lines == ["start actor_rank0", *inner, "stop ['gen', 'collect', 'update', 'step']"]
    assert notes == ["profile of step_2: written"] and (tmp_path / "step_2").is_dir()


def test_consecutive_steps_are_one_profile_if_asked_for(monkeypatch, tmp_path):
    rank, lines = profiler(monkeypatch, tmp_path)
    run(rank, range(1, 9), profiled=[2, 3, 6], together=True)
    assert [line.split()[0] for line in lines if "st" in line.split()[0]] == ["start", "stop", "start", "stop"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_6", "steps_2_3"]


def test_discrete_is_one_profile_for_each_stage_of_the_step(monkeypatch, tmp_path):
    rank, lines = profiler(monkeypatch, tmp_path, discrete=True)
    run(rank, [1], profiled=[1])
    assert [line for line in lines if line[0] == "s"] == [
        "start actor_rank0_collect", "stop ['collect']", "start actor_rank0_update", "stop ['update']",
    ]  # fmt: skip


def test_a_rank_that_is_not_selected_does_nothing(monkeypatch, tmp_path):
    rank, lines = profiler(monkeypatch, tmp_path, rank=1, all_ranks=False, ranks=[0])
    assert run(rank, [1], profiled=[1]) == ["profile of step_1: nothing was written"]
    assert lines == [] and list(tmp_path.iterdir()) == []


def test_the_command_at_the_end_gets_words_and_variables_and_no_shell(monkeypatch, tmp_path):
    code = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(sys.argv[1], 'w'))"
    command = f"""{sys.executable} -c "{code}" {tmp_path}/out "a  b" $(touch\\ {tmp_path}/shell) ; | > x"""
    monkeypatch.setattr(rank_profiler, "RAY_NSIGHT", tmp_path / "none")
    rank, _ = profiler(monkeypatch, tmp_path, finish_hook_cmd=command)
    run(rank, [1, 2, 3], profiled=[1, 2])
    words, variables = json.loads((tmp_path / "out").read_text())
    assert words[1:] == ["a  b", f"$(touch {tmp_path}/shell)", ";", "|", ">", "x"]
    assert not (tmp_path / "shell").exists()
    mine = {name[13:]: value for name, value in variables.items() if name.startswith("VERL_PROFILE_")}
    assert mine.pop("PID").isdigit()
    assert mine == {"SAVE_PATH": str(tmp_path), "TOOL": "torch", "RANK": "0", "ROLE": "actor", "RAY_NSIGHT_DIR": ""}


@pytest.mark.parametrize(
    ("settings", "runs"),
    [({}, [0]), ({"finish_hook_all_ranks": True}, [0, 1, 2]), ({"finish_hook_ranks": [1, 2]}, [1, 2])],
)
def test_the_command_runs_on_the_ranks_asked_for(monkeypatch, tmp_path, settings, runs):
    for rank in range(3):
        made, _ = profiler(monkeypatch, tmp_path, rank=rank, finish_hook_cmd=f"touch {tmp_path}/{rank}", **settings)
        run(made, [1], profiled=[1])
    assert [rank for rank in range(3) if (tmp_path / str(rank)).exists()] == runs


def test_a_command_that_fails_is_said_and_the_run_goes_on(monkeypatch, tmp_path):
    rank, _ = profiler(monkeypatch, tmp_path, finish_hook_cmd="ls /nothing/there")
    assert "ended with exit code 2" in run(rank, [1], profiled=[1])[-1]
    rank, _ = profiler(monkeypatch, tmp_path, finish_hook_cmd="no-such-program x")
    assert "warning: profiler.finish_hook_cmd=no-such-program x on actor rank 0" in run(rank, [1], profiled=[1])[-1]


def test_a_run_that_ends_before_its_last_profiled_step_still_runs_the_command(monkeypatch, tmp_path):
    rank, lines = profiler(monkeypatch, tmp_path, finish_hook_cmd=f"touch {tmp_path}/done")
    run(rank, [1], profiled=[1, 2], together=True)
    assert (tmp_path / "done").exists() and lines[-1].startswith("stop")


def test_memory_snapshots_need_a_device_with_an_allocator():
    with pytest.raises(ConfigError, match=r"this run has none; use tool=torch"):
        tools.build_tool("torch_memory", ToolConfig(), None)


class Allocator:
    """Stands in for torch.cuda.memory, and keeps what it is called with."""

    def __init__(self):
        self.calls = []

    def _record_memory_history(self, **settings):
        self.calls.append(settings)

    def _dump_snapshot(self, path):
        self.calls.append(path)


def test_memory_snapshots_of_a_device(monkeypatch, tmp_path):
    class Device:
        device_name, memory = "cuda", Allocator()
        device_module = property(lambda self: self)

    monkeypatch.setattr(tools, "get_platform", Device)
    tool = tools.build_tool("torch_memory", ToolConfig(), None)
    tool.start(tmp_path / "actor_rank0")
    assert tool.stop([]) == [tmp_path / "actor_rank0.pickle"]
    started, written, ended = Device.memory.calls
    assert started == {"context": "all", "stacks": "all", "max_entries": 100000}
    assert written == str(tmp_path / "actor_rank0.pickle") and ended == {"enabled": None}


class TorchNPU:
    """Stands in for torch_npu: its profiler keeps what it is called with."""

    def __init__(self):
        self.calls = []
        self.profiler = self

    class ProfilerActivity:
        CPU, NPU = "cpu", "npu"

    class ProfilerLevel:
        Level_none, Level0, Level1, Level2 = range(-1, 3)

    def tensorboard_trace_handler(self, folder, analyse_flag):
        return folder, analyse_flag

    def _ExperimentalConfig(self, profiler_level):
        return profiler_level

    def profile(self, **settings):
        self.calls.append(settings)
        return self

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")


def test_an_npu_is_recorded_by_its_own_profiler(monkeypatch, tmp_path):
    library = TorchNPU()
    monkeypatch.setitem(sys.modules, "torch_npu", library)
    monkeypatch.setattr(tools, "has_module", lambda name: name == "torch_npu")
    tool = tools.build_tool("npu", ToolConfig(npu=NPUToolConfig(contents=["npu", "stack"], level="level_none")), None)
    tool.start(tmp_path / "actor_rank0")
    assert tool.stop([]) == [tmp_path / "actor_rank0"]
    settings, *calls = library.calls
    assert calls == ["start", "stop"] and settings["activities"] == ["npu"] and settings["with_stack"]
    assert settings["on_trace_ready"] == (str(tmp_path / "actor_rank0"), True)
    assert settings["experimental_config"] == TorchNPU.ProfilerLevel.Level_none and not settings["record_shapes"]


def test_published_workers_find_their_profiler(monkeypatch, tmp_path, capsys):
    from verl.utils.profiler import DistProfiler, GPUMemoryLogger, marked_timer, simple_timer

    diary = Diary()
    monkeypatch.setattr(rank_profiler, "build_tool", lambda *_: diary)
    settings = ProfilerConfig(tool="torch", enable=True, ranks=[0], save_path=str(tmp_path))
    mine = DistProfiler(0, settings)

    @DistProfiler.annotate("update", color="red")
    @GPUMemoryLogger("actor")
    def update(batch):
        return batch + 1

    seconds = {"gen": 1.0}
    mine.start(role="e2e")
    with marked_timer("gen", seconds, color="blue"), simple_timer("inner", seconds):
        assert update(1) == 2
    assert mine.stop() == ["written"] and DistProfiler(1, settings).stop() == []
    assert diary.lines == ["start worker_rank0", "> gen", "> update", "< update", "< gen", "stop []"]
    assert seconds["gen"] > 1.0 and seconds["inner"] > 0.0
    assert "before actor update, peak memory" in capsys.readouterr().out
