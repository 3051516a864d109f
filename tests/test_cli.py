"""The command line as it is typed: real calls, small sizes."""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import yaml
from cli_calls import ROOT, mistake

import mmpe
from mmpe.cli import COMMANDS, main
from mmpe.cli._arguments import EncodingSpec, known_encodings
from mmpe.cli._errors import UsageError, is_user_error, mistake_in
from mmpe.cli._text import duration
from mmpe.cli.configs import find, shipped
from mmpe.cli.workers import run_all

# Lightning 2.6 calls jsonargparse in a way that its later versions call old.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


# --- the program itself


def test_help_lists_every_command_with_one_line(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in COMMANDS:
        assert sum(line.strip().startswith(f"{name} ") for line in lines) == 1


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"mmpe {mmpe.__version__}"


def test_unknown_command_offers_the_nearest(capsys):
    assert "did you mean 'compare'?" in mistake(capsys, "compair")
    assert "known: list, describe" in mistake(capsys, "qqq")


def test_list_needs_neither_lightning_nor_timm():
    code = (
        "import sys; from mmpe.cli import main; main(['list']); main(['describe', 'rope']); main(['configs'])\n"
        "print([m for m in ('lightning', 'timm', 'diffusers', 'matplotlib', 'torchvision') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m mmpe.cli describe {' '.join(mmpe.list_encodings())} | head -1"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_only_messages_that_mmpe_wrote_count_as_mistakes_of_the_user():
    def error_of(call):
        try:
            call()
        except (ValueError, TypeError) as error:
            return error
        raise AssertionError("no error")

    theirs = error_of(lambda: mmpe.create_encoding("nope", 8, 2))
    bug = error_of(lambda: int("x"))
    inside = error_of(lambda: mmpe.Positions.grid("3", 3))  # a comparison inside mmpe fails: not a message
    assert is_user_error(theirs)
    assert is_user_error(UsageError("x"))
    assert not is_user_error(bug)
    assert not is_user_error(inside), traceback.format_exception(inside)
    wrapped = RuntimeError("outer")
    wrapped.__cause__ = theirs
    assert mistake_in(wrapped) is theirs
    assert mistake_in(bug) is None


@pytest.mark.parametrize("below", ["", "below", "b" * 300])
def test_a_path_that_the_system_refuses_is_told_in_one_line(capsys, tmp_path, below):
    """Fault: an output folder that cannot be made ends in a traceback."""
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / below if below != "b" * 300 else tmp_path / below
    said = mistake(capsys, "plot", "attention", "rope_axial", "--out", str(out / "picture.png"))
    assert str(out) in said


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.14, "8.1 s"), (125, "2 min 05 s"), (3840, "1 h 04 min"), (59.99, "60.0 s")]
)
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text


# --- list, describe, configs


def test_list_filters_by_axes_kind_and_pattern(capsys):
    assert main(["list", "rope*", "--axes", "2", "--kind", "rotary", "--json"]) == 0
    infos = json.loads(capsys.readouterr().out)
    assert {"rope_axial", "rope_mixed"} <= {info["name"] for info in infos}
    assert all(info["kind"] == "rotary" and 2 in info["axes"] for info in infos)


def test_list_shows_every_encoding_with_its_parameters(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name in mmpe.list_encodings():
        assert any(line.split()[0] == name for line in out.splitlines() if line.strip()), name
    assert f"{mmpe.describe('rope_mixed').parameters:,}*" in out


def test_list_of_nothing_says_what_there_is(capsys):
    assert "known: none" not in mistake(capsys, "list", "--kind", "bogus")
    assert "rope_axial" in mistake(capsys, "list", "zzz*")


def test_describe_tells_options_promises_and_source(capsys):
    assert main(["describe", "rope_mixed"]) == 0
    out = capsys.readouterr().out
    for part in ("equation", "promises", "2403.13298", "base=", "tests/"):
        assert part in out
    assert main(["describe", "rope_mixed", "rope", "--json"]) == 0
    assert [info["name"] for info in json.loads(capsys.readouterr().out)] == ["rope_mixed", "rope"]


def test_describe_offers_near_names(capsys):
    assert "did you mean 'rope_mixed'" in mistake(capsys, "describe", "rope_mixd")


def test_configs_are_listed_copied_and_not_overwritten(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["configs"]) == 0
    assert "vit/digits.yaml" in capsys.readouterr().out
    assert main(["configs", "--copy", "vit/digits.yaml", "."]) == 0
    capsys.readouterr()
    assert "model" in yaml.safe_load((tmp_path / "digits.yaml").read_text())
    assert "exists already" in mistake(capsys, "configs", "--copy", "vit/digits.yaml", ".")
    assert main(["configs", "--copy", "vit/digits.yaml", ".", "--force"]) == 0


def test_titles_of_configs_start_in_one_column_and_are_whole(capsys):
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    width = max(map(len, shipped()))
    assert [line[:width].rstrip() for line in lines] == shipped()
    assert all(line[width : width + 2] == "  " and line.endswith((".", "?", ")")) for line in lines)


def test_a_config_of_the_working_folder_comes_before_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped_one = find("vit/digits.yaml")
    assert find("configs/vit/digits.yaml") == find("vit/digits") == shipped_one
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "digits.yaml").write_text("model: null")
    assert find("vit/digits.yaml").resolve() == tmp_path / "vit" / "digits.yaml"
    with pytest.raises(UsageError, match=r"did you mean vit/partner\.yaml"):
        find("vit/partnr.yaml")
    with pytest.raises(UsageError, match="is a folder"):
        find("vit")


