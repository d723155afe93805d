#!/usr/bin/env python3
"""Runs `levanter-diloco train_lm` on TPU slices, or on islands of this machine.

    scripts/launch_tpu.py xpk --config configs/qwen3_8b_streaming.yaml --run_id my-run --output gs://BUCKET/diloco \\
        --cluster CLUSTER --project PROJECT --zone ZONE --tpu v5p-128 --slices 2 --image REGISTRY/NAME:TAG --dry-run

Options after `--` go to train_lm. Each option may also come from an environment variable, named in [] below, as do the
settings of MaxText's DiLoCo tutorial (DILOCO_SYNC_PERIOD and so on, OPTIONS in this file). What is not set is the
YAML's.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# The package need not be installed: these need nothing but Python.
from levanter_diloco.commands.compile.slices import Slice, canonical  # noqa: E402
from levanter_diloco.errors import SliceError  # noqa: E402
from levanter_diloco.network.namespaces import address, obstacle, run_apart, run_together  # noqa: E402

OPTIONS: dict[str, tuple[str, Callable[[str], str]]] = {
    "DILOCO_SYNC_PERIOD": ("trainer.diloco.sync_period", str),
    "DILOCO_NUM_FRAGMENTS": ("trainer.diloco.num_fragments", str),
    "DILOCO_NUM_COMM_OVERLAP_STEPS": ("trainer.diloco.overlap_steps", str),
    "DILOCO_COMM_OVERLAP_ALPHA": ("trainer.diloco.mixing_alpha", str),
    "DILOCO_USE_SEQUENTIAL_LAYERS": (
        "trainer.diloco.layer_order",
        lambda value: "sequential" if truth("DILOCO_USE_SEQUENTIAL_LAYERS", value) else "interleaved",
    ),
    "DILOCO_OUTER_LR": ("trainer.diloco.outer.learning_rate", str),
    "DILOCO_OUTER_MOMENTUM": ("trainer.diloco.outer.momentum", str),
    "STEPS": ("trainer.num_train_steps", str),
    "MAX_TARGET_LENGTH": ("train_seq_len", str),
    "LEARNING_RATE": ("optimizer.learning_rate", str),
    "LOAD_FULL_STATE_PATH": ("initialize_from_checkpoint_path", str),
    "LOAD_PARAMETERS_PATH": ("initialize_model_from_checkpoint_path", str),
}
"""The tutorial's variables, the option each one sets, and how its value is written there. Two more need thought:
PER_DEVICE_BATCH_SIZE (times all devices it is `trainer.train_batch_size`) and ENABLE_STREAMING_DILOCO (false is
`num_fragments` 1)."""

SETTINGS: dict[str, tuple[tuple[str, ...], str]] = {
    "config": (("CONFIG",), "the YAML; for a cluster, a file of this working tree"),
    "run_id": (("RUNNAME", "RUN_NAME"), "trainer.id: the same id resumes the run"),
    "output": (
        ("BASE_OUTPUT_DIRECTORY",),
        "object store for checkpoints and the token cache, e.g. gs://BUCKET/diloco",
    ),
    "tpu": (("DEVICE_TYPE", "XPK_DEVICE_TYPE"), "type of a slice, e.g. v5p-128"),
    "slices": (("NUM_SLICES", "XPK_NUM_SLICES"), "how many slices"),
    "project": (("PROJECT", "XPK_PROJECT"), "Google Cloud project"),
    "zone": (("ZONE", "XPK_ZONE"), "Google Cloud zone"),
    "cluster": (("CLUSTER", "XPK_CLUSTER"), "GKE cluster of xpk, or the cluster's name in iris"),
    "image": (("IMAGE",), "name under which the image of this working tree is pushed, REGISTRY/NAME:TAG"),
    "base_image": (("DOCKER_IMAGE_BASE",), "image to build on; python:3.12-slim if unset"),
    "workload": (("XPK_WORKLOAD", "WORKLOAD_NAME"), "name of the job, new for each restart; the run id if unset"),
    "reservation": (("RESERVATION",), "reservation to use (xpk: its name; gcloud: anything uses the project's)"),
    "priority": (("PRIORITY",), "priority of the job (xpk, iris)"),
    "restarts": (("MAX_RESTARTS",), "restarts of a failed job (xpk, iris); 10 if unset"),
    "runtime_version": (("RUNTIME_VERSION",), "software of the TPU hosts (gcloud); from the type if unset"),
    "processes": (("NUM_PROCESSES",), "processes, an island each (local)"),
    "devices": (("DEVICES_PER_PROCESS",), "CPU devices of a process (local); 1 if unset"),
}

REQUIRED = {
    "xpk": ("config", "run_id", "output", "tpu", "slices", "project", "zone", "cluster", "image"),
    "gcloud": ("config", "run_id", "output", "tpu", "slices", "project", "zone", "image"),
    "iris": ("config", "run_id", "output", "tpu", "slices", "cluster"),
    "local": ("config", "run_id", "processes"),
}

KNOWN_SECRETS = ("WANDB_API_KEY", "HF_TOKEN")

RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5p": "v2-alpha-tpuv5",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v6e": "v2-alpha-tpuv6e",
}

DOCKERFILE = """\
FROM {base}
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY levanter_diloco/__init__.py levanter_diloco/
RUN pip install --no-cache-dir -c constraints.txt ".[tpu]"
COPY . .
RUN pip install --no-cache-dir --no-deps --force-reinstall .
"""

STARTUP = """\
#!/bin/bash
# Runs at each start of a host, so that a preempted run goes on by its run id.
set -euo pipefail
export HOME=/root
gcloud auth configure-docker {registry} --quiet
docker pull {image}
{secrets}docker run --rm --privileged --net=host{names} {image} {command}
"""


class LaunchError(Exception):
    """One sentence: what is missing or wrong, and what works."""


def main(argv: list[str] | None = None) -> int:
    try:
        return launch(sys.argv[1:] if argv is None else argv, os.environ)
    except LaunchError as error:
        print(f"launch_tpu: {error}", file=sys.stderr)
        return 2


def launch(argv: list[str], environment: Mapping[str, str]) -> int:
    own, _, more = (argv[: argv.index("--")], "--", argv[argv.index("--") + 1 :]) if "--" in argv else (argv, "", [])
    args = vars(parser().parse_args(own))
    backend, dry_run, secrets = args.pop("backend"), args.pop("dry_run"), args.pop("secret") or []
    settings = {name: args[name] or from_environment(name, environment) for name in SETTINGS}
    if missing := [name for name in REQUIRED[backend] if not settings[name]]:
        described = "; ".join(f"--{name} or {SETTINGS[name][0][0]} ({SETTINGS[name][1]})" for name in missing)
        raise LaunchError(f"{backend} also needs {described}")
    check(backend, settings)
    for name in (*secrets, *KNOWN_SECRETS):
        if environment.get(name) and any(environment[name] in word for word in argv):
            rule = f"stands in the command line, where others can read it; --secret {name} works"
            raise LaunchError(f"the value of {name} {rule}")
    flags = [*run_flags(settings), *option_flags(settings, environment), *more]
    return BACKENDS[backend](Runner(dry_run), settings, flags, secrets)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("backend", choices=REQUIRED)
    for name, (variables, meaning) in SETTINGS.items():
        result.add_argument(f"--{name}", help=f"{meaning} [{', '.join(variables)}]")
    result.add_argument(
        "--secret",
        action="append",
        metavar="NAME",
        help="environment variable that the run needs and nobody may read, e.g. WANDB_API_KEY; repeatable. Its value "
        "comes from this environment; with gcloud, from the Secret Manager's secret of that name",
    )
    result.add_argument("--dry-run", action="store_true", help="print what would run, and run nothing")
    return result


def from_environment(name: str, environment: Mapping[str, str]) -> str | None:
    return next((environment[variable] for variable in SETTINGS[name][0] if environment.get(variable)), None)


def check(backend: str, settings: dict[str, str | None]) -> None:
    """Refuses settings that the back end would only refuse later, or that would lose the run."""
    for name in ("slices", "processes", "devices", "restarts"):
        if settings[name] and not re.fullmatch("[1-9][0-9]*", str(settings[name])):
            raise LaunchError(f"--{name} ({settings[name]}) must be a whole number of at least 1; 2 works")
    config = Path(str(settings["config"]))
    if not (config if backend == "local" else ROOT / config).is_file():
        raise LaunchError(f"--config ({config}) is no file" + ("" if backend == "local" else f" in {ROOT}"))
    if backend == "local":
        return
    if config.is_absolute() or ".." in config.parts:
        raise LaunchError(f"--config ({config}) must be a path in the working tree; configs/{config.name} works")
    slice_of(str(settings["tpu"]))
    if "://" not in str(settings["output"]):
        rule = "must be an object store that all hosts see; gs://BUCKET/DIR works"
        raise LaunchError(f"--output ({settings['output']}) {rule}")
    name = settings["workload"] or str(settings["run_id"])
    if not re.fullmatch("[a-z]([-a-z0-9]{0,37}[a-z0-9])?", name):
        rule = "must be at most 39 of a-z, 0-9 and -, and start with a letter; diloco-1 works"
        raise LaunchError(f"--{'workload' if settings['workload'] else 'run_id'} ({name}) {rule}")


def slice_of(tpu: str) -> Slice:
    """The slice of this type's name.

    Raises:
        LaunchError: If there is no such type.
    """
    try:
        return Slice.of(tpu)
    except SliceError as error:
        raise LaunchError(f"--tpu ({tpu}) {error}") from error


def truth(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise LaunchError(f"{name} ({value}) must be true or false; false works")
    return value.lower() == "true"


def run_flags(settings: dict[str, str | None]) -> list[str]:
    """What every run gets: its YAML, its id, and where its files lie."""
    flags = ["--config_path", str(settings["config"]), "--trainer.id", str(settings["run_id"])]
    if settings["output"]:
        output = settings["output"].rstrip("/")
        flags += ["--trainer.checkpointer.base_path", f"{output}/checkpoints", "--data.cache_dir", f"{output}/cache"]
    return flags


def option_flags(settings: dict[str, str | None], environment: Mapping[str, str]) -> list[str]:
    """Flags for the tutorial's variables that are set; nothing for the others, so that the YAML's values hold."""
    flags: list[str] = []
    for variable, (option, write) in OPTIONS.items():
        if environment.get(variable):
            flags += [f"--{option}", write(environment[variable])]
    if not truth("ENABLE_STREAMING_DILOCO", environment.get("ENABLE_STREAMING_DILOCO") or "true"):
        if environment.get("DILOCO_NUM_FRAGMENTS", "1") != "1":
            raise LaunchError("ENABLE_STREAMING_DILOCO=false contradicts DILOCO_NUM_FRAGMENTS; leave one of them out")
        flags += ["--trainer.diloco.num_fragments", "1"]
    if per_device := environment.get("PER_DEVICE_BATCH_SIZE"):
        if not (settings["tpu"] and settings["slices"] and per_device.isdigit()):
            raise LaunchError(f"PER_DEVICE_BATCH_SIZE ({per_device}) needs a whole number, --tpu and --slices")
        batch = int(per_device) * slice_of(settings["tpu"]).devices * int(settings["slices"])
        flags += ["--trainer.train_batch_size", str(batch)]
    return flags


class Runner:
    """Runs programs, or prints what would run."""

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run

    def run(self, command: list[str], stdin: bytes | None = None, note: str = "") -> None:
        if self.dry_run:
            print(shlex.join(command) + (f"  # {note}" if note else ""))
            return
        if shutil.which(command[0]) is None:
            raise LaunchError(f"{command[0]} is not installed or not on PATH")
        print(f"+ {shlex.join(command)}", file=sys.stderr)
        code = subprocess.run(command, input=stdin, cwd=ROOT).returncode
        if code != 0:
            raise LaunchError(f"{command[0]} {command[1]} failed with exit status {code}")

    @contextlib.contextmanager
    def file(self, name: str, text: str) -> Generator[str]:
        """A file with `text` that only this user can read, for as long as the context lasts."""
        if self.dry_run:
            yield f"<{name}>"
            return
        with tempfile.TemporaryDirectory() as folder:  # mode 700
            path = Path(folder, name)
            path.write_text(text)
            yield str(path)


def train_command(flags: list[str]) -> list[str]:
    return ["levanter-diloco", "train_lm", *flags]


def build_image(runner: Runner, settings: dict[str, str | None]) -> None:
    """Builds and pushes the image of the working tree as git sees it: what git ignores, secrets too, stays out."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        raise LaunchError(f"the image is built from a git working tree, and git says: {listed.stderr.strip()}")
    paths = [path for name in sorted(set(listed.stdout.split("\0"))) if (path := ROOT / name).is_file()]
    dockerfile = DOCKERFILE.format(base=settings["base_image"] or "python:3.12-slim").encode()
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for path in paths:
            archive.add(path, str(path.relative_to(ROOT)))
        entry = tarfile.TarInfo("Dockerfile.launch")
        entry.size = len(dockerfile)
        archive.addfile(entry, io.BytesIO(dockerfile))
    image = str(settings["image"])
    note = f"stdin: {len(paths)} files of the working tree, and this Dockerfile.launch:"
    runner.run(["docker", "build", "-t", image, "-f", "Dockerfile.launch", "-"], context.getvalue(), note)
    if runner.dry_run:
        print_file("Dockerfile.launch", dockerfile.decode())
    runner.run(["docker", "push", image])


