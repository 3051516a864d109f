"""Shards: writing survives a kill, reading sees each validation sample once, training is resampled and repeatable."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter

import pytest
import torch
from conftest_images import CLASSES, write_images

from mmpe.datamodules import ImageShards, ImageTransforms, make_shards
from mmpe.datamodules.loading import TooManyErrorsError
from mmpe.datamodules.shard_index import count_samples, open_shards
from mmpe.datamodules.shard_streams import StreamEvalLoader, StreamTrainLoader
from mmpe.datamodules.shard_writer import write_atomically

SMALL = {"image_size": 16, "batch_size": 4, "num_workers": 0, "shuffle_buffer": 8}


@pytest.fixture(scope="module")
def shards(pictures, tmp_path_factory):
    """train (30 samples in 8 shards) and val (15 in 4). Do not write into it."""
    out = tmp_path_factory.mktemp("shards")
    make_shards(pictures, out, samples_per_shard=4)
    return out


@pytest.fixture
def own_shards(pictures, tmp_path):
    """The same, for one test to damage."""
    make_shards(pictures, tmp_path, samples_per_shard=4)
    return tmp_path


def data_of(root, **options):
    return ImageShards(str(root / "train"), str(root / "val"), **{**SMALL, **options})


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# Writing


def test_index_and_members(shards, pictures):
    index = json.loads((shards / "train" / "index.json").read_text())
    assert index["classes"] == list(CLASSES)
    assert index["samples"] == 30
    assert [shard["samples"] for shard in index["shards"]] == [4] * 7 + [2]
    originals = Counter(path.read_bytes() for path in (pictures / "train").rglob("*.*"))
    stored, labels = Counter(), Counter()
    for shard in index["shards"]:
        with tarfile.open(shards / "train" / shard["name"]) as archive:
            for member in archive:
                bytes_of = archive.extractfile(member).read()
                if member.name.endswith(".cls"):
                    labels[int(bytes_of)] += 1
                else:
                    stored[bytes_of] += 1
    assert stored == originals
    assert labels == {0: 10, 1: 10, 2: 10}


def test_writing_is_deterministic_and_depends_on_the_seed(pictures, shards, tmp_path):
    make_shards(pictures / "train", tmp_path / "again", samples_per_shard=4, workers=1)
    assert contents(tmp_path / "again") == contents(shards / "train")
    make_shards(pictures / "train", tmp_path / "other", samples_per_shard=4, seed=1)
    assert contents(tmp_path / "other") != contents(shards / "train")


def test_a_finished_run_writes_nothing_again(own_shards, pictures):
    before = {path: path.stat().st_mtime_ns for path in own_shards.rglob("*.tar")}
    make_shards(pictures, own_shards, samples_per_shard=4)
    assert {path: path.stat().st_mtime_ns for path in own_shards.rglob("*.tar")} == before


def test_a_lost_shard_is_written_again(own_shards, pictures, shards):
    (own_shards / "train" / "shard-000003.tar").unlink()
    make_shards(pictures, own_shards, samples_per_shard=4)
    assert contents(own_shards / "train") == contents(shards / "train")


def test_killed_writer_leaves_whole_shards_and_is_resumed(tmp_path):
    """After kill -9 every name that ends in .tar is whole; the resumed run ends with the same bytes."""
    write_images(tmp_path / "in", 60, size=48)
    make_shards(tmp_path / "in", tmp_path / "reference", samples_per_shard=2)
    out = tmp_path / "out"
    code = (
        f"from mmpe.datamodules import make_shards; make_shards({str(tmp_path / 'in')!r}, {str(out)!r}, 2, workers=2)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=environment())
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline and not list(out.glob("*.tar")):
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 0 < len(list(out.glob("*.tar"))) < 90
    assert not (out / "index.json").exists()
    assert all(count_samples(path) == 2 for path in out.glob("*.tar"))
    (out / "shard-000099.tar.1.tmp").write_bytes(b"left by a killed run")
    make_shards(tmp_path / "in", out, 2)
    assert contents(out) == contents(tmp_path / "reference")


def environment():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def test_other_settings_or_foreign_shards_are_refused(own_shards, pictures, tmp_path_factory):
    with pytest.raises(ValueError, match="another samples_per_shard or seed"):
        make_shards(pictures, own_shards, samples_per_shard=5)
    foreign = tmp_path_factory.mktemp("foreign")
    (foreign / "a.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds a\.tar, which this did not write"):
        make_shards(pictures / "train", foreign)


def test_writer_refuses_what_is_no_class_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        make_shards(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(ValueError, match="samples_per_shard=0"):
        make_shards(tmp_path, tmp_path / "out", samples_per_shard=0)


def test_writer_checks_the_classes_of_both_splits(own_pictures):
    write_images(own_pictures / "val", 1, ("elk",))
    with pytest.raises(ValueError, match="only in .*val: elk"):
        make_shards(own_pictures, own_pictures / "out")


def test_a_file_that_fails_half_way_leaves_no_shard(tmp_path):
    def parts():
        yield b"half"
        raise PermissionError("picture.png")

    with pytest.raises(PermissionError, match="picture.png"):
        write_atomically(tmp_path / "shard-000000.tar", parts())
    assert not list(tmp_path.glob("*.tar"))


# Reading


def test_batches_sizes_and_exactly_once_validation(shards, pictures):
    data = data_of(shards, eval_sizes=[16, 24])
    data.setup("fit")
    assert (data.num_classes, data.eval_names) == (3, ["16px", "24px"])
    loader = data.train_dataloader()
    batches = list(loader)
    assert len(batches) == len(loader) == 30 // 4
    assert batches[0]["image"].shape == (4, 3, 16, 16)
    assert set(batches[0]) == {"image", "label"}
    for size, val in zip(data.eval_sizes, data.val_dataloader(), strict=True):
        seen = list(val)
        assert {batch["image"].shape[1:] for batch in seen} == {(3, size, size)}
        assert Counter(torch.cat([b["label"][b["valid"]] for b in seen]).tolist()) == {0: 5, 1: 5, 2: 5}


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_every_validation_sample_once_and_equal_steps_for_any_ranks_and_workers(shards, world, workers):
    index = open_shards(str(shards / "val"))
    loader = StreamEvalLoader(index.urls, index.counts, None, 2, workers, "raise")
    dealt = [number for rank in range(world) for part in loader.deal(rank, world) for number in part]
    assert sorted(dealt) == [0, 1, 2, 3]
    assert all(len(loader.deal(rank, world)) <= max(1, workers) for rank in range(world))


def test_validation_with_workers_equals_one_process(shards):
    def seen(workers):
        batches = list(data_of(shards, num_workers=workers).val_dataloader()[0])
        images = torch.cat([batch["image"][batch["valid"]] for batch in batches]).flatten(1)
        return sorted(images.tolist())

    assert len(seen(0)) == 15
    assert seen(0) == seen(2)


def test_training_is_repeatable_differs_between_epochs_and_resumes_in_place(shards):
    for workers in (0, 2):
        data = data_of(shards, num_workers=workers, steps_per_epoch=7)
        loader = data.train_dataloader()
        whole = [[b["image"] for b in loader]]
        loader.set_epoch(1)
        whole.append([b["image"] for b in loader])
        assert not torch.equal(whole[0][0], whole[1][0])
        for done in (3, 6):
            first = data.train_dataloader()
            first.set_epoch(1)
            passes = iter(first)
            for _ in range(done):
                next(passes)
            second = data.train_dataloader()
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            rest = [b["image"] for b in second]
            assert len(rest) == 7 - done
            assert all(torch.equal(one, other) for one, other in zip(rest, whole[1][done:], strict=True))


def test_workers_and_ranks_draw_different_streams(shards, monkeypatch):
    labels = []
    for rank in range(2):
        monkeypatch.setattr("mmpe.datamodules.shard_streams.rank_and_world", lambda rank=rank: (rank, 2))
        data = data_of(shards, num_workers=2, steps_per_epoch=2, transforms=ImageTransforms(auto_augment=None))
        labels += [batch["image"].sum().item() for batch in data.train_dataloader()]
    assert len(set(labels)) == 4


def test_another_number_of_workers_draws_fresh_samples_for_the_rest_of_the_epoch(shards, caplog):
    old = data_of(shards, num_workers=0, steps_per_epoch=5).train_dataloader()
    passes = iter(old)
    seen = [next(passes)["image"] for _ in range(2)]
    new = data_of(shards, num_workers=1, batch_size=4, shuffle_buffer=9, steps_per_epoch=5).train_dataloader()
    with caplog.at_level(logging.WARNING, "mmpe.datamodules"):
        new.load_state_dict(old.state_dict())
    assert "fresh samples" in caplog.text
    rest = [b["image"] for b in new]
    assert len(rest) == 3
    assert not any(torch.equal(one, other) for one in seen for other in rest)


def test_braces_lists_and_counting_without_an_index(own_shards):
    (own_shards / "train" / "index.json").unlink()
    (own_shards / "val" / "index.json").unlink()
    train = f"{own_shards}/train/shard-{{000000..000003}}.tar::{own_shards}/train/shard-000007.tar"
    data = ImageShards(train, f"{own_shards}/val/shard-{{000000..000003}}.tar", num_classes=3, **SMALL)
    assert data.train_shards.counts == (4, 4, 4, 4, 2)
    assert data.val_shards.samples == 15
    with pytest.raises(ValueError, match="pass num_classes"):
        ImageShards(train, str(own_shards / "val"), **SMALL)


def test_brace_urls_beside_an_index_take_its_counts_and_classes(shards):
    index = open_shards(f"{shards}/train/shard-{{000006..000007}}.tar")
    assert index.counts == (4, 2)
    assert index.classes == CLASSES


def test_missing_shards_are_named(own_shards):
    with pytest.raises(FileNotFoundError, match=r"2 of 10 shards .*shard-000008\.tar, .*shard-000009\.tar"):
        ImageShards(f"{own_shards}/train/shard-{{000000..000009}}.tar", str(own_shards / "val"), **SMALL)
    (own_shards / "val" / "shard-000001.tar").unlink()
    with pytest.raises(FileNotFoundError, match="make the shards again"):
        data_of(own_shards)
    with pytest.raises(FileNotFoundError, match="1 of 1 shards"):
        open_shards(str(own_shards / "nowhere"))
    (own_shards / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"searched for index\.json and \*\.tar"):
        open_shards(str(own_shards / "empty"))
    with pytest.raises(ValueError, match="no shards given"):
        open_shards(" ")


def test_damaged_index_is_named(own_shards):
    (own_shards / "val" / "index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json is no index of shards"):
        data_of(own_shards)
    (own_shards / "val" / "index.json").write_text('{"version": 99}')
    with pytest.raises(ValueError, match="version 99"):
        data_of(own_shards)


def test_remote_shards_need_what_cannot_be_counted(shards):
    with pytest.raises(ValueError, match="pass steps_per_epoch"):
        ImageShards("pipe:cat /no/{0..3}.tar", str(shards / "val"), **SMALL)
    with pytest.raises(ValueError, match="keep https://host"):
        ImageShards(str(shards / "train"), "https://host/{0..3}.tar", **SMALL)


def test_piped_shards_are_read(shards):
    data = ImageShards(
        f"pipe:cat {shards}/train/shard-00000{{0..3}}.tar", str(shards / "val"), steps_per_epoch=3, **SMALL
    )
    assert [len(batch["label"]) for batch in data.train_dataloader()] == [4, 4, 4]


def test_fewer_shards_than_readers_are_refused_at_setup(shards):
    """webdataset/webdataset#188: a reader without a shard hangs the whole job."""
    data = data_of(shards, num_workers=9)
    with pytest.raises(ValueError, match=r"8 training shards .* 1 processes x 9 workers .* lower num_workers to 8"):
        data.setup("fit")
    data.setup("validate")


