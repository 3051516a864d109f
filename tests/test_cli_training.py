"""Trainings and comparisons as they are typed: real calls, a few steps each."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from cli_calls import mistake, mmpe_process

from mmpe.cli import main
from mmpe.cli._arguments import EncodingSpec
from mmpe.cli.checkpoints import find_checkpoint
from mmpe.cli.configs import find
from mmpe.cli.runs import Job, perform
from mmpe.evaluation.tables import RunResult

# Lightning 2.6 calls jsonargparse in a way that its later versions call old.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


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


def test_fit_says_where_the_checkpoint_is_and_extrapolate_finds_it_from_near(tmp_path, monkeypatch, capsys):
    done = mmpe_process("fit", "--config", "vit/digits.yaml", "--trainer.max_steps", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = "runs/digits/version_0/checkpoints/last.ckpt"
    assert done.stdout.splitlines()[-1] == f"wrote {written}"
    monkeypatch.chdir(tmp_path)
    assert f"there are {written}" in mistake(capsys, "extrapolate", "runs/digits/last.ckpt")
    assert "there is no folder runs/digitz" in mistake(capsys, "extrapolate", "runs/digitz/last.ckpt")
    assert str(find_checkpoint("runs/digits")) == written


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
