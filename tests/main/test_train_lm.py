"""`levanter-diloco train_lm` as a user runs it: two islands of two devices, streaming, with overlap and mixing."""

import gzip
import json
import math
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.command_runs import (
    COMMAND,
    HOST,
    MODULE,
    STREAMING,
    Finished,
    Workplace,
    arrays,
    assert_same,
    checkpoint,
    metrics,
    records,
    summary,
)

pytestmark = [pytest.mark.entry, pytest.mark.slow]

ONE_STEP = {"trainer__num_train_steps": 1, "trainer__steps_per_eval": 1, "optimizer__learning_rate": 0.0}
"""A run that leaves the weights it starts from as they are."""

UNSYNCED = {**STREAMING, "final_sync": False}


@pytest.fixture(scope="session")
def full(workplace: Workplace) -> Finished:
    """14 steps with all that the host can do besides: export, entropies, watch, jaxpr and HLO."""
    config = workplace.config(
        "full",
        STREAMING,
        hf_save_path=str(workplace.root / "full" / "hf"),
        log_entropy=True,
        trainer__watch={},
        trainer__log_jaxprs=True,
        trainer__log_xla_hlo=True,
    )
    return workplace.run(COMMAND, config).succeeded()


@pytest.fixture(scope="session")
def plain(workplace: Workplace) -> Finished:
    """14 steps and a checkpoint after each, through `python -m levanter_diloco.main.train_lm`."""
    return workplace.run(MODULE, workplace.config("plain", STREAMING)).succeeded()


@pytest.fixture(scope="session")
def stock(workplace: Workplace) -> Finished:
    """Four steps of the host's own program."""
    changes = {
        "trainer__num_train_steps": 4,
        "trainer__steps_per_eval": 2,
        "trainer__tracker": {"type": "json_logger"},
    }
    return workplace.run(HOST, workplace.config("stock", None, **changes)).succeeded()


@pytest.fixture(scope="session")
def hugging_face(workplace: Workplace, stock: Finished) -> Path:
    """The stock run's weights as the host exports them from one device: from several it writes one shard of each."""
    source, out = str(checkpoint(stock.folder, 3)), workplace.root / "hugging_face"
    changes = {
        "initialize_model_from_checkpoint_path": source,
        "trainer__num_train_steps": 2,
        "trainer__max_eval_batches": 1,
        "optimizer__learning_rate": 0.0,
        "hf_save_path": str(out / "hf"),
    }
    workplace.run_all(workplace.config("hugging_face", None, **changes), devices=1)
    return next((out / "hf").rglob("step-1"))


@pytest.fixture(scope="session")
def stock_from_theta(workplace: Workplace, full: Finished) -> dict[int, Path]:
    """For the steps after which `full` evaluated, a run of stock Levanter that evaluates the checkpoint's `model`."""
    configs = {
        step: workplace.config(
            f"stock_from_{step}",
            None,
            initialize_model_from_checkpoint_path=str(checkpoint(full.folder, step)),
            log_entropy=True,
            **ONE_STEP,
        )
        for step in (6, 13)
    }
    workplace.run_all(*configs.values())
    return {step: config.parent for step, config in configs.items()}


@pytest.fixture(scope="session")
def started(workplace: Workplace, stock: Finished, plain: Finished, hugging_face: Path) -> dict[str, Path]:
    """Runs that start from weights of each kind, by the option that names them and where they come from."""
    from_stock, from_islands = str(checkpoint(stock.folder, 3)), str(checkpoint(plain.folder, 7))
    full_state = {"optimizer__learning_rate": 0.0, "trainer__num_train_steps": 5}
    configs = {
        "full_state_of_stock": {"initialize_from_checkpoint_path": from_stock, **ONE_STEP},
        "full_state_of_islands": {"initialize_from_checkpoint_path": from_islands, **ONE_STEP},
        "model_of_stock": {"initialize_model_from_checkpoint_path": from_stock, **ONE_STEP},
        "model_of_islands": {"initialize_model_from_checkpoint_path": from_islands, **ONE_STEP},
        "hf": {"initialize_from_hf": str(hugging_face), **ONE_STEP},
        "continue_stock": {"trainer__initialize_from": from_stock, **full_state},
        "continue_islands": {"trainer__initialize_from": from_islands, "trainer__num_train_steps": 9},
    }
    written = {name: workplace.config(name, UNSYNCED, **changes) for name, changes in configs.items()}
    workplace.run_all(*written.values())
    return {name: config.parent for name, config in written.items()}


