"""`scripts/launch_tpu.py` against stand-ins for the clouds' programs, which record what they were given.

What `local` launches trains in `test_processes.py`.
"""

import json
import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from helpers.paths import ROOT

SCRIPT = ROOT / "scripts" / "launch_tpu.py"
sys.path.insert(0, str(SCRIPT.parent))

from launch_tpu import OPTIONS, LaunchError, slice_of  # noqa: E402  a script: not on any installed path

STAND_IN = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
files = {{}}
for word in sys.argv[1:]:
    path = Path(word.rpartition("=")[2])
    if path.is_absolute() and path.is_file():
        files[path.name] = [path.read_text(), oct(path.parent.stat().st_mode & 0o777)]
folder = Path(os.environ["RECORD"])
call = {{"argv": [Path(sys.argv[0]).name, *sys.argv[1:]], "files": files}}
if sys.argv[1] == "build":
    (folder / "context.tar").write_bytes(sys.stdin.buffer.read())
with (folder / "calls.jsonl").open("a") as record:
    record.write(json.dumps(call) + "\\n")
sys.exit(int(os.environ.get("FAIL_" + Path(sys.argv[0]).name, "0")))
"""

CLUSTER = {
    "config": "configs/qwen3_8b_streaming.yaml",
    "run_id": "run-1",
    "output": "gs://bucket/out/",
    "tpu": "v5p-128",
    "slices": "2",
    "project": "my-project",
    "zone": "my-zone",
    "cluster": "my-cluster",
    "image": "registry.example/p/diloco:run-1",
}

TRAIN = [
    "levanter-diloco",
    "train_lm",
    *("--config_path", "configs/qwen3_8b_streaming.yaml"),
    *("--trainer.id", "run-1"),
    *("--trainer.checkpointer.base_path", "gs://bucket/out/checkpoints"),
    *("--data.cache_dir", "gs://bucket/out/cache"),
]


class Launcher:
    """Starts the script with stand-ins on PATH and no variable of this test's own environment that it reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name in ("xpk", "gcloud", "docker", "iris"):
            (programs / name).write_text(STAND_IN)
            (programs / name).chmod(0o755)
        self.environment = {"PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(folder), "HOME": str(folder)}

    def __call__(self, backend: str, *more: str, settings: dict | None = None, **environment: str):
        flags = [word for name, value in (settings or {}).items() for word in (f"--{name}", value)]
        return subprocess.run(
            [sys.executable, str(SCRIPT), backend, *flags, *more],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[dict]:
        record = self.folder / "calls.jsonl"
        return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []

    def last(self) -> list[str]:
        return self.calls()[-1]["argv"]


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


def without(*names: str, **changes: str) -> dict[str, str]:
    return {name: value for name, value in {**CLUSTER, **changes}.items() if name not in names}


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def container_command(argv: list[str]) -> list[str]:
    """What xpk's container runs, as words."""
    command = option(argv, "--command")
    assert command.startswith("cd /app && ")
    return shlex.split(command.removeprefix("cd /app && "))


def test_unknown_slice_type_names_one_that_works():
    with pytest.raises(LaunchError, match=r"--tpu \(v5p-100\) must have a size that v5p has .*; v5p-64 works"):
        slice_of("v5p-100")


def test_xpk_builds_pushes_and_submits(launcher: Launcher):
    done = launcher("xpk", settings={**CLUSTER, "reservation": "mine"})
    assert done.returncode == 0, done.stderr
    build, push, submit = (call["argv"] for call in launcher.calls())
    assert build == ["docker", "build", "-t", CLUSTER["image"], "-f", "Dockerfile.launch", "-"]
    assert push == ["docker", "push", CLUSTER["image"]]
    assert submit[:3] == ["xpk", "workload", "create"]
    expected = {"workload": "run-1", "cluster": "my-cluster", "project": "my-project", "zone": "my-zone"}
    expected |= {"tpu-type": "v5p-128", "num-slices": "2", "docker-image": CLUSTER["image"], "reservation": "mine"}
    assert {name: option(submit, f"--{name}") for name in expected} == expected
    assert container_command(submit) == TRAIN


def test_image_is_the_working_tree_without_what_git_ignores(launcher: Launcher):
    assert launcher("xpk", settings=CLUSTER).returncode == 0
    with tarfile.open(launcher.folder / "context.tar") as context:
        names = context.getnames()
        file = context.extractfile("Dockerfile.launch")
        assert file is not None
        dockerfile = file.read().decode()
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", CLUSTER["config"]} <= set(names)
    assert {"levanter_diloco/__init__.py", "scripts/launch_tpu.py"} <= set(names)
    assert not [name for name in names if name.startswith((".venv", ".quickstart", ".git/")) or "__pycache__" in name]
    assert dockerfile.startswith("FROM python:3.12-slim\n")


def test_failed_build_submits_nothing(launcher: Launcher):
    done = launcher("xpk", settings=CLUSTER, FAIL_docker="3")
    assert done.returncode == 2
    assert "docker build failed with exit status 3" in done.stderr
    assert [call["argv"][:2] for call in launcher.calls()] == [["docker", "build"]]


def test_gcloud_queues_all_slices_and_starts_training_on_each_boot(launcher: Launcher):
    done = launcher("gcloud", settings=without("cluster"))
    assert done.returncode == 0, done.stderr
    *_, create = launcher.calls()
    argv = create["argv"]
    assert argv[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "run-1"]
    assert {"--node-count=2", "--node-prefix=run-1", "--accelerator-type=v5p-128", "--zone=my-zone"} <= set(argv)
    assert {"--project=my-project", "--runtime-version=v2-alpha-tpuv5"} <= set(argv)
    script, mode = create["files"]["startup.sh"]
    assert argv[-1].startswith("--metadata-from-file=startup-script=") and mode == "0o700"
    assert f"docker pull {CLUSTER['image']}" in script
    assert script.splitlines()[-1].endswith(f"{CLUSTER['image']} {shlex.join(TRAIN)}")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_gcloud_asks_for_a_runtime_version_that_is_not_known(launcher: Launcher):
    done = launcher("gcloud", settings={**without("cluster"), "tpu": "tpu7x-8"})
    assert done.returncode == 2
    assert "--runtime_version is missing, which tpu7x-8 needs" in done.stderr
    assert launcher.calls() == []


@pytest.mark.parametrize(("tpu", "hosts"), [("v4-8", 1), ("v5p-128", 16), ("v5litepod-8", 1), ("v6e-16", 4)])
def test_iris_gets_a_task_for_each_host_of_all_slices(launcher: Launcher, tpu: str, hosts: int):
    done = launcher("iris", settings=without("project", "zone", "image", tpu=tpu))
    assert done.returncode == 0, done.stderr
    argv = launcher.last()
    assert argv[:5] == ["iris", "--cluster", "my-cluster", "job", "run"]
    assert (option(argv, "--tpu"), option(argv, "--replicas")) == (tpu, str(2 * hosts))
    assert argv[argv.index("--") + 1 :] == TRAIN


@pytest.mark.parametrize("backend", ["xpk", "gcloud", "iris", "local"])
def test_missing_settings_are_all_named_with_their_variables(launcher: Launcher, backend: str):
    done = launcher(backend)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    named = {"xpk": 9, "gcloud": 8, "iris": 6, "local": 3}[backend]
    assert done.stderr.count("; --") == named - 1
    assert "--config or CONFIG (the YAML" in done.stderr and "--run_id or RUNNAME (trainer.id" in done.stderr
    assert launcher.calls() == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"slices": "two"}, r"--slices (two) must be a whole number of at least 1; 2 works"),
        ({"tpu": "v5p-130"}, r"--tpu (v5p-130) must have a size that v5p has"),
        ({"output": "/tmp/out"}, r"--output (/tmp/out) must be an object store that all hosts see"),
        ({"run_id": "Run_1"}, r"--run_id (Run_1) must be at most 39 of a-z"),
        ({"workload": "x" * 40}, r"must be at most 39 of a-z"),
        ({"config": "configs/absent.yaml"}, r"--config (configs/absent.yaml) is no file"),
        ({"config": "/etc/hosts"}, r"--config (/etc/hosts) must be a path in the working tree"),
    ],
)
def test_bad_setting_is_refused_before_anything_runs(launcher: Launcher, changes: dict, complaint: str):
    done = launcher("xpk", settings={**CLUSTER, **changes})
    assert done.returncode == 2
    assert complaint in done.stderr
    assert launcher.calls() == []


