"""What is done with a finished run: evaluate, export, report, runs; and that all that it left says the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_c4.assemble import model_of
from llama_c4.checkpoint.weights import load_weights
from llama_c4.cli import main, train_main
from llama_c4.config.compose import load_config
from llama_c4.runtime.context import build_runtime
from tests.end_to_end.conftest import ROOT, micro_overrides

MEASURED = ("loss", "perplexity", "bits_per_byte", "num_targets")


@pytest.fixture(scope="module")
def finished(micro_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished micro run with the exports of its epochs 2 and 4."""
    runs = tmp_path_factory.mktemp("finished") / "runs"
    exporting = ["training.checkpoint_policy=interval", "training.checkpoint_every_epochs=2"]
    assert train_main([*micro_overrides(micro_cache, runs), *exporting, "logging.progress=off"]) == 0
    return runs / "micro"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def evaluate(path: Path, *words: str, run: Path) -> dict[str, Any]:
    """The record that `llama-c4 evaluate` adds to the run."""
    before = rows(run / "evaluations.jsonl") if (run / "evaluations.jsonl").exists() else []
    assert main(["evaluate", str(path), *words]) == 0
    after = rows(run / "evaluations.jsonl")
    assert after[:-1] == before
    return after[-1]


# --- evaluate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "name"), [(".", "final.pt"), ("final.pt", "final.pt"), ("checkpoints/epoch-0004", "epoch-0004")]
)
def test_evaluating_the_end_of_a_run_gives_its_result(
    state: str, name: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = evaluate(finished / state, run=finished)
    result = json.loads((finished / "result.json").read_text())
    same = (*MEASURED, "update", "cache_identity")
    assert {key: record[key] for key in same} == {key: result[key] for key in same}
    assert (record["kind"], record["scope"], record["state"]) == ("evaluation", "full", name)
    assert f"full validation loss {result['loss']:.6f} nats per target" in capsys.readouterr().out


@pytest.mark.parametrize(("state", "epoch"), [(".", 4), ("checkpoints/epoch-0002", 2), ("checkpoints/epoch-0004", 4)])
def test_evaluating_the_subset_gives_the_validation_record_of_that_epoch(
    state: str, epoch: int, finished: Path
) -> None:
    record = evaluate(finished / state, "--subset", run=finished)
    (logged,) = [r for r in rows(finished / "metrics.jsonl") if r["kind"] == "validation" and r["epoch"] == epoch]
    same = (*MEASURED, "scope", "update", "num_blocks")
    assert {key: record[key] for key in same} == {key: logged[key] for key in same}


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_the_batch_size_of_an_evaluation_moves_its_loss_by_rounding_alone(batch_size: int, finished: Path) -> None:
    record = evaluate(finished, f"evaluation.batch_size={batch_size}", run=finished)
    assert record["batch_size"] == batch_size
    assert record["loss"] == pytest.approx(json.loads((finished / "result.json").read_text())["loss"], rel=1e-6)


@pytest.mark.parametrize("other", ["data.chain_seed=7", "data.train_tokens=9000"])
def test_evaluating_on_another_cache_is_refused_and_leaves_no_record(
    other: str, finished: Path, micro_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "other"
    assert main(["prepare", *micro_overrides(cache, tmp_path / "runs"), other]) == 0
    before = (finished / "evaluations.jsonl").exists() and (finished / "evaluations.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["evaluate", str(finished), f"data.cache_dir={cache}"]) == 2
    said = capsys.readouterr().err
    assert str(cache) in said and other.split("=")[0].split(".")[1] in said and "Traceback" not in said
    assert before == ((finished / "evaluations.jsonl").exists() and (finished / "evaluations.jsonl").read_bytes())


# --- export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [".", "checkpoints/epoch-0002"])
def test_an_export_has_the_weights_of_the_run_and_its_logits_in_transformers(
    state: str, finished: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    assert main(["export", str(finished / state), "--to", str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    config = load_config(finished)
    ours = model_of(config, build_runtime(config.runtime, run_dir=finished))
    ours.load_state_dict(dict(load_weights(finished / state).weights))
    assert torch.equal(theirs.model.embed_tokens.weight, ours.embedding.weight)
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (theirs(tokens).logits - ours(tokens)).abs().amax(dim=(0, 2))
    assert difference.shape == (16,) and difference.max() < 1e-4


def test_a_tokenizer_that_a_synthetic_run_does_not_have_cannot_be_exported(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(finished), "--to", str(tmp_path / "hf"), "--tokenizer"]) == 2
    assert "leave --tokenizer out" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


# --- report and runs --------------------------------------------------------------------------------------------------


def test_report_and_runs_show_a_finished_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(finished), "--out", str(tmp_path / "report.html")]) == 0
    assert "micro" in (tmp_path / "report.html").read_text()
    capsys.readouterr()
    assert main(["runs", str(finished.parent)]) == 0
    head, line = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    shown = dict(zip(head, line, strict=True))
    assert (shown["run"], shown["state"]) == ("micro", "finished")
    assert float(shown["final loss"]) == json.loads((finished / "result.json").read_text())["loss"]


# --- what a run has left ----------------------------------------------------------------------------------------------


def test_result_and_best_repeat_the_records(finished: Path) -> None:
    records = rows(finished / "metrics.jsonl")
    result, best = (json.loads((finished / name).read_text()) for name in ("result.json", "best.json"))
    final, last = records[-1], [r for r in records if r["kind"] == "train"][-1]
    validations = [r for r in records if r["kind"] == "validation"]
    assert final["kind"] == "final_validation" and [r["epoch"] for r in validations] == [1, 2, 3, 4]
    assert {key: result[key] for key in MEASURED} == {key: final[key] for key in MEASURED}
    assert result["update"] == last["update"] == final["update"] == 20
    assert result["targets"] == last["targets"] == result["total_targets"] == 2240
    assert result["best"] == min(validations, key=lambda r: r["loss"])
    kept = f"checkpoints/epoch-{best['epoch']:04d}/model.safetensors" if best["epoch"] in (2, 4) else None
    assert best == result["best"] | {"weights": kept}
    assert kept is None or (finished / kept).is_file()


def test_a_run_has_one_id_and_says_what_it_was_trained_on(finished: Path, micro_cache: Path) -> None:
    names = ("result.json", "status.json", "environment.json")
    result, status, environment = (json.loads((finished / name).read_text()) for name in names)
    (start,) = rows(finished / "lineage.jsonl")
    assert result["run_id"] == status["run_id"] == environment["run_id"] == start["run_id"]
    for key in ("recipe_identity", "cache_identity"):
        assert result[key] == environment[key] == getattr(load_weights(finished).header, key)
    assert result["run"] == "micro" and 0 < result["entropy_floor"] < result["loss"]


def test_every_field_of_results_and_evaluations_is_documented(finished: Path) -> None:
    named = set(re.findall(r"`([^`\s]+)`", (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")))
    written = set(json.loads((finished / "result.json").read_text())) | set(evaluate(finished, run=finished))
    assert written - named == set()