def test_every_shipped_config_says_how_to_run_it():
    for name in shipped():
        text = (ROOT / "configs" / name).read_text()
        assert text.startswith("# "), name
        assert f"mmpe fit --config {name}" in text, name


# --- encodings with options


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("rope", "rope", {}),
        ("rope_axial:base=10", "rope_axial", {"base": 10}),
        ("rope_axial:base=1e3,half=true", "rope_axial", {"base": 1000.0, "half": True}),
        ("rope_axial:base=[10, 20],convention=dinov3", "rope_axial", {"base": [10, 20], "convention": "dinov3"}),
        ("ape_learned+rope_mixed:base=7", "ape_learned+rope_mixed", {"base": 7}),
        ("x:a=null", "x", {"a": None}),
    ],
)
def test_options_are_read_behind_the_name_and_written_back(text, name, options):
    spec = EncodingSpec.parse(text)
    assert (spec.name, dict(spec.options)) == (name, options)
    assert EncodingSpec.parse(spec.label) == spec


@pytest.mark.parametrize("text", ["rope:base", "rope:=3", "rope:base=[1"])
def test_options_that_cannot_be_read_are_refused(text):
    with pytest.raises(UsageError):
        EncodingSpec.parse(text)


def test_misspelt_options_are_found_before_anything_runs():
    with pytest.raises(ValueError, match="did you mean 'base'"):
        EncodingSpec.parse("rope_axial:bse=3").check()


def test_wildcards_name_all_that_match():
    assert known_encodings(["none", "rope_m*", "none", "rope:base=3"]) == ["none", "rope_mixed", "rope:base=3"]
    assert set(known_encodings(["all"], axes=3)) == set(mmpe.list_encodings(axes=3))
    with pytest.raises(UsageError, match="no encoding matches 'zzz\\*'"):
        known_encodings(["zzz*"])


# --- bench and plot


def test_bench_compares_with_no_encoding(capsys):
    sizes = ["--size", "4", "3", "--dim", "32", "--heads", "2", "--depth", "1", "--batch", "1", "--rounds", "2"]
    assert main(["bench", "--encodings", "rope_axial:base=10", "pape", "--json", *sizes]) == 0
    result = json.loads(capsys.readouterr().out)
    names = [cost["name"] for cost in result["costs"]]
    assert names[:3] == ["none", "rope_axial:base=10", "pape"]
    assert result["costs"][0]["ratio"] == 1.0
    assert main(["bench", "--encodings", "none", "--no-peers", *sizes]) == 0
    assert "x none" in capsys.readouterr().out