def test_tutorials_variables_become_options(launcher: Launcher):
    tutorial = {
        **{"XPK_CLUSTER": "my-cluster", "ZONE": "my-zone", "PROJECT": "my-project", "DEVICE_TYPE": "v5p-128"},
        **{
            "NUM_SLICES": "2",
            "RUNNAME": "run-1",
            "XPK_WORKLOAD": "again-2",
            "BASE_OUTPUT_DIRECTORY": "gs://bucket/out",
        },
        **{"STEPS": "1000", "PER_DEVICE_BATCH_SIZE": "8", "MAX_TARGET_LENGTH": "2048"},
        **{"DILOCO_SYNC_PERIOD": "37", "DILOCO_NUM_FRAGMENTS": "37", "DILOCO_NUM_COMM_OVERLAP_STEPS": "0"},
        **{"DILOCO_COMM_OVERLAP_ALPHA": "0.5", "DILOCO_USE_SEQUENTIAL_LAYERS": "true"},
        **{"DILOCO_OUTER_LR": "0.7", "DILOCO_OUTER_MOMENTUM": "0.9", "LOAD_FULL_STATE_PATH": "gs://bucket/base"},
    }
    done = launcher("xpk", "--config", CLUSTER["config"], "--image", CLUSTER["image"], **tutorial)
    assert done.returncode == 0, done.stderr
    argv = launcher.last()
    assert option(argv, "--workload") == "again-2"
    command = container_command(argv)
    assert command[: len(TRAIN)] == TRAIN
    assert dict(zip(command[len(TRAIN) :: 2], command[len(TRAIN) + 1 :: 2], strict=True)) == {
        "--trainer.diloco.sync_period": "37",
        "--trainer.diloco.num_fragments": "37",
        "--trainer.diloco.overlap_steps": "0",
        "--trainer.diloco.mixing_alpha": "0.5",
        "--trainer.diloco.layer_order": "sequential",
        "--trainer.diloco.outer.learning_rate": "0.7",
        "--trainer.diloco.outer.momentum": "0.9",
        "--trainer.num_train_steps": "1000",
        "--trainer.train_batch_size": "1024",  # 8 x 64 devices x 2 slices
        "--train_seq_len": "2048",
        "--initialize_from_checkpoint_path": "gs://bucket/base",
    }