def exported(folder: Path) -> dict[str, np.ndarray]:
    """Weights of a Hugging Face folder in the names and shapes of a checkpoint's `model`; layers stay apart."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_exported(hf: dict[str, np.ndarray], model: dict[str, np.ndarray]) -> None:
    """The export holds exactly the weights of `model`, a checkpoint's subtree of that name."""
    expected = {
        "model.embed_tokens.weight": model["embeddings/token_embeddings/weight"],
        "model.norm.weight": model["transformer/norm/weight"],
        "lm_head.weight": model["lm_head/weight"],
    }
    stack = "transformer/layers/stacked/"
    for name, value in model.items():
        if name.startswith(stack):
            for layer, own in enumerate(value):
                expected[f"model.layers.{layer}.{name.removeprefix(stack).replace('/', '.')}"] = own
    assert hf.keys() == expected.keys()
    for name, value in hf.items():
        np.testing.assert_array_equal(value, expected[name].reshape(value.shape), err_msg=name)


def assert_islands_equal(state: Path, model: dict[str, np.ndarray]) -> None:
    """Theta and every island of the checkpoint at `state` are `model`, bit for bit."""
    assert_same(arrays(state, "model/"), model)
    for island in range(2):
        assert_same({name: value[island] for name, value in arrays(state, "islands/params/").items()}, model)


def test_run_closes_with_loss_bytes_and_checkpoint(full: Finished) -> None:
    loss, sent, where = full.stdout.strip().splitlines()
    evaluated = metrics(full.folder)[13]["eval/loss"]
    assert loss == f"final outer validation loss: {evaluated:.4f} (perplexity {math.exp(evaluated):.1f})"
    # 102,688 parameters in f32; each fragment took three outer steps in 14, data parallel 14 times everything
    assert sent == "bytes sent per island: 1.18 MiB, against 5.48 MiB of data parallel, 4.7 times less"
    assert where == f"checkpoint: {checkpoint(full.folder, 13)}"
    assert (checkpoint(full.folder, 13) / "metadata.json").is_file()


def test_run_says_what_it_will_do_before_its_first_step(full: Finished) -> None:
    lines = records(full.folder)
    first_step = next(i for i, line in enumerate(lines) if "step" in line)
    announced = next(i for i, line in enumerate(lines) if "diloco/islands" in line.get("summary", {}))
    assert announced < first_step
    figures = summary(full.folder)
    assert figures["diloco/islands"] == 2 and figures["diloco/effective_period"] == 6
    assert figures["diloco/bytes_per_period"] == 4 * figures["parameter_count"] == 4 * 102_688
    assert full.stderr.index("DiLoCo: 2 island(s)") < full.stderr.index("First train step completed")
    assert "fragment 1: layers 0 2" in full.stderr and "fragment 2: layers 1 3" in full.stderr


def test_metrics_of_every_step_are_written_in_order(full: Finished) -> None:
    assert [line["step"] for line in records(full.folder) if "step" in line] == list(range(14))
    for line in metrics(full.folder).values():
        losses = [line["train/loss_island_0"], line["train/loss_island_1"]]
        assert line["train/loss"] == pytest.approx(np.mean(losses), abs=1e-6)
        assert line["diloco/loss_spread"] == pytest.approx(abs(losses[0] - losses[1]), abs=1e-6)
        assert line["optim/learning_rate"] == pytest.approx(3e-3)
    assert metrics(full.folder)[0]["train/loss_island_0"] != metrics(full.folder)[0]["train/loss_island_1"]