def print_file(name: str, text: str) -> None:
    print("".join(f"#   {name}: {line}\n" for line in text.splitlines()), end="")


def secret_values(names: list[str]) -> dict[str, str]:
    if missing := [name for name in names if not os.environ.get(name)]:
        raise LaunchError(f"--secret {missing[0]} is not set in this environment; export it, or leave the flag out")
    return {name: os.environ[name] for name in names}


def xpk(runner: Runner, settings: dict[str, str | None], flags: list[str], secrets: list[str]) -> int:
    """GKE: one workload over all slices. Secrets travel in a file that xpk reads into the containers' environment."""
    values = secret_values(secrets)
    build_image(runner, settings)
    command = ["xpk", "workload", "create", "--workload", str(settings["workload"] or settings["run_id"])]
    for name in ("cluster", "project", "zone", "priority", "reservation"):
        if settings[name]:
            command += [f"--{name}", str(settings[name])]
    command += ["--tpu-type", canonical(str(settings["tpu"])), "--num-slices", str(settings["slices"])]
    command += ["--max-restarts", settings["restarts"] or "10", "--docker-image", str(settings["image"])]
    command += ["--command", f"cd /app && {shlex.join(train_command(flags))}"]
    if not values:
        runner.run(command)
        return 0
    with runner.file("secrets.env", "".join(f"{name}={value}\n" for name, value in values.items())) as path:
        runner.run([*command, "--env-file", path], note=f"<secrets.env> holds {', '.join(values)}")
    return 0


