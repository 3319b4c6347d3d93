"""What a user can get wrong: one clear message, exit code 2, no traceback, nothing half-written."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_c4.cli import main, train_main

CONFIGURATIONS = {
    "unknown key": (["optim.learning_rate=1e-3"], "optim.learning_rate"),
    "a plus typo": (["+optim.typo=1"], "optim.typo"),
    "not a number": (["optim.lr=nan"], "optim.lr"),
    "infinite": (["optim.lr=inf"], "optim.lr"),
    "a word for a number": (["optim.lr=high"], "optim.lr"),
    "a fraction for a count": (["training.micro_batch_size=2.5"], "training.micro_batch_size"),
    "a switch for a count": (["training.micro_batch_size=true"], "training.micro_batch_size"),
    "negative": (["optim.weight_decay=-0.1"], "optim.weight_decay"),
    "beta of one": (["optim.beta2=1"], "optim.beta2"),
    "clip of zero": (["optim.grad_clip=0"], "optim.grad_clip"),
    "no equals sign": (["optim.lr"], "optim.lr"),
    "no such size": (["model=60m"], "model"),
    "no such schedule": (["lr_schedule=step"], "lr_schedule"),
    "key of another schedule": (["lr_schedule=wsd", "lr_schedule.min_lr_ratio=0.1"], "lr_schedule.min_lr_ratio"),
    "variant by name alone": (["lr_schedule.name=wsd"], "lr_schedule=wsd"),
    "heads that do not divide": (["model.num_heads=3"], "model.num_heads"),
    "two budgets": (["training.tokens_per_parameter=20"], "training.tokens_per_parameter"),
    "two warm-ups": (["lr_schedule.warmup_fraction=0.05"], "lr_schedule.warmup_steps=null"),
    "batch of broken sequences": (["training.batch_tokens=130"], "training.batch_tokens"),
    "interval without a number": (["training.checkpoint_policy=interval"], "training.checkpoint_every_epochs"),
    "number without interval": (["training.checkpoint_every_epochs=2"], "training.checkpoint_policy"),
    "epoch beyond the end": (
        ["training.checkpoint_policy=explicit", "training.checkpoint_epochs=[99]"],
        "training.checkpoint_epochs",
    ),
    "deterministic and compiled": (["runtime.deterministic=true", "runtime.compile=true"], "runtime.compile"),
    "flash on a CPU": (["runtime.attention=flash"], "runtime.attention"),
    "group size of another loader": (["loader=v1", "data.shuffle_group_size=2"], "data.shuffle_group_size"),
    "a sweep without -m": (["optim.lr=1e-3,2e-3"], "-m"),
    "the preset": (["preset.lr=1"], "optim.lr"),
    "a vocabulary beyond uint16": (["model.vocab_size=70000"], "model.vocab_size"),
}


def refused(code: int, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What was said; nothing but a message and exit code 2 is accepted."""
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    for word in words:
        assert word in said
    return said


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_broken_configuration_is_refused_before_any_work(
    case: str, micro: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, word = CONFIGURATIONS[case]
    refused(train_main([*micro, *overrides]), capsys, word)
    assert not (tmp_path / "runs").exists()


def test_all_faults_of_a_command_are_listed_at_once(micro: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = train_main([*micro, "optim.lr=nan", "+model.typo=1", "training.batch_tokens=130", "model.num_heads=3"])
    refused(code, capsys, "optim.lr", "model.typo", "training.batch_tokens", "model.num_heads")


# --- caches -----------------------------------------------------------------------------------------------------------


def missing(cache: Path) -> None:
    shutil.rmtree(cache)


def incomplete(cache: Path) -> None:
    cache.rename(cache.with_name(cache.name + ".partial"))


def cut_shard(cache: Path) -> None:
    shard = sorted(cache.glob("train*.bin"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])


def lost_shard(cache: Path) -> None:
    sorted(cache.glob("train*.bin"))[1].unlink()


def edited_manifest(cache: Path) -> None:
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["vocab_size"] = 65
    (cache / "manifest.json").write_text(json.dumps(manifest))


def no_manifest(cache: Path) -> None:
    (cache / "manifest.json").write_text("{}")


@pytest.fixture
def own_cache(micro: list[str], micro_cache: Path, tmp_path: Path) -> tuple[list[str], Path]:
    cache = tmp_path / "cache"
    shutil.copytree(micro_cache, cache)
    return [*micro, f"data.cache_dir={cache}"], cache


@pytest.mark.parametrize("damage", [missing, incomplete, cut_shard, lost_shard, edited_manifest, no_manifest])
def test_a_cache_that_cannot_be_used_is_named(
    damage: Callable[[Path], None], own_cache: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, cache = own_cache
    damage(cache)
    refused(train_main(overrides), capsys, str(cache))
    assert not (cache.parent / "runs").exists()


def test_an_altered_shard_is_found_by_verify(
    own_cache: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, cache = own_cache
    shard = sorted(cache.glob("train*.bin"))[0]
    data = bytearray(shard.read_bytes())
    data[7] ^= 1
    shard.write_bytes(data)
    refused(main(["prepare", "--verify", *overrides]), capsys, shard.name)


def test_a_cache_of_another_source_or_too_small_is_refused_with_the_way_out(
    micro: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(train_main([*micro, "data.chain_seed=7"]), capsys, "chain_seed")
    refused(train_main([*micro, "training.total_tokens=100000"]), capsys, "training.total_tokens")


def corpus(folder: Path, rows: bytes, *, cut: int | None = None) -> Path:
    folder.mkdir()
    for name in ("c4-train.00000-of-00001.json.gz", "c4-validation.00000-of-00001.json.gz"):
        (folder / name).write_bytes(gzip.compress(rows)[:cut])
    return folder


@pytest.mark.parametrize("kind", ["truncated", "empty", "not utf-8 at all", "no files"])
def test_a_corpus_that_cannot_be_read_is_named_and_leaves_no_cache(
    kind: str, tmp_path: Path, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = b"".join(json.dumps({"text": f"document number {i} " * 9}).encode() + b"\n" for i in range(300))
    rows, cut = {"truncated": (good, -40), "empty": (b"", None), "not utf-8 at all": (b"\xff\xfe\n" * 9, None)}.get(
        kind, (good, None)
    )
    folder = tmp_path / "none" if kind == "no files" else corpus(tmp_path / "en", rows, cut=cut)
    tokenizer = shared / "data" / "tokenizer" / "tokenizer.json"
    places = [f"data.files={folder}", f"data.tokenizer={tokenizer}", f"data.cache_dir={tmp_path / 'cache'}"]
    more = ["data.tokenizer_revision=null", "data.prepare_processes=1", "logging.progress=off"]
    code = main(["prepare", "model=20m", "data=c4_files", *places, *more])
    refused(code, capsys, str(folder))
    assert not (tmp_path / "cache").exists()


# --- run folders and states -------------------------------------------------------------------------------------------


@pytest.fixture
def finished(micro: list[str], tmp_path: Path) -> Path:
    assert train_main([*micro, "logging.progress=off"]) == 0
    return tmp_path / "runs" / "micro"


def test_states_that_cannot_be_used_are_refused_by_name(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = finished / "final.pt"
    good = state.read_bytes()
    newer = bytearray(good)
    newer[-64 + 8] += 1  # the version in the footer
    for data in (good[: len(good) // 2], good[:100], b"", bytes(newer), good.replace(b"L", b"M", 1)):
        state.write_bytes(data)
        refused(main(["evaluate", str(state)]), capsys, "final.pt")
        refused(main(["export", str(state), "--to", str(tmp_path / "hf")]), capsys, "final.pt")
    assert not (tmp_path / "hf").exists()


def test_folders_that_are_no_runs_are_refused(
    micro: list[str], finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(main(["evaluate", str(tmp_path / "nothing")]), capsys, "nothing")
    (empty := tmp_path / "empty").mkdir()
    refused(main(["report", str(empty), "--out", str(tmp_path / "r.html")]), capsys, str(empty))
    refused(main(["train", "--resume", str(empty)]), capsys, str(empty))
    (tmp_path / "runs" / "letters").mkdir()
    (tmp_path / "runs" / "letters" / "dear.txt").write_text("mine")
    refused(train_main([*micro, "run.name=letters"]), capsys, "letters")
    assert (tmp_path / "runs" / "letters" / "dear.txt").read_text() == "mine"
    assert main(["export", str(finished), "--to", str(tmp_path / "hf")]) == 0
    refused(main(["export", str(finished), "--to", str(tmp_path / "hf")]), capsys, "hf")


def test_a_folder_that_cannot_be_made_is_refused_by_name(
    micro: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    place = tmp_path / "letter.txt" / "runs"
    refused(train_main([*micro, f"run.output_dir={place}"]), capsys, str(place), "run.output_dir")


def test_a_run_that_diverges_ends_with_a_message_and_says_so(
    micro: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = ["optim.lr=1e30", "optim.grad_clip=null", "lr_schedule=constant", "lr_schedule.warmup_steps=0"]
    assert train_main([*micro, *wild, "logging.progress=off"]) == 1
    assert "not finite" in (said := capsys.readouterr().err) and "Traceback" not in said
    assert json.loads((tmp_path / "runs" / "micro" / "status.json").read_text())["state"] == "diverged"