def test_metrics_name_each_sync(full: Finished) -> None:
    lines = metrics(full.folder)
    # captured after steps 2 4 6 8 10 12, reduced one later; the tracker counts from 0
    synced = {step: line["diloco/synced_fragment"] for step, line in lines.items() if "diloco/synced_fragment" in line}
    assert synced == {2: 1, 4: 2, 6: 0, 8: 1, 10: 2, 12: 0}
    final = {name.rpartition("_")[2] for name in lines[13] if name.startswith("diloco/synced_fragment/")}
    assert final == {"0", "1", "2"}
    for step in synced:
        assert lines[step]["diloco/outer_grad_norm"] > 0 and -1 <= lines[step]["diloco/outer_grad_cosine"] <= 1
    assert lines[13]["diloco/bytes_per_island"] == 3 * 4 * 102_688


def test_evaluation_is_that_of_the_outer_model(full: Finished, stock_from_theta: dict[int, Path]) -> None:
    for step, folder in stock_from_theta.items():
        alone = metrics(folder)[0]
        assert metrics(full.folder)[step]["eval/loss"] == pytest.approx(alone["eval/loss"], abs=1e-5)
        assert metrics(full.folder)[step]["eval/topics/loss"] == pytest.approx(alone["eval/topics/loss"], abs=1e-5)


def test_entropies_are_those_of_the_outer_model(full: Finished, stock_from_theta: dict[int, Path]) -> None:
    for step, folder in stock_from_theta.items():
        alone = {name: value for name, value in metrics(folder)[0].items() if name.startswith("analysis/")}
        assert alone
        for name, value in alone.items():
            statistics = {figure: value[figure] for figure in ("mean", "min", "max", "num")}
            of_theta = {figure: metrics(full.folder)[step][name][figure] for figure in statistics}
            assert of_theta == pytest.approx(statistics, abs=1e-4), name


def test_watch_reports_in_its_interval(full: Finished) -> None:
    watched = {step for step, line in metrics(full.folder).items() if any(name.startswith("grad/") for name in line)}
    assert watched == {9}  # the default interval is 10
    line = metrics(full.folder)[9]
    assert line["grad/norm/total"] > 0 and line["params/norm/total"] > 0


def test_program_texts_are_written(full: Finished) -> None:
    artifacts = full.folder / "logs" / "full" / "artifacts"
    jaxpr = gzip.decompress((artifacts / "train_step.jaxpr.txt.gz").read_bytes()).decode()
    assert "shard_map" in jaxpr
    assert "stablehlo" in (artifacts / "train_step.hlo.txt").read_text()


def test_export_is_the_outer_model(full: Finished) -> None:
    folder = next((full.folder / "hf").rglob("step-13"))
    assert_exported(exported(folder), arrays(checkpoint(full.folder, 13), "model/"))


def test_outer_model_in_host_memory_is_evaluated_saved_and_exported_alike(
    workplace: Workplace, full: Finished
) -> None:
    hf = str(workplace.root / "host_memory" / "hf")
    block = {**STREAMING, "outer_memory": "pinned_host"}
    config = workplace.config("host_memory", block, hf_save_path=hf, log_entropy=True, trainer__watch={})
    hosted = workplace.run(COMMAND, config).succeeded()
    assert hosted.stdout.splitlines()[:2] == full.stdout.splitlines()[:2]
    for step, line in metrics(full.folder).items():
        for name in line:
            if name.startswith(("train/", "eval/loss", "eval/topics/", "analysis/", "diloco/", "params/")):
                assert metrics(hosted.folder)[step][name] == line[name], (step, name)
    last = checkpoint(hosted.folder, 13)
    assert_same(arrays(last), arrays(checkpoint(full.folder, 13)))
    assert_exported(exported(next(Path(hf).rglob("step-13"))), arrays(last, "model/"))
    assert summary(hosted.folder)["diloco/host_memory_added_per_device"] > 0


def test_yaml_without_the_block_is_stock_levanter(workplace: Workplace, stock: Finished) -> None:
    changes = {"trainer__num_train_steps": 4, "trainer__steps_per_eval": 2}
    ours = workplace.run(COMMAND, workplace.config("no_block", None, **changes)).succeeded()
    assert ours.stdout == stock.stdout
    assert_same(arrays(checkpoint(ours.folder, 3)), arrays(checkpoint(stock.folder, 3)))
    logged = [json.loads(line[line.index("{") :]) for line in stock.stderr.splitlines() if '"event": "log"' in line]
    losses = {line["step"]: line["metrics"]["train/loss"] for line in logged if "train/loss" in line["metrics"]}
    assert len(losses) == 4
    assert {step: line["train/loss"] for step, line in metrics(ours.folder).items()} == losses