def test_bench_leaves_out_what_cannot_be_built_unless_it_is_named(capsys):
    sizes = ["--size", "2", "3", "--dim", "12", "--heads", "2", "--rounds", "1", "--depth", "1", "--no-peers"]
    assert main(["bench", "--encodings", "rope_ax*", "--json", *sizes]) == 0
    captured = capsys.readouterr()
    assert [cost["name"] for cost in json.loads(captured.out)["costs"]] == ["none"]
    assert "left out: rope_axial" in captured.err
    assert "head_dim=6" in mistake(capsys, "bench", "--encodings", "rope_axial", *sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--size", "1", "2", "3", "4"], "1, 2 or 3 numbers"),
        (["bench", "--rounds", "0"], "--rounds must be at least 1"),
        (["bench", "--device", "tpu"], "--device tpu is not available"),
        (["bench", "--encodings", "nope"], "unknown encoding 'nope'"),
        (["plot", "frequencies", "alibi_2d"], "no rotary planes"),
        (["plot", "frequencies"], "name an encoding"),
        (["plot", "attention", "rope_axial", "--token", "99", "0"], "not on the grid"),
        (["plot", "attention", "rope_mixed", "--layer", "12"], "asked for layer=12"),
        (["plot", "similarity", "rope_mixed", "--head", "6"], "--head must be below 6"),
        (["plot", "attention", "rope", "--out", "x.gif"], "must end in .png, .svg"),
        (["plot", "attention", "--ckpt", "nowhere.ckpt"], "no checkpoint nowhere.ckpt"),
        (["plot", "extrapolation", "nowhere"], "no result.json in nowhere"),
        (["extrapolate", "nowhere.ckpt"], "no checkpoint nowhere.ckpt"),
        (["compare", "--config", "vit/digits.yaml", "--encodings", "rope_axial:bse=1"], "no option 'bse'"),
        (["compare", "--config", "vit/digits.yaml", "--encodings", "none", "--seeds", "0"], "--seeds must be"),
        (["compare", "--config", "vit/digits.yaml", "--encodings", "none", "--scales", "0"], "--scales must be"),
        (["compare", "--config", "vit/digits.yaml", "--encodings", "none", "--scales", "nan"], "--scales must be"),
        (["extrapolate", "last.ckpt", "--scales", "1", "inf"], "--scales must be"),
        (["compare", "--config", "nope.yaml", "--encodings", "none"], "no config 'nope.yaml'"),
        (["demo", "--seeds", "0"], "--seeds must be at least 1"),
        (["shards", "make", "nowhere", "out"], "nowhere"),
    ],
)
def test_mistakes_are_told_in_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in mistake(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_mistakes_that_the_parser_finds_are_one_line_too(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["list", "--axis", "2"])
    assert exit_.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["frequencies", "rope_mixed"], b"\x89PNG"),
        (["frequencies", "rope_axial:convention=dinov3", "--size", "6", "6"], b"\x89PNG"),
        (["frequencies", "rope", "--size", "16"], b"\x89PNG"),
        (["attention", "alibi_2d", "--size", "5", "5", "--token", "1", "2"], b"<?xml"),
        (["similarity", "ape_learned", "--size", "5", "5"], b"\x89PNG"),
    ],
)
def test_plots_are_written(capsys, tmp_path, arguments, start):
    out = tmp_path / "new" / ("x.svg" if start == b"<?xml" else "x.png")
    assert main(["plot", *arguments, "--dim", "64", "--heads", "2", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_bytes().startswith(start)


# --- workers


def work(payload, emit):
    """What the workers of the next test do: report, fail in three ways, or die."""
    emit(1, 2)
    if payload == "mistake":
        mmpe.create_encoding("nope", 8, 2)
    if payload == "bug":
        raise RuntimeError("bug")
    if payload == "exit":
        raise SystemExit(3)
    if payload == "die":
        os._exit(7)
    return payload * 2


def test_runs_that_fail_or_die_leave_the_others_alone():
    payloads = ["a", "mistake", "die", "bug", "exit", "b"]
    events = list(run_all(work, payloads, workers=2))
    ends = {event.index: event for event in events if event.kind in ("finished", "failed")}
    assert sorted(ends) == list(range(6))
    assert {payloads[i] for i, event in ends.items() if event.kind == "finished"} == {"a", "b"}
    assert ends[0].result == "aa"
    assert "unknown encoding 'nope'" in ends[1].message
    assert "Traceback" not in ends[1].trace
    assert "exit code 7" in ends[2].message
    assert ends[3].message == "RuntimeError: bug"
    assert "Traceback" in ends[3].trace
    assert ends[4].message.startswith("SystemExit")
    assert [event.kind for event in events if event.index == 0] == ["started", "progress", "finished"]


# --- shards


def test_shards_are_made_from_class_folders(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(3):
            image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / "images" / name / f"{i}.png")
    command = ["shards", "make", str(tmp_path / "images"), str(tmp_path / "out"), "--samples-per-shard", "4"]
    assert main(command) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()
    assert len(list((tmp_path / "out").glob("*.tar"))) == 2
    assert main(command) == 0  # nothing is left to do
