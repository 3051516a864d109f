"""The command line as it is typed: real calls, small sizes."""

import json
import os
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import mmpe
from mmpe.cli import COMMANDS, main
from mmpe.cli._arguments import EncodingSpec, known_encodings
from mmpe.cli._errors import UsageError, is_user_error, mistake_in
from mmpe.cli._text import duration
from mmpe.cli.configs import find, shipped
from mmpe.cli.runs import Job, perform
from mmpe.cli.workers import run_all
from mmpe.evaluation.tables import RunResult

ROOT = Path(__file__).resolve().parents[1]
# Lightning 2.6 calls jsonargparse in a way that its later versions call old.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


def mmpe_process(*arguments, cwd=None):
    """The script in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mmpe.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def mistake(capsys, *arguments):
    """The one line that a mistake is told in."""
    assert main(list(map(str, arguments))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


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


# --- training


def test_fit_takes_a_shipped_config_and_the_encoding_from_the_command_line(tmp_path):
    done = mmpe_process(
        "fit", "--config", "vit/digits.yaml", "--model.encoding", "rope_axial", "--model.encoding_options.base", "10",
        "--print_config", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert config["model"]["init_args"]["encoding"] == "rope_axial"
    assert config["model"]["init_args"]["encoding_options"] == {"base": 10}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.encoding", "rope_mixd"], "unknown encoding 'rope_mixd'; did you mean 'rope_mixed'"),
        (["--model.encodig", "rope"], "Option 'encodig' is not accepted; did you mean 'encoding'?"),
        (["--model.lr", "abc"], "lr: Expected a float. Got value: abc"),
        (["--model.lr", "-1"], "learning rates must satisfy"),
        (["--ckpt_path", "nope.ckpt"], "no checkpoint nope.ckpt"),
        (["--trainer.max_stepz", "3"], "unrecognized arguments: --trainer.max_stepz"),
    ],
)
def test_mistakes_in_a_training_are_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", "vit/digits.yaml", *arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("mmpe fit: ")
    assert message in line


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A comparison of two encodings, five steps each, and what it printed."""
    folder = tmp_path_factory.mktemp("compare")
    done = mmpe_process(*COMPARE, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


COMPARE = ["compare", "--config", "vit/digits.yaml", "--encodings", "none", "rope_axial:base=10", "--seeds", 1,
           "--scales", 1, 2, "--out", "out", "--jobs", 2, "--trainer.max_steps", 5]  # fmt: skip


def test_compare_trains_evaluates_and_reports(comparison):
    folder, printed = comparison
    out = folder / "out"
    assert "rope_axial:base=10" in printed
    results = json.loads((out / "results.json").read_text())
    assert [result["encoding"] for result in results] == ["none", "rope_axial:base=10"]
    assert set(results[1]["scores"]) == {"raw", "scaled"}
    assert set(results[1]["scores"]["raw"]) == {"1.0", "2.0"}
    # At the training size both rules give the same positions; without an encoding they do at any size.
    assert results[1]["scores"]["raw"]["1.0"] == results[1]["scores"]["scaled"]["1.0"]
    assert results[0]["scores"]["raw"] == results[0]["scores"]["scaled"]
    table = (out / "table.md").read_text()
    assert "| none | any |" in table
    assert "--trainer.max_steps 5" in table
    assert (out / "extrapolation.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert "mmpe compare --config vit/digits.yaml" in page
    assert "data:image/png;base64" in page


def test_compare_again_takes_what_is_finished(comparison):
    folder, _ = comparison
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}
    done = mmpe_process(*COMPARE, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 runs are finished already" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")} == times


def test_another_size_is_evaluated_without_training_again(comparison, monkeypatch):
    folder, _ = comparison
    monkeypatch.chdir(folder)
    spec = EncodingSpec.parse("rope_axial:base=10")
    job = Job("digits", str(find("vit/digits.yaml")), spec, 0, (1.0, 3.0), ("raw", "scaled"), "out",
              ("--trainer.max_steps", "5"))  # fmt: skip
    before = RunResult.load(job.folder / "result.json")
    assert job.finished() is None  # 3x is missing
    [checkpoint] = job.folder.rglob("last.ckpt")
    written = checkpoint.stat().st_mtime_ns
    steps = []
    result = perform(job, lambda done, total: steps.append(done))
    assert steps == []
    assert checkpoint.stat().st_mtime_ns == written
    assert set(result.scores["raw"]) == {1.0, 3.0}
    kept = RunResult.load(job.folder / "result.json")
    assert set(kept.scores["scaled"]) == {1.0, 2.0, 3.0}
    assert kept.scores["raw"][1.0] == before.scores["raw"][1.0]
    assert job.finished() == kept