@pytest.mark.parametrize("kind", ["full_state_of_stock", "model_of_stock", "model_of_islands"])
def test_run_starts_from_the_weights_of_a_checkpoint(
    kind: str, started: dict[str, Path], stock: Finished, plain: Finished
) -> None:
    source = checkpoint(plain.folder, 7) if kind == "model_of_islands" else checkpoint(stock.folder, 3)
    assert_islands_equal(checkpoint(started[kind], 0), arrays(source, "model/"))


def test_run_starts_from_the_full_state_of_islands(started: dict[str, Path], plain: Finished) -> None:
    new, old = checkpoint(started["full_state_of_islands"], 0), checkpoint(plain.folder, 7)
    for part in ("model/", "islands/params/", "opt_state/"):
        assert_same(arrays(new, part), arrays(old, part))
    assert arrays(new, "step")[""] == 1
    assert list(arrays(new, "islands/opt_state/count")[""]) == [9, 9]


def test_run_takes_over_the_inner_optimizer_of_a_full_stock_state(started: dict[str, Path]) -> None:
    counts = arrays(checkpoint(started["full_state_of_stock"], 0), "islands/opt_state/count")[""]
    assert list(counts) == [5, 5]
    assert list(arrays(checkpoint(started["model_of_stock"], 0), "islands/opt_state/count")[""]) == [1, 1]


def test_run_continues_a_stock_run_on_islands(started: dict[str, Path], stock: Finished) -> None:
    state = checkpoint(started["continue_stock"], 4)
    assert arrays(state, "step")[""] == 5
    assert_islands_equal(state, arrays(checkpoint(stock.folder, 3), "model/"))


def test_run_continues_another_run_of_islands(started: dict[str, Path], plain: Finished) -> None:
    # a fragment was in flight after step 8
    assert_same(arrays(checkpoint(started["continue_islands"], 8)), arrays(checkpoint(plain.folder, 8)))


def test_run_starts_from_hugging_face_weights(started: dict[str, Path], stock: Finished) -> None:
    assert_islands_equal(checkpoint(started["hf"], 0), arrays(checkpoint(stock.folder, 3), "model/"))


def kill_when(process: subprocess.Popen, happened: Callable[[], bool], log: Path) -> None:
    """SIGKILL, the moment that `happened()`."""
    while not happened():  # a run that neither gets there nor ends is ended by pytest's faulthandler_timeout
        assert process.poll() is None, f"ended before it could be killed:\n{log.read_text()[-3000:]}"
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_killed_runs_end_in_the_state_of_an_uninterrupted_one(workplace: Workplace, plain: Finished) -> None:
    config = workplace.config("killed", STREAMING)
    folder = config.parent
    log = folder / "stderr.txt"

    def resumed_from() -> int:
        return int(log.read_text().rpartition("Resuming training from step ")[2].split()[0])

    # a fragment may be in flight after any even step, merged after any odd one
    kill_when(workplace.start(config), (checkpoint(folder, 2) / "metadata.json").is_file, log)

    # between the arrays and the metadata that completes a checkpoint
    kill_when(workplace.start(config), (checkpoint(folder, 6) / "manifest.json").is_file, log)
    assert resumed_from() >= 3
    for step in range(6, 14):
        (checkpoint(folder, step) / "metadata.json").unlink(missing_ok=True)

    kill_when(workplace.start(config), (checkpoint(folder, 10) / "metadata.json").is_file, log)
    assert resumed_from() == 6  # after step 6 fragment 0 is in flight
    workplace.run(COMMAND, config).succeeded()
    assert_same(arrays(checkpoint(folder, 13)), arrays(checkpoint(plain.folder, 13)))
    again, once = metrics(folder), metrics(plain.folder)
    for step in again:
        assert again[step]["train/loss"] == once[step]["train/loss"], step
    assert again[13]["eval/loss"] == once[13]["eval/loss"]


