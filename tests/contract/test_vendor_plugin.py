"""A vendor's plug-in as the outside world writes, installs and tests one, against our package."""

import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

import verl
from tests.conftest import ROOT

REFERENCE = ROOT / "plugins" / "verl-hardware-reference"

# Every import and member that published hardware plug-ins use, spelled as they spell it.
PUBLISHED = """
    import contextlib
    import logging
    import os

    import torch
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, TensorMeta
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry
    from verl.trainer.config import CheckpointConfig
    from verl.utils.distributed import stateless_init_process_group
    from verl.utils.net_utils import get_free_port, is_valid_ipv6_address
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    logger = logging.getLogger(__file__)
    logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


    @PlatformRegistry.register(platform="acme")
    class PlatformAcme(PlatformBase):
        @property
        def device_name(self) -> str:
            return "cpu"

        @property
        def vendor_name(self) -> str:
            return "acme"

        @property
        def device_module(self):
            return torch.cpu

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return os.environ.get("ACME_PRESENT") == "1"

        def current_device(self) -> int:
            return 0

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            pass

        def synchronize(self, device_index=None) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def get_device_capability(self, device_index: int = 0):
            return (None, None)

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "ACME_VISIBLE_DEVICES"

        @contextlib.contextmanager
        def nvtx_range(self, msg: str):
            yield

        def profiler_start(self) -> None:
            pass

        def profiler_stop(self) -> None:
            pass

        def ray_resource_name(self) -> str:
            return "ACME"

        def ray_noset_envvars(self) -> list:
            return ["RAY_EXPERIMENTAL_NOSET_ACME_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self):
            return None


    @EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu", vendor="acme")
    class FSDPAcmeEngineWithLMHead(FSDPEngineWithLMHead):
        def __init__(
            self,
            model_config: HFModelConfig,
            engine_config: FSDPEngineConfig,
            optimizer_config: FSDPOptimizerConfig,
            checkpoint_config: CheckpointConfig,
        ):
            super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

        def initialize(self):
            super().initialize()
            self.parameters_seen = sum(1 for _ in self.model.parameters())
            if hasattr(self.model, "set_force_sum_reduction_for_comms"):
                self.model.set_force_sum_reduction_for_comms(True)


    @EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu", vendor="acme")
    class FSDPAcmeEngineWithValueHead(FSDPEngineWithValueHead):
        pass


    @EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu", vendor="acme")
    class AcmeMegatronEngineWithLMHead(MegatronEngineWithLMHead):
        pass


    @CheckpointEngineRegistry.register("accl")
    class ACCLCheckpointEngine(CheckpointEngine):
        def __init__(self, bucket_size: int, **kwargs):
            self.bucket_size = bucket_size
            self.meta: dict[str, TensorMeta] = {}

        def prepare(self):
            port, sock = get_free_port("127.0.0.1")
            return {"ip": "127.0.0.1", "port": port, "v6": is_valid_ipv6_address("::1")}

        @classmethod
        def build_topology(cls, actor_world_size, rollout_world_size, metadata):
            return {"rank": list(range(actor_world_size))}, {"rank": list(range(rollout_world_size))}

        def init_process_group(self, rank, world_size, address, port):
            self.group = stateless_init_process_group(address, port, rank, world_size, "cpu")

        def finalize(self):
            self.group = None

        async def send_weights(self, weights, global_steps=None):
            for name, tensor in weights:
                self.meta[name] = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": 0}

        async def receive_weights(self, global_steps=None):
            for name in self.meta:
                yield name, None
"""

PUBLISHED_TESTS = """
    import sys

    import pytest
    import verl.plugin.platform.platform_manager as pm
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.plugin.platform import PlatformRegistry, get_platform, set_platform
    from verl.workers.engine.base import EngineRegistry
    import acme_plugin


    @pytest.fixture(autouse=True)
    def reset():
        pm._current_platform = None
        yield
        pm._current_platform = None


    def test_registered():
        assert PlatformRegistry.get("acme") is acme_plugin.PlatformAcme
        assert "acme" in PlatformRegistry.registered_names()
        engines = EngineRegistry._engines
        assert engines["language_model"]["fsdp"][("cpu", "acme")] is acme_plugin.FSDPAcmeEngineWithLMHead
        assert engines["value_model"]["fsdp2"][("cpu", "acme")].__name__ == "FSDPAcmeEngineWithValueHead"
        assert "cuda" in engines["language_model"]["fsdp"]
        assert not {"megatron", "vllm", "ray", "sglang"} & set(sys.modules)


    def test_detect_returns_the_variable_in_lower_case(monkeypatch):
        monkeypatch.setenv("VERL_PLATFORM", "AcMe")
        assert pm._detect_platform_name() == "acme"
        assert isinstance(get_platform(), acme_plugin.PlatformAcme)
        assert isinstance(pm._current_platform, acme_plugin.PlatformAcme)
        monkeypatch.setenv("VERL_PLATFORM", "CUDA")
        assert pm._detect_platform_name() == "cuda"


    def test_detect_by_probing(monkeypatch):
        monkeypatch.delenv("VERL_PLATFORM", raising=False)
        monkeypatch.setenv("ACME_PRESENT", "1")
        assert pm._detect_platform_name() == "acme"
        assert type(pm._create_platform("acme")).__name__ == "PlatformAcme"
        with pytest.raises(ValueError, match="acme"):
            pm._create_platform("nobody")


    def test_engine_lookup(monkeypatch):
        set_platform(acme_plugin.PlatformAcme())
        assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is acme_plugin.FSDPAcmeEngineWithLMHead
        assert EngineRegistry.get_engine_cls("value_model", "fsdp").__name__ == "FSDPAcmeEngineWithValueHead"
        monkeypatch.setenv("VERL_ENGINE_VENDOR", "nobody")
        assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "FSDPEngineWithLMHead"
        monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
        assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "FSDPEngineWithLMHead"


    def test_transport():
        engine = CheckpointEngineRegistry.new("accl", bucket_size=1024)
        assert engine.prepare()["port"] > 0 and engine.prepare()["v6"]
        engine.init_process_group(0, 1, "127.0.0.1", engine.prepare()["port"])
"""