def test_streaming_turned_off_is_one_fragment(launcher: Launcher):
    assert launcher("xpk", settings=CLUSTER, ENABLE_STREAMING_DILOCO="false").returncode == 0
    assert container_command(launcher.last())[len(TRAIN) :] == ["--trainer.diloco.num_fragments", "1"]
    both = launcher("xpk", settings=CLUSTER, ENABLE_STREAMING_DILOCO="false", DILOCO_NUM_FRAGMENTS="37")
    assert "ENABLE_STREAMING_DILOCO=false contradicts DILOCO_NUM_FRAGMENTS" in both.stderr
    odd = launcher("xpk", settings=CLUSTER, DILOCO_USE_SEQUENTIAL_LAYERS="yes")
    assert "DILOCO_USE_SEQUENTIAL_LAYERS (yes) must be true or false" in odd.stderr


def test_options_of_the_table_parse(launcher: Launcher):
    from levanter_diloco.main.train_lm import TrainDiLoCoLmConfig
    from levanter_diloco.options.reading import read

    values = dict.fromkeys(OPTIONS, "4") | {"DILOCO_USE_SEQUENTIAL_LAYERS": "true", "DILOCO_COMM_OVERLAP_ALPHA": "0.5"}
    values |= {"DILOCO_OUTER_MOMENTUM": "0.5", "DILOCO_NUM_COMM_OVERLAP_STEPS": "2"}
    flags = [word for name, (path, write) in OPTIONS.items() for word in (f"--{path}", write(values[name]))]
    config = read(TrainDiLoCoLmConfig, ["--config_path", str(ROOT / CLUSTER["config"]), *flags])
    assert (config.trainer.diloco.sync_period, config.trainer.diloco.layer_order) == (4, "sequential")
    assert (config.trainer.diloco.outer.momentum, config.trainer.num_train_steps) == (0.5, 4)