def gcloud(runner: Runner, settings: dict[str, str | None], flags: list[str], secrets: list[str]) -> int:
    """Queued resources: all slices at once. The hosts read secrets themselves, from the Secret Manager."""
    image, tpu = str(settings["image"]), canonical(str(settings["tpu"]))
    runtime = settings["runtime_version"] or RUNTIMES.get(tpu.rpartition("-")[0])
    if runtime is None:
        rule = "give the one that `gcloud compute tpus versions list` has for it"
        raise LaunchError(f"--runtime_version is missing, which {tpu} needs; {rule}")
    build_image(runner, settings)
    fetch = "".join(
        f'{name}="$(gcloud secrets versions access latest --secret={shlex.quote(name)})"\nexport {name}\n'
        for name in secrets
    )
    script = STARTUP.format(
        registry=image.partition("/")[0],
        image=image,
        secrets=fetch,
        names="".join(f" --env {name}" for name in secrets),  # without a value: docker takes it from the environment
        command=shlex.join(train_command(flags)),
    )
    name = str(settings["workload"] or settings["run_id"])
    with runner.file("startup.sh", script) as path:
        command = ["gcloud", "compute", "tpus", "queued-resources", "create", name]
        command += [f"--project={settings['project']}", f"--zone={settings['zone']}", f"--accelerator-type={tpu}"]
        command += [f"--runtime-version={runtime}"]
        command += [f"--node-count={settings['slices']}", f"--node-prefix={name}"]
        command += ["--reserved"] if settings["reservation"] else []
        command += ["--scopes=https://www.googleapis.com/auth/cloud-platform"]
        runner.run([*command, f"--metadata-from-file=startup-script={path}"], note="<startup.sh>:")
    if runner.dry_run:
        print_file("startup.sh", script)
    return 0