def test_class_numbers_and_mismatches(own_shards):
    with pytest.raises(ValueError, match="num_classes=4, but the index of the shards names 3"):
        data_of(own_shards, num_classes=4)
    path = own_shards / "val" / "index.json"
    path.write_text(path.read_text().replace('"cat"', '"elk"'))
    with pytest.raises(ValueError, match="missing in validation shards: cat; only in validation shards: elk"):
        data_of(own_shards)


def test_batch_larger_than_the_data(shards):
    with pytest.raises(ValueError, match="30 training samples do not fill one global batch"):
        data_of(shards, batch_size=31).setup("fit")


# Broken members


def add_shard(folder, name, members):
    with tarfile.open(folder / name, "w") as archive:
        for member, data in members:
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def broken(root):
    """val gets a shard with four broken samples, a cut shard and one that is no archive; train gets the first."""
    (root / "val" / "index.json").unlink()
    good = next((root / "val").glob("*.tar"))
    with tarfile.open(good) as archive:
        image = next(archive.extractfile(m).read() for m in archive if not m.name.endswith(".cls"))
    members = [
        ("a.png", b"no picture"),
        ("a.cls", b"0"),
        ("b.cls", b"1"),
        ("c.jpg", image),
        ("d.jpg", image),
        ("d.cls", b"7"),
        ("e.jpg", image),
        ("e.cls", b"2"),
    ]
    add_shard(root / "val", "shard-9.tar", members)
    index = json.loads((root / "train" / "index.json").read_text())
    add_shard(root / "train", "shard-9.tar", members)
    index["shards"] = [{"name": "shard-9.tar", "samples": 5}, *index["shards"][:2]]
    (root / "train" / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_members_are_counted_and_count_for_nothing(own_shards, workers):
    broken(own_shards)
    data = data_of(own_shards, on_error="skip", num_workers=workers)
    seen = list(data.val_dataloader()[0])
    assert sum(len(batch["label"]) for batch in seen) == 20
    assert sum(int(batch["valid"].sum()) for batch in seen) == 16
    assert data.skipped.count == 4
    report = data.skipped.report()
    for text in ("shard-9.tar:a", "no image among", "no member .cls", "class number 7 is not in 0 to 2"):
        assert text in report
    batches = list(data.train_dataloader())
    assert all(len(batch["label"]) == 4 for batch in batches)
    assert all(int(batch["label"].max()) < 3 for batch in batches)


def test_broken_member_stops_the_run_by_default(own_shards):
    broken(own_shards)
    with pytest.raises(ValueError, match=r"cannot read .*shard-9\.tar:a .*on_error='skip'"):
        list(data_of(own_shards).val_dataloader()[0])


def test_more_broken_members_than_the_limit_stop_the_run(own_shards):
    broken(own_shards)
    with pytest.raises(TooManyErrorsError, match="More than max_errors=3"):
        list(data_of(own_shards, on_error="skip", max_errors=3).val_dataloader()[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_cut_and_senseless_shards_do_not_hang_or_skew_the_steps(own_shards, workers):
    cut = own_shards / "val" / "shard-000000.tar"
    cut.write_bytes(cut.read_bytes()[:1800])
    (own_shards / "val" / "shard-000001.tar").write_bytes(b"senseless" * 200)
    data = data_of(own_shards, on_error="skip", num_workers=workers)
    loader = data.val_dataloader()[0]
    seen = list(loader)
    assert len(seen) == len(loader)
    assert 7 <= sum(int(batch["valid"].sum()) for batch in seen) < 11
    assert data.skipped.count >= 2
    assert "shard-000001.tar" in data.skipped.report()


def test_counting_names_a_cut_shard(own_shards):
    (own_shards / "val" / "index.json").unlink()
    (own_shards / "val" / "shard-000001.tar").write_bytes(b"senseless" * 200)
    with pytest.raises(ValueError, match=r"cannot count the samples of .*shard-000001\.tar"):
        open_shards(str(own_shards / "val"))


def test_training_on_nothing_but_broken_shards_ends(own_shards):
    for path in (own_shards / "train").glob("*.tar"):
        path.write_bytes(b"senseless" * 200)
    data = data_of(own_shards, on_error="skip")
    with pytest.raises(TooManyErrorsError, match="errors without a readable sample"):
        next(iter(data.train_dataloader()))


def test_index_that_promises_too_little_is_noticed(own_shards):
    path = own_shards / "val" / "index.json"
    path.write_text(path.read_text().replace('"samples": 4', '"samples": 1'))
    with pytest.raises(ValueError, match="more samples than their index says"):
        list(data_of(own_shards, batch_size=1).val_dataloader()[0])


def test_random_numbers_of_the_model_are_left_alone(shards):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    data = data_of(shards)
    list(data.train_dataloader())
    list(data.val_dataloader()[0])
    assert torch.equal(torch.rand(2), expected)


def test_train_loader_reports_its_length():
    assert len(StreamTrainLoader(("a",), None, 4, 11, 0, 0, 0, "raise")) == 11
