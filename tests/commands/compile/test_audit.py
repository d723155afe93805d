"""What step programs take of a TPU and send between slices, as the TPU's own compiler has them; no TPU is needed."""

import importlib.util
from collections.abc import Iterator

import jax
import pytest

from helpers.aot_config import VOCAB_SIZE, config
from levanter_diloco.commands.compile.aot import abstract_run, tpu_devices
from levanter_diloco.commands.compile.audit import Audit
from levanter_diloco.commands.compile.slices import Slice

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra aot"),
]

TPU = Slice.of("v5p-8")


CASES = {
    "V0": {},
    "V1": {"overlap_steps": 1},
    "V2": {"overlap_steps": 2},
    **{wire: {"overlap_steps": 1, "wire": wire} for wire in ("bf16", "int8", "int4", "e3m0")},
    "balanced": {"overlap_steps": 1, "partition": "balanced"},
    "experts": {"overlap_steps": 1},
}
MODELS = {"experts": {"type": "qwen3_moe", "moe_intermediate_dim": 128, "num_experts": 8, "num_experts_per_tok": 2}}


AUDITS: dict[str, Audit] = {}
"""By the program's text: what no wire format touches is the same for all of them, and compiles for 20 s."""


def audit_of(lowered: jax.stages.Lowered) -> Audit:
    text = lowered.as_text()
    if text not in AUDITS:
        AUDITS[text] = Audit.of(lowered.compile(), TPU.devices)
    return AUDITS[text]


@pytest.fixture(scope="module", params=CASES)
def audits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """V, the audits of the step programs by name, and the traffic by count of parameters."""
    block = CASES[request.param]
    options = config(tmp_path_factory.mktemp("compiled"), block, **MODELS.get(request.param, {}))
    with abstract_run(tpu_devices(TPU, 2), options, 4 * VOCAB_SIZE) as run:
        found = {
            program.name: audit_of(program.trace().lower())
            for program in run.programs
            if program.name.startswith("inner")
        }
    yield block.get("overlap_steps", 0), found, run.traffic


def test_inner_step_sends_nothing_between_slices(audits: tuple) -> None:
    _, found, _ = audits
    assert found["inner"].exchanges == ()


def test_reduce_sends_its_fragment_and_no_more(audits: tuple) -> None:
    _, found, traffic = audits
    for fragment, part in enumerate(("rest", "layers") if "inner + reduce rows" not in found else ("rows",)):
        sent = sum(audit.sent_bytes for name, audit in found.items() if name.endswith(part))
        assert sent == pytest.approx(traffic.of_sync(fragment), rel=0.01)


def test_overlap_spans_forward_and_backward(audits: tuple) -> None:
    overlap, found, _ = audits
    for name, audit in found.items():
        exchanges = audit.exchanges
        assert bool(exchanges) == (name != "inner")
        assert all(one.overlapped is bool(overlap) for one in exchanges)
        if overlap:
            assert min((one.flops_meanwhile for one in exchanges), default=1) > 0.95


def test_step_updates_its_state_in_place(audits: tuple) -> None:
    _, found, _ = audits
    for audit in found.values():
        assert 0 < audit.memory.outputs < 1e5 < audit.memory.arguments
        assert audit.memory.total < TPU.generation.hbm_gib * 2**30