def iris(runner: Runner, settings: dict[str, str | None], flags: list[str], secrets: list[str]) -> int:
    """The host's job system, which takes the working tree itself; a task per host, and the host finds the slices."""
    secret_values(secrets)  # iris reads them from this environment
    tpu, slices = canonical(str(settings["tpu"])), int(str(settings["slices"]))
    command = ["iris", "--cluster", str(settings["cluster"]), "job", "run", "--no-wait"]
    command += ["--job-name", str(settings["workload"] or settings["run_id"]), "--extra", "tpu"]
    command += ["--tpu", tpu, "--enable-extra-resources", "--cpu", "32", "--memory", "128GB", "--disk", "50GB"]
    command += ["--replicas", str(slice_of(tpu).hosts * slices), "--max-retries", settings["restarts"] or "10"]
    command += ["--priority", settings["priority"]] if settings["priority"] else []
    for name in secrets:
        command += ["--secret", name, f"env:{name}"]
    runner.run([*command, "--", *train_command(flags)])
    return 0


def local(runner: Runner, settings: dict[str, str | None], flags: list[str], secrets: list[str]) -> int:
    """K processes on the CPUs of this machine, an island each; as root each has a network of its own."""
    secret_values(secrets)  # the processes inherit them
    count, devices = int(str(settings["processes"])), settings["devices"] or "1"
    apart = obstacle() is None
    coordinator = f"{address(0)}:5077" if apart else f"127.0.0.1:{free_port()}"
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": devices,
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    cluster = ["--trainer.distributed.initialize_jax_distributed", "true", "--trainer.require_accelerator", "false"]
    cluster += ["--trainer.distributed.coordinator_address", coordinator]
    cluster += ["--trainer.distributed.num_processes", str(count)]
    islands = ["--trainer.diloco.dcn_islands", "1", "--trainer.diloco.ici_islands", str(count)]  # CPUs have one slice
    made_by_setup = ROOT / ".venv" / "bin" / "python"
    python = str(made_by_setup) if made_by_setup.is_file() else sys.executable
    commands = []
    for process in range(count):
        train = [python, "-m", "levanter_diloco.main.train_lm", *islands_first(islands, flags)]
        commands.append([*train, *cluster, "--trainer.distributed.process_id", str(process)])
    if runner.dry_run:
        if apart:
            print(f"# {count} network namespaces on a bridge, {address(0)} .. {address(count - 1)}")
        written = " ".join(f"{name}={value}" for name, value in environment.items())
        print("".join(f"{written} {shlex.join(command)} &\n" for command in commands) + "wait")
        return 0
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the processes are ended
    return (run_apart if apart else run_together)(commands, {**os.environ, **environment})


def islands_first(islands: list[str], flags: list[str]) -> list[str]:
    """The island flags, but for those that the user gives, then the user's own."""
    given = {flag.partition("=")[0] for flag in flags}
    pairs = zip(islands[::2], islands[1::2], strict=True)
    return [*(word for pair in pairs if pair[0] not in given for word in pair), *flags]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


BACKENDS = {"xpk": xpk, "gcloud": gcloud, "iris": iris, "local": local}

if __name__ == "__main__":
    sys.exit(main())
