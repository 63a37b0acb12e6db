"""vLLM's command line in every layout that real wheels have, and on the installed release."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samebits.contract.routes import ModuleRoutes, Route
from samebits.into_vllm import arguments, wheel
from samebits.into_vllm.config import EngineConfig
from samebits.into_vllm.patches import SYMBOLS
from samebits.into_vllm.plan import RoutePlan
from samebits.into_vllm.settings import engine_arguments

FACTS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "fixtures" / "vllm_wheels.json").read_text())

PARSER = "import argparse\nclass FlexibleArgumentParser(argparse.ArgumentParser):\n    pass\n"
SERVER = """
def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--compilation-config", "-cc")
    return parser
"""
FRONTEND = "from dataclasses import dataclass\n@dataclass\nclass FrontendArgs:\n    port: int = 8000\n"
ENGINE = "from dataclasses import dataclass\n@dataclass\nclass AsyncEngineArgs:\n    max_model_len: int = 1\n"
PLAIN_FRONTEND = "class FrontendArgs:\n    port = 8000\n"

Release = Callable[..., None]


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """Writes the given modules as an importable stand-in of a vLLM release and lets `arguments` look there."""
    package = f"vllm_{tmp_path.name}"

    def install(**modules: str) -> None:
        for name, source in modules.items():
            file = tmp_path / package / Path(*name.split("__"), "__init__.py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        for places in ("PARSER_PLACES", "SERVER_PLACES", "ENGINE_PLACES"):
            ours = tuple(place.replace("vllm", package, 1) for place in getattr(arguments, places))
            monkeypatch.setattr(arguments, places, ours)

    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return install


def test_the_current_layout(release: Release) -> None:
    release(utils__argparse_utils=PARSER, entrypoints__launchers__cli_args=SERVER + FRONTEND, engine__arg_utils=ENGINE)
    assert arguments.parser_class().__module__.endswith("utils.argparse_utils")
    assert arguments.server_fields() == {"port", "max_model_len"}
    assert arguments.server_parser().parse_args(["m", "--max-model-len", "7"]).max_model_len == 7


def test_the_older_location_of_the_parser(release: Release) -> None:
    release(utils=PARSER, entrypoints__openai__cli_args=SERVER + FRONTEND, engine__arg_utils=ENGINE)
    assert arguments.parser_class().__module__.endswith("utils")
    assert arguments.server_fields() == {"port", "max_model_len"}


def test_the_older_server_layout_with_the_newer_parser(release: Release) -> None:
    release(utils__argparse_utils=PARSER, entrypoints__openai__cli_args=SERVER + FRONTEND, engine__arg_utils=ENGINE)
    assert type(arguments.server_parser()).__module__.endswith("utils.argparse_utils")


@pytest.mark.parametrize("frontend", ["", PLAIN_FRONTEND], ids=["no class", "no dataclass"])
def test_without_a_dataclass_the_live_parser_tells_the_fields(release: Release, frontend: str) -> None:
    release(utils=PARSER, entrypoints__openai__cli_args=SERVER + frontend, engine__arg_utils=ENGINE)
    assert arguments.server_fields() == {"model_tag", "max_model_len", "compilation_config"}


def test_the_newer_place_wins(release: Release) -> None:
    release(utils=PARSER, utils__argparse_utils=PARSER, entrypoints__openai__cli_args=SERVER)
    assert arguments.parser_class().__module__.endswith("argparse_utils")


def test_a_layout_that_nobody_knows_is_named(release: Release) -> None:
    release(utils="")
    with pytest.raises(arguments.LayoutUnknown, match=r"no FlexibleArgumentParser in .*argparse_utils or .*utils"):
        arguments.parser_class()


@pytest.mark.parametrize("source", ["import something_that_is_not_there\n", "raise ImportError('half built')\n"])
def test_trouble_inside_a_release_is_no_other_layout(release: Release, source: str) -> None:
    release(utils__argparse_utils=source, utils=PARSER)
    with pytest.raises(ImportError):
        arguments.parser_class()


@pytest.mark.parametrize("dest", [None, 7, ("a", "b"), argparse.SUPPRESS, "help"], ids=str)
def test_a_dest_that_is_no_name_is_no_field(dest: Any) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--port")
    parser.add_argument("--odd").dest = dest
    assert arguments.fields_of(parser) == {"port"}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--compilation-config", "-cc", type=json.loads)
    made.add_argument("--max-model-len", type=int)
    made.add_argument("--gpu-memory-utilization", type=float)
    made.add_argument("--middleware", nargs="+")
    made.add_argument("--headless", action="store_true")
    made.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    made.add_argument("--optional-truth", type=json.loads)
    made.add_argument("model_tag", nargs="?")
    return made


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"vllm_compilation_config": '{"level":  3, "x": "é"}'}, ['--compilation-config={"level":  3, "x": "é"}']),
        ({"vllm_compilation_config": "-1"}, ["--compilation-config=-1"]),
        ({"vllm_max_model_len": 4096}, ["--max-model-len=4096"]),
        ({"vllm_gpu_memory_utilization": 0.1}, ["--gpu-memory-utilization=0.1"]),
        ({"vllm_middleware": ["a.b", "c.d"]}, ["--middleware", "a.b", "c.d"]),
        ({"vllm_headless": True}, ["--headless"]),
        ({"vllm_headless": False}, []),
        ({"vllm_enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"vllm_enable_prefix_caching": True}, ["--enable-prefix-caching"]),
        ({"vllm_optional_truth": True}, ["--optional-truth=true"]),
        ({"vllm_max_model_len": None, "lr": 3}, []),
    ],
)
def test_values_are_forwarded(given: dict[str, Any], words: list[str]) -> None:
    assert arguments.forward(given, parser()) == words
    parser().parse_args(words)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"vllm_max_model_length": 3}, ValueError, "did you mean vllm_max_model_len"),
        ({"vllm_model_tag": "m"}, ValueError, "no flag for 'model_tag'"),
        ({"vllm_compilation_config": {"level": 3}}, TypeError, "JSON for a structured one"),
    ],
)
def test_what_cannot_be_forwarded(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        arguments.forward(given, parser())


LIVE = """
import json
from samebits.into_vllm import arguments
parser = arguments.server_parser()
fields = arguments.server_fields()
text = '{"mode":  0}'
words = arguments.forward({"vllm_compilation_config": text, "vllm_max_model_len": 64}, parser)
seen = parser.parse_args(words)
print("ANSWER" + json.dumps({
    "common": len(fields & arguments.fields_of(parser)), "words": words,
    "length": seen.max_model_len, "structured": type(seen.compilation_config).__name__,
}))
"""


def test_the_installed_release() -> None:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", LIVE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout.partition("ANSWER")[2])
    assert answer["common"] > 200
    assert answer["words"] == ['--compilation-config={"mode":  0}', "--max-model-len=64"]
    assert (answer["length"], answer["structured"]) == (64, "CompilationConfig")


def test_every_release_from_020_on_and_an_older_one_were_read_from_their_wheels() -> None:
    minors = [facts["version"].rpartition(".")[0] for facts in FACTS]
    assert minors == ["0.10", "0.20", *(f"0.{minor}" for minor in range(22, 34))]  # there is no 0.21
    assert all(wheel.is_served(facts) for facts in FACTS)
    assert {facts["parser"] for facts in FACTS} == set(arguments.PARSER_PLACES)
    assert {facts["server"] for facts in FACTS} == set(arguments.SERVER_PLACES)
    assert all(facts["engine_fields_missing"] == facts["symbols_missing"] == [] for facts in FACTS[1:])
    assert FACTS[0]["symbols_missing"]


def test_the_list_of_engine_fields_is_the_engines() -> None:
    handed: set[str] = set()
    for device in ("cpu", "cuda"):
        config = EngineConfig(model="m", device=device, tp=2, max_tp=2, contract={"arithmetic": "fma32"})
        handed |= set(engine_arguments(config, RoutePlan.for_engine(config, 1)))
    assert handed == set(wheel.ENGINE_FIELDS)


@pytest.mark.parametrize(("ffn", "compiled", "mode"), [
    ("R", False, "captured"), ("P", False, "eager"), ("P", True, "compiled"),
])  # fmt: skip
def test_native_code_on_a_gpu_is_captured_only_where_it_is_compiled(ffn: Route, compiled: bool, mode: str) -> None:
    case = ModuleRoutes("P", ffn, "P")
    config = EngineConfig(model="m", device="cuda", contract={"arithmetic": "sm90"}, case=case, compiled=compiled)
    plan = RoutePlan.for_engine(config, 1)
    assert plan.mode == mode
    assert engine_arguments(config, plan)["enforce_eager"] == (mode == "eager")


def pack(path: Path, version: str = "9.9", **modules: str) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"vllm-{version}.dist-info/METADATA", "Name: vllm\n")
        for name, source in modules.items():
            file.writestr("vllm/" + "/".join(name.split("__")) + ".py", source)
    return path


def test_a_wheel_is_read_by_its_symbols(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = "@dataclass\nclass EngineArgs:\n    model: str\n    seed: int = 0\n"
    engine += "@dataclass\nclass AsyncEngineArgs(EngineArgs):\n    x: int\n"
    path = pack(tmp_path / "a.whl", utils=PARSER, entrypoints__openai__cli_args=SERVER, engine__arg_utils=engine)
    assert wheel.main([str(path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["parser"], facts["server"]) == ("vllm.utils", "vllm.entrypoints.openai.cli_args")
    assert (facts["server_is_dataclass"], facts["engine_is_dataclass"]) == (False, True)
    assert facts["engine_fields_missing"] == sorted(set(wheel.ENGINE_FIELDS) - {"model", "seed"})
    assert len(facts["symbols_missing"]) == len(SYMBOLS)


def test_a_wheel_in_an_unknown_layout_is_not_served(tmp_path: Path) -> None:
    assert wheel.main([str(pack(tmp_path / "b.whl", somewhere__new=PARSER))]) == 1


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.whl").write_text("text")
    with pytest.raises(ValueError, match="no wheel"):
        wheel.inspect_wheel(tmp_path / "c.whl")
    with zipfile.ZipFile(tmp_path / "d.whl", "w") as file:
        file.writestr("numpy/__init__.py", "")
    with pytest.raises(ValueError, match="no vLLM wheel"):
        wheel.inspect_wheel(tmp_path / "d.whl")


@pytest.mark.parametrize("words", [[], ["nowhere-*.whl"], [__file__]])
def test_no_wheel_is_told_from_a_wheel_that_lacks_a_place(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        wheel.main(words)
    assert "wheel: error: " in capsys.readouterr().err