def test_finished_run_only_reports_when_run_again(workplace: Workplace, plain: Finished) -> None:
    again = workplace.run(COMMAND, plain.folder / "config.yaml").succeeded()
    assert again.stdout == plain.stdout
    assert 0.0 not in [line["train/loss"] for line in records(plain.folder) if "train/loss" in line]


def test_run_goes_on_with_other_islands_and_fragments(workplace: Workplace, plain: Finished) -> None:
    config = workplace.config(
        "other_layout",
        {**UNSYNCED, "ici_islands": 4, "partition": "balanced", "num_fragments": 2},
        trainer__initialize_from=str(checkpoint(plain.folder, 10)),
    )
    done = workplace.run(COMMAND, config).succeeded()
    [line] = [line for line in done.stderr.splitlines() if "resumes in another layout" in line]
    assert "islands 2 -> 4, num_fragments 3 -> 2" in line
    now, before = metrics(config.parent), metrics(plain.folder)
    assert list(now) == [11, 12, 13]
    for step in (11, 12):
        assert all(f"train/loss_island_{k}" in now[step] for k in range(4))
        assert abs(now[step]["train/loss"] - before[step]["train/loss"]) < 0.2
    state = arrays(checkpoint(config.parent, 13))
    assert state["islands/key"].shape[0] == 4
    # All take over the 2 of fragment 1, synced after 2 and 8. Then f0 is captured after 12, at dh = 3.
    assert state["outer_steps"].tolist() == [3, 2]


def test_resume_with_another_outer_optimizer_is_refused(workplace: Workplace, plain: Finished) -> None:
    refused = workplace.run(COMMAND, plain.folder / "config.yaml", "--trainer.diloco.outer.type", "adam")
    assert refused.returncode == 2 and refused.stdout == ""
    assert "Traceback" not in refused.stderr
    [line] = [line for line in refused.stderr.splitlines() if line.startswith("levanter-diloco: ")]
    assert "trainer.diloco.outer (adam) must have the state" in line and str(checkpoint(plain.folder, 13)) in line


@pytest.fixture(scope="session")
def lora(workplace: Workplace, stock: Finished) -> dict[str, Path]:
    """Four steps of adapters on the stock run's weights, two islands of one device; and the last two steps resumed."""
    out = workplace.root / "lora"
    changes = {
        "adapter": {"type": "lora", "r": 4, "target_modules": ["q_proj"]},
        "initialize_model_from_checkpoint_path": str(checkpoint(stock.folder, 3)),
        "trainer__num_train_steps": 4,
        "trainer__steps_per_eval": 4,
    }
    block = {"sync_period": 2, "ici_islands": 2, "overlap_steps": 1}
    whole = workplace.config("lora", block, merged_hf_save_path=str(out / "merged"), **changes)
    resumed = workplace.config("resumed", block, trainer__load_checkpoint_path=str(checkpoint(out, 1)), **changes)
    workplace.run_all(whole, resumed, devices=2)
    return {"whole": out, "resumed": resumed.parent}


def test_lora_trains_only_adapters(lora: dict[str, Path]) -> None:
    state = checkpoint(lora["whole"], 3)
    names = {f"transformer/layers/stacked/self_attn/q_proj/lora/lora_{side}/weight" for side in "AB"}
    assert arrays(state, "islands/params/").keys() == names
    assert arrays(state, "model/").keys() == names
    assert arrays(state, "captured/rest/").keys() == names
    adapters = sum(value.nbytes for value in arrays(state, "model/").values())
    assert summary(lora["whole"])["diloco/bytes_per_sync"] == adapters
    assert any(np.any(value) for name, value in arrays(state, "model/").items() if "lora_A" in name)


def test_lora_leaves_the_base_alone(lora: dict[str, Path], hugging_face: Path) -> None:
    merged = exported(next((lora["whole"] / "merged").rglob("*.safetensors")).parent)
    base = exported(hugging_face)
    assert merged.keys() == base.keys()
    changed = {name for name in base if not np.array_equal(merged[name], base[name])}
    assert changed == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(4)}


def test_lora_resumes_bit_for_bit(lora: dict[str, Path]) -> None:
    assert_same(arrays(checkpoint(lora["resumed"], 3)), arrays(checkpoint(lora["whole"], 3)))