def test_what_training_depends_on_is_in_the_key_of_a_run(tmp_path):
    config = tmp_path / "a.yaml"
    config.write_text("model: {lr: 1}  # a comment")
    job = Job("t", str(config), EncodingSpec.parse("rope:base=10"), 0, (1.0,), ("raw",), "out")
    same = [replace(job, scales=(2.0,)), replace(job, positions=("scaled",)), replace(job, out="elsewhere")]
    assert {other.key for other in same} == {job.key}
    others = [replace(job, seed=1), replace(job, encoding=EncodingSpec.parse("rope:base=11")),
              replace(job, overrides=("--trainer.max_steps", "5"))]  # fmt: skip
    keys = {other.key for other in [job, *others]}
    assert len(keys) == 4
    config.write_text("model: {lr: 1}")
    assert job.key in keys
    config.write_text("model: {lr: 2}")
    assert job.key not in keys


def test_a_trained_checkpoint_is_evaluated_with_the_config_beside_it(comparison, capsys, monkeypatch):
    folder, _ = comparison
    monkeypatch.chdir(folder)
    [checkpoint] = folder.glob("out/digits/rope_axial*/**/last.ckpt")
    assert (checkpoint.parent / "config.yaml").is_file()
    assert main(["extrapolate", str(checkpoint), "--scales", "1", "2", "--out", "curves"]) == 0
    assert "rope_axial" in capsys.readouterr().out
    scores = json.loads(Path("curves/extrapolation.json").read_text())["scores"]
    [result] = [json.loads(path.read_text()) for path in folder.glob("out/digits/rope_axial*/result.json")]
    assert scores == {rule: {s: result["scores"][rule][s] for s in ("1.0", "2.0")} for rule in ("raw", "scaled")}
    assert Path("curves/extrapolation.png").is_file()
    assert Path("curves/extrapolation.html").is_file()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("encoding", "rope_mixed", "made with encoding='rope_axial', this model has encoding='rope_mixed'"),
        ("backbone_options.depth", "2", "the checkpoint has 3 blocks, this model depth=2"),
    ],
)
def test_a_checkpoint_does_not_overrule_what_was_typed(comparison, capfd, monkeypatch, option, value, message):
    folder, _ = comparison
    monkeypatch.chdir(folder)
    [checkpoint] = folder.glob("out/digits/rope_axial*/**/last.ckpt")
    typed = ["--model.encoding", "rope_axial", f"--model.{option}", value, "--ckpt_path", str(checkpoint)]
    assert main(["validate", "--config", "vit/digits.yaml", *typed]) == 2
    assert message in capfd.readouterr().err.splitlines()[-1]


def test_the_encoding_of_a_checkpoint_is_drawn(comparison, capsys, monkeypatch):
    folder, _ = comparison
    monkeypatch.chdir(folder)
    [checkpoint] = folder.glob("out/digits/rope_axial*/**/last.ckpt")
    assert main(["plot", "attention", "--ckpt", str(checkpoint), "--out", "a.png"]) == 0
    assert main(["plot", "extrapolation", "out", "--out", "e.png"]) == 0
    assert Path("a.png").is_file()
    assert Path("e.png").is_file()


def test_a_checkpoint_without_its_config_says_what_is_missing(tmp_path, capsys):
    (tmp_path / "last.ckpt").write_bytes(b"")
    assert "no config.yaml beside" in mistake(capsys, "extrapolate", tmp_path / "last.ckpt")


def test_a_failing_run_is_reported_and_the_others_go_on(tmp_path):
    config = yaml.safe_load(find("vit/digits.yaml").read_text())
    config["model"]["init_args"]["backbone_options"]["embed_dim"] = 36  # 18 channels a head: no 4 for every plane pair
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(config))
    done = mmpe_process("compare", "--config", "odd.yaml", "--encodings", "none", "rope_axial", "--seeds", 1,
                        "--scales", 1, "--out", "out", "--jobs", 1, "--trainer.max_steps", 2, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert "rope_axial, seed 0: FAILED: head_dim=18" in done.stdout
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| none | any |" in table
    assert "- Failed: odd, rope_axial, seed 0: head_dim=18" in table
    assert "Failed: odd, rope_axial" in (tmp_path / "out" / "report.html").read_text()


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