def test_flags_after_the_dashes_come_last(launcher: Launcher):
    more = ["--trainer.diloco.outer.learning_rate", "0.5", "--trainer.tracker.tags", "[a b]"]
    assert launcher("xpk", "--", *more, settings=CLUSTER, STEPS="10").returncode == 0
    assert container_command(launcher.last())[-6:] == ["--trainer.num_train_steps", "10", *more]


@pytest.mark.parametrize("backend", ["xpk", "gcloud", "iris"])
def test_secret_stands_in_no_command_line(launcher: Launcher, backend: str):
    done = launcher(backend, "--secret", "WANDB_API_KEY", settings=CLUSTER, WANDB_API_KEY="hush-hush")
    assert done.returncode == 0, done.stderr
    assert "hush-hush" not in done.stdout + done.stderr
    assert not any("hush-hush" in word for call in launcher.calls() for word in call["argv"])
    last = launcher.calls()[-1]
    if backend == "xpk":
        assert last["files"]["secrets.env"] == ["WANDB_API_KEY=hush-hush\n", "0o700"]
        assert not Path(option(last["argv"], "--env-file")).exists()
    elif backend == "gcloud":
        script, _ = last["files"]["startup.sh"]
        assert "hush-hush" not in script
        assert 'WANDB_API_KEY="$(gcloud secrets versions access latest --secret=WANDB_API_KEY)"' in script
        assert " --env WANDB_API_KEY " in script
    else:
        argv = last["argv"]
        assert argv[argv.index("--secret") : argv.index("--")] == ["--secret", "WANDB_API_KEY", "env:WANDB_API_KEY"]


def test_secret_in_the_command_line_or_missing_is_refused(launcher: Launcher):
    leak = ["--", "--trainer.tracker.id", "hush-hush"]
    done = launcher("xpk", *leak, settings=CLUSTER, WANDB_API_KEY="hush-hush")
    assert done.returncode == 2
    assert "the value of WANDB_API_KEY stands in the command line" in done.stderr
    assert "hush-hush" not in done.stderr
    unset = launcher("xpk", "--secret", "HF_TOKEN", settings=CLUSTER)
    assert "--secret HF_TOKEN is not set in this environment" in unset.stderr
    assert launcher.calls() == []


@pytest.mark.parametrize("backend", ["xpk", "gcloud", "iris"])
def test_dry_run_prints_what_would_run_and_runs_nothing(launcher: Launcher, backend: str):
    secret = {"WANDB_API_KEY": "hush-hush"}
    done = launcher(backend, "--secret", "WANDB_API_KEY", "--dry-run", settings=CLUSTER, **secret)
    assert done.returncode == 0, done.stderr
    assert launcher.calls() == [] and "hush-hush" not in done.stdout
    printed = [shlex.split(line, comments=True) for line in done.stdout.splitlines()]
    assert launcher(backend, "--secret", "WANDB_API_KEY", settings=CLUSTER, **secret).returncode == 0
    ran = [call["argv"] for call in launcher.calls()]
    assert [words[:-1] for words in printed if words] == [argv[:-1] for argv in ran]  # the last may be a file's name


def test_missing_program_is_named(launcher: Launcher):
    (launcher.folder / "bin" / "xpk").unlink()
    done = launcher("xpk", settings=CLUSTER)
    assert "xpk is not installed or not on PATH" in done.stderr


LOCAL = {"config": str(ROOT / "configs" / "quickstart.yaml"), "run_id": "run-1", "processes": "2", "devices": "2"}


def test_local_dry_run_prints_a_process_for_each_island(launcher: Launcher):
    done = launcher("local", "--dry-run", settings=LOCAL)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "train_lm" in line]
    assert len(lines) == 2 and done.stdout.endswith("wait\n")
    addresses = {option(shlex.split(line), "--trainer.distributed.coordinator_address") for line in lines}
    assert len(addresses) == 1
    for process, line in enumerate(lines):
        words = shlex.split(line)
        assert words[0] == "JAX_PLATFORMS=cpu" and words[1] == "JAX_NUM_CPU_DEVICES=2"
        assert option(words, "--trainer.distributed.process_id") == str(process)
        assert option(words, "--trainer.distributed.num_processes") == "2"
        assert option(words, "--trainer.diloco.ici_islands") == "2"
        assert option(words, "--trainer.id") == "run-1"