@pytest.fixture
def published(tmp_path):
    (tmp_path / "acme_plugin.py").write_text(textwrap.dedent(PUBLISHED))
    (tmp_path / "test_acme.py").write_text(textwrap.dedent(PUBLISHED_TESTS))
    return tmp_path


def run(*command, **env):
    keep = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    done = subprocess.run(
        [*map(str, command)], env={**keep, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_published_plug_in_loads_unmodified_and_its_own_tests_pass(published):
    env = {"PYTHONPATH": str(published), "VERL_USE_EXTERNAL_MODULES": "acme_plugin"}
    out = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", published / "test_acme.py", **env)
    assert "5 passed" in out


def test_a_derived_engine_trains_and_its_initialize_ran(published):
    code = """
        import acme_plugin, torch, tempfile
        from transformers import Qwen3Config, Qwen3ForCausalLM
        from verl.plugin.platform import get_platform
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
        from verl.workers.engine.base import EngineRegistry
        assert get_platform().vendor_name == "acme"
        with tempfile.TemporaryDirectory() as folder:
            sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8)
            model = Qwen3ForCausalLM(Qwen3Config(num_attention_heads=2, num_key_value_heads=1, **sizes))
            model.save_pretrained(folder)
            engine = EngineRegistry.new("language_model", "fsdp2", HFModelConfig(path=folder), FSDPEngineConfig(),
                                        FSDPOptimizerConfig(), CheckpointConfig())
            engine.initialize()
        print(type(engine).__name__, engine.parameters_seen > 5, sum(1 for _ in engine.export_weights()) > 5)
    """
    env = {"PYTHONPATH": str(published), "VERL_USE_EXTERNAL_MODULES": "acme_plugin", "VERL_PLATFORM": "acme"}
    assert run(sys.executable, "-c", textwrap.dedent(code), **env).split() == [
        "FSDPAcmeEngineWithLMHead",
        "True",
        "True",
    ]


def test_an_override_that_we_would_never_call_is_refused_by_name():
    from verl.utils.errors import PluginError
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    class Eager(FSDPEngineWithLMHead):
        def get_per_tensor_param(self):
            return None

    with pytest.raises(PluginError, match=r"Eager overrides get_per_tensor_param, .*never calls"):
        EngineRegistry.register(model_type="language_model", backend="fsdp", device="toaster")(Eager)
    assert "toaster" not in EngineRegistry._engines["language_model"]["fsdp"]


def test_two_engines_for_one_place_are_an_error_that_names_both():
    from verl.utils.errors import PluginError
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    taken = type("Mine", (FSDPEngineWithLMHead,), {})
    with pytest.raises(PluginError, match=r"Mine .*is taken by .*FSDPEngineWithLMHead"):
        EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cuda")(taken)


def test_the_megatron_engine_can_be_named_but_says_that_it_is_to_come():
    from verl.utils.errors import ConfigError
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    with pytest.raises(ConfigError, match="still to come"):
        MegatronEngineWithLMHead(None, None, None, None)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A fresh environment that sees this one's packages, with the reference plug-in really installed; its python."""
    home = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    ours = sysconfig.get_paths()["purelib"]
    (site / "beside.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    source = home / "source"
    run("cp", "-r", REFERENCE, source)
    # Dependencies are checked (verl is there already) but none may be fetched.
    options = ["--quiet", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, source)
    return python


def test_the_reference_plug_in_installs_beside_our_package_and_is_discovered(installed):
    code = """
        import importlib.metadata, verl, verl_hardware_reference
        from verl.plugin import load_plugins
        from verl.plugin.platform import PlatformRegistry, get_platform
        print(verl.__file__)
        print(verl_hardware_reference.__file__)
        print(*[plugin.name for plugin in load_plugins()])
        print(*PlatformRegistry.registered_names())
        print(get_platform().vendor_name)
    """
    ours, plugin, names, platforms, vendor = run(installed, "-c", textwrap.dedent(code), PATH="").strip().split("\n")
    assert ours == verl.__file__
    assert Path(plugin).is_relative_to(installed.parent.parent)
    assert "hardware_reference" in names.split()
    assert platforms.split()[:3] == ["nvidia", "amd", "huawei"]
    assert sorted(platforms.split()[3:]) == ["cambricon", "intel", "metax"]
    assert vendor != "metax"


def test_the_reference_plug_ins_own_tests_pass_where_it_is_installed(installed):
    run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", REFERENCE / "tests")


def test_the_installed_plug_in_can_be_left_out(installed):
    code = "from verl.plugin.platform import PlatformRegistry; print(*PlatformRegistry.registered_names())"
    out = run(installed, "-c", code, VERL_USE_EXTERNAL_PLUGINS="none")
    assert out.split() == ["nvidia", "amd", "huawei"]


def test_doctor_shows_the_plug_in_and_the_chip_it_was_told_to_use(installed):
    code = "import sys; from verl.commands.doctor import main; sys.exit(main(['--json']))"
    out = run(installed, "-c", code, VERL_PLATFORM="metax")
    assert (
        "plug-in hardware_reference" in out and "metax: device cuda, backend nccl; chosen by VERL_PLATFORM=metax" in out
    )
