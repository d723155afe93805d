"""Every name of the host that is private, replaced, or used in an unusual way, as this package uses it.

A new host release that changes one of them fails here, once for each name.
"""

import dataclasses
import dis
import importlib
import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import pytest
from levanter.callbacks import StepInfo
from levanter.trainer import Trainer, TrainerConfig


def named(path: str) -> Any:
    """The object at `module:attribute.attribute`."""
    module, _, attributes = path.partition(":")
    found = importlib.import_module(module)
    for name in attributes.split("."):
        assert hasattr(found, name), f"{path} is gone: {found!r} has no {name!r}"
        found = inspect.getattr_static(found, name)
    return found


def function(path: str) -> Callable:
    found = named(path)
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        # replaced by DiLoCoTrainer or called on it
        ("levanter.trainer:Trainer.__init__", "self config optimizer loss_fn add_default_hooks"),
        ("levanter.trainer:Trainer._train_step", "self state batch batch_kwargs _no_hooks"),
        ("levanter.trainer:Trainer._maybe_save_jaxpr", "self name fn args kwargs"),
        ("levanter.trainer:Trainer.initial_state", "self training_key model model_init is_trainable"),
        ("levanter.trainer:Trainer.train", "self state train_loader"),
        ("levanter.trainer:Trainer.run_hooks", "self info force"),
        ("levanter.trainer:Trainer.training_steps", "self state train_loader"),
        ("levanter.trainer:Trainer.train_step", "self state batch batch_kwargs"),
        ("levanter.trainer:Trainer.checkpoint_load_plan", "self"),
        ("levanter.trainer:Trainer.write_artifact", "self name artifact type"),
        ("levanter.trainer:_unify_model_and_model_init", "model model_init"),
        # replaced by DiLoCoTrainerConfig or called on it
        ("levanter.trainer:TrainerConfig._validate_and_set_defaults", "self"),
        ("levanter.trainer:TrainerConfig.initialize", "self"),
        ("levanter.utils.mesh:MeshConfig.axis_shapes", "self num_devices num_slices"),
        (
            "levanter.utils.mesh:create_mesh_from_axis_specs",
            "ici_axes dcn_axes devices allow_split_physical_axes axis_types",
        ),
        ("levanter.schedule:distinct_values", "schedule"),
        # state and checkpoints
        (
            "levanter.trainer_state:TrainerState.init",
            "cls optimizer model args key is_trainable mp quantization model_averaging kwargs",
        ),
        ("levanter.trainer_state:trainables_only", "model filter"),
        ("levanter.trainer_state:make_floating_point_trainable_filter", "is_trainable"),
        ("levanter.utils.jax_utils:move_tree_to_memory_kind", "tree memory_kind"),
        ("levanter.utils.tree_utils:inference_mode", "tree value none_policy"),
        ("levanter.trainer_state:saveable_training_mask", "trainer_state is_trainable_param"),
        ("levanter.checkpoint:Checkpointer.on_step", "self tree step force"),
        ("levanter.checkpoint:Checkpointer._get_current_step_save_interval", "self step"),
        (
            "levanter.checkpoint:Checkpointer.save_checkpoint",
            "self tree step destination commit_callback is_temporary base_path_override",
        ),
        ("levanter.checkpoint:latest_checkpoint_path", "checkpoint_path additional_paths exclude_paths max_step"),
        (
            "levanter.checkpoint:discover_checkpoint_candidates",
            "checkpoint_path additional_paths exclude_paths max_step fs",
        ),
        ("levanter.checkpoint:_discover_checkpoint_paths_single", "checkpoint_path fs"),
        ("levanter.tensorstore_serialization:_create_ocdbt_spec", "checkpoint_root array_path entry"),
        ("levanter.tensorstore_serialization:_flatten_serializable_leaves", "pytree"),
        (
            "levanter.checkpoint:load_checkpoint",
            "tree checkpoint_path subpath axis_mapping mesh allow_partial read_config",
        ),
        (
            "levanter.checkpoint:load_checkpoint_or_initialize",
            "init_fn checkpoint_search_paths subpath discover_latest axis_mapping mesh is_checkpointed donate_args "
            "donate_kwargs do_load allow_partial",
        ),
        ("levanter.checkpoint_manifest:read_manifest", "checkpoint_root"),
        # trackers
        ("levanter.tracker:CompositeTracker.__init__", "self loggers"),
        ("levanter.tracker:CompositeTracker.log", "self metrics step commit"),
        ("levanter.tracker:log_summary", "metrics"),
        ("levanter.tracker.helpers:log_optimizer_hyperparams", "opt_state prefix step"),
        ("levanter.tracker.json_logger:_flatten", "metrics prefix"),
        ("levanter.tracker.json_logger:_to_jsonable", "value"),
        # the program
        ("levanter.main.train_lm:main", "config"),
        ("levanter.config:main", "fn args config_dir"),
        ("levanter.adaptor:AdaptorConfig.trainable_filter", "self policy_model"),
        ("levanter.adaptor:AdaptorConfig.apply", "self model key axis_mapping"),
        # text, and attention on TPU
        (
            "levanter.data.text.examples:GrugLmExample.causal",
            "tokens loss_weight ignore_id eos_id segment_ids sliding_window block_cross_document_attention",
        ),
        ("levanter.data.text.examples:named_lm_example_from_grug", "example Pos batch_axis"),
        # the training set
        ("levanter.data.text.datasets:LmDataConfig.train_set", "self Pos batch_schedule key"),
        ("levanter.data.text.datasets:LmDataConfig.train_sets", "self Pos initial_batch_size key"),
        ("levanter.data.text.datasets:NamedLmDataset.__init__", "self dataset Pos"),
        (
            "levanter.data.mixture:MixtureDataset.__init__",
            "self datasets weights block_size randomize_blocks key stop_strategy start_offsets",
        ),
        ("levanter.schedule:BatchSchedule.find_step_containing_offset", "self offset"),
        ("levanter.schedule:BatchSchedule.global_data_offset_by_step", "self step"),
        ("levanter.utils.thread_utils:blocking_wait", "coro"),
        ("levanter.trainer:TrainerConfig._initialize_jax_config", "self"),
        (
            "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
            ":SplashAttentionKernel.manual_sharding_spec",
            "self sharding",
        ),
        # mixtures of experts
        ("levanter.models.qwen3_moe:Qwen3MoeSparseMoeBlock.__call__", "self x key"),
        ("levanter.models.qwen3_moe:Qwen3MoeSparseMoeBlock._route", "self router_logits Token TopExperts"),
        ("levanter.models.qwen3_moe:Qwen3MoeSparseMoeBlock._permute", "self x_flat topk_idx_flat TokenRepeat"),
        ("levanter.models.mixtral:MixtralSparseMoeBlock.__call__", "self x key"),
        ("levanter.models.mixtral:MixtralSparseMoeBlock._permute", "self x_flat topk_idx_flat TokenRepeat"),
        ("haliax.nn:MoELinear.__call__", "self inputs group_sizes key"),
        ("haliax.nn:ragged_dot", "lhs_ rhs_ group_sizes_ ar implementation"),
        # haliax
        ("haliax.partitioning:pspec_for_axis", "axis mapping"),
        ("haliax.partitioning:physical_axis_name", "axis mapping"),
        ("haliax.partitioning:physical_axis_size", "axis mapping"),
        ("haliax.partitioning:current_thread_local_mapping", ""),
        ("haliax.partitioning:_get_mesh", ""),
        ("haliax.tree_util:hashable_partition", "pytree filter_spec"),
        ("haliax.tree_util:hashable_combine", "dynamic static"),
    ],
)
def test_signature_is_what_we_call(path: str, parameters: str) -> None:
    assert " ".join(inspect.signature(function(path)).parameters) == parameters


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("levanter.trainer:TrainStepResult", "loss new_state loss_metrics hook_infos"),
        (
            "levanter.trainer_state:TrainerState",
            "step model optimizer opt_state training_key is_trainable mp model_averaging",
        ),
        ("levanter.schedule:ScheduleStep", "start value"),
    ],
)
def test_fields_are_those_we_fill_in(path: str, fields: str) -> None:
    assert " ".join(field.name for field in dataclasses.fields(named(path))) == fields


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("levanter.callbacks:StepInfo", "state loss step_duration"),
        (
            "levanter.trainer:TrainerConfig",
            "id mesh mp tracker watch checkpointer train_batch_size per_device_parallelism num_train_steps "
            "steps_per_eval log_jaxprs log_xla_hlo log_dir quantization model_averaging use_explicit_mesh_axes",
        ),
        ("levanter.utils.mesh:MeshConfig", "axes dcn_axes batch_axis_name"),
        (
            "levanter.data.text.datasets:LmDataConfig",
            "components train_weights mixture_block_size stop_strategy prior_context_phases",
        ),
        ("levanter.checkpoint:CheckpointerConfig", "base_path keep save_interval"),
        (
            "levanter.main.train_lm:TrainLmConfig",
            "data trainer model optimizer adapter initialize_from_hf use_hf_model_config "
            "initialize_from_checkpoint_path initialize_model_from_checkpoint_path hf_save_path",
        ),
    ],
)
def test_fields_include_those_we_read(path: str, names: str) -> None:
    missing = set(names.split()) - {field.name for field in dataclasses.fields(named(path))}
    assert not missing, f"{path} has no {', '.join(sorted(missing))}"


@pytest.mark.parametrize("name", ["model", "eval_model"])
def test_hooks_read_the_model_through_a_property(name: str) -> None:
    assert isinstance(inspect.getattr_static(StepInfo, name), property)


@pytest.mark.parametrize("name", ["Trainer", "load_checkpoint"])
def test_main_of_the_host_reads_its_global(name: str) -> None:
    host = importlib.import_module("levanter.main.train_lm")
    assert name in vars(host)
    loaded = {op.argval for op in dis.get_instructions(host.main) if op.opname == "LOAD_GLOBAL"}
    assert name in loaded, f"levanter.main.train_lm.main no longer looks {name!r} up when it runs"


def test_main_of_the_host_loads_a_full_state_without_more_arguments() -> None:
    source = inspect.getsource(importlib.import_module("levanter.main.train_lm").main)
    assert "state = load_checkpoint(state, checkpoint_path)" in source


def test_main_of_the_host_asks_the_data_config_for_its_training_set() -> None:
    source = " ".join(inspect.getsource(importlib.import_module("levanter.main.train_lm").main).split())
    assert "config.data.train_set( Pos, config.trainer.batch_schedule, key=data_key, )" in source


@pytest.mark.parametrize("name", ["_jit_train_step_fn", "_jit_train_step_fn_no_hook", "_maybe_save_jaxpr"])
def test_train_step_runs_through_what_we_replace(name: str) -> None:
    assert f"self.{name}" in inspect.getsource(Trainer.train_step)


@pytest.mark.parametrize("name", ["_jit_train_step_fn", "_jit_train_step_fn_no_hook"])
def test_step_function_is_a_cached_property(name: str) -> None:
    assert isinstance(inspect.getattr_static(Trainer, name), cached_property)


def test_train_step_calls_the_step_function_with_state_batch_and_kwargs() -> None:
    source = " ".join(inspect.getsource(Trainer.train_step).split())
    assert '"train_step", self._jit_train_step_fn, state, batch, batch_kwargs' in source
    assert "self._jit_train_step_fn_no_hook, state, batch, batch_kwargs" in source
    assert "result.loss.item()" in source


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("device_mesh", property),
        ("compute_axis_mapping", property),
        ("parameter_axis_mapping", property),
        ("batch_axis_name", property),
        ("mesh_axis_specs", cached_property),
        ("_mesh_axis_totals", cached_property),
        ("num_slices", cached_property),
    ],
)
def test_option_that_we_compute_anew_is_still_computed(path: str, kind: type) -> None:
    assert isinstance(inspect.getattr_static(TrainerConfig, path), kind)


def test_initialize_validates_before_it_logs() -> None:
    source = inspect.getsource(TrainerConfig.initialize)
    assert source.index("self._validate_and_set_defaults()") < source.index("_initialize_global_tracker(")


def test_checkpoint_hook_passes_keywords() -> None:
    source = inspect.getsource(Trainer._add_default_hooks)
    assert "checkpointer.on_step(tree=info.state.saveable_state, step=info.step, force=force)" in source
    assert "self._checkpointer = checkpointer" in source


@pytest.mark.parametrize("name", ["hooks", "tracker", "_checkpointer", "_logged_jaxprs"])
def test_trainer_sets_the_attribute_that_we_use(name: str) -> None:
    assert f"self.{name}" in inspect.getsource(Trainer.__init__)


def test_checkpointer_saves_through_the_method_that_we_replace() -> None:
    from levanter.checkpoint import Checkpointer

    source = " ".join(inspect.getsource(Checkpointer.on_step).split())
    assert "self.save_checkpoint( tree=tree, step=step, destination=destination," in source


def test_composite_tracker_keeps_its_loggers() -> None:
    from levanter.tracker import CompositeTracker
    from levanter.tracker.tracker import NoopTracker

    own = NoopTracker()
    assert CompositeTracker([own]).loggers == [own]


def test_manifest_lists_array_paths() -> None:
    manifest = importlib.import_module("levanter.checkpoint_manifest")
    array = manifest.CheckpointArray(path="layout/islands", shape=(), dtype="int32", chunk_shape=())
    built = manifest.build_manifest([array], array_driver="zarr3", kvstore_driver="ocdbt")
    assert "layout/islands" in built.array_paths


@pytest.mark.parametrize("name", ["key_value_set", "key_value_delete", "key_value_dir_get"])
def test_key_value_store_has_the_method(name: str) -> None:
    from jax._src.lib import _jax

    assert callable(getattr(_jax.DistributedRuntimeClient, name))


def test_client_of_the_key_value_store_is_where_we_look() -> None:
    from jax._src import distributed

    assert hasattr(distributed.global_state, "client")


def test_constants_can_be_evaluated_outside_the_mesh() -> None:
    assert callable(jax.ensure_compile_time_eval)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), jax.ensure_compile_time_eval():
        assert jax.numpy.arange(3).sum() == 3


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("levanter.layers.attention:default_attention_type", "local_devices"),
        ("levanter.utils.mesh:create_mesh_from_axis_specs", "devices"),
        ("levanter.layers.attention:_tpu_splash_attention", "manual_sharding_spec"),
    ],
)
def test_host_looks_up_by_attribute_what_we_replace(path: str, name: str) -> None:
    assert name in function(path).__code__.co_names


def test_host_counts_slices_of_the_devices_that_jax_names() -> None:
    assert "jax.devices()" in inspect.getsource(named("levanter.trainer:TrainerConfig.num_slices").func)


@pytest.mark.parametrize("path", ["qwen3_moe:Qwen3MoeSparseMoeBlock", "mixtral:MixtralSparseMoeBlock"])
def test_block_of_experts_names_the_axes_that_we_map(path: str) -> None:
    source = " ".join(inspect.getsource(named(f"levanter.models.{path}")).split())
    assert 'if x.has_axis("batch")' in source
    assert 'new_axis="token"' in source and 'new_axis="token_repeat"' in source
    assert "x_repeat_sort, group_sizes, sort_idx = self._permute(x_flat, topk_idx_flat, TokenRepeat)" in source
    assert "self.experts(x_repeat_sort, group_sizes, key=k_experts)" in source


@pytest.mark.parametrize("name", ["DEFAULT_ICI_AXIS_SPEC", "DEFAULT_DCN_AXIS_SPEC"])
def test_default_mesh_axes_are_a_mapping_of_sizes(name: str) -> None:
    axes = named(f"levanter.utils.mesh:{name}")
    assert axes and all(isinstance(size, int) for size in axes.values())


def test_stack_names_its_block_axis() -> None:
    assert "Block" in {field.name for field in dataclasses.fields(named("haliax.nn:Stacked"))}


def test_trackers_are_a_registry() -> None:
    from levanter.tracker.tracker import TrackerConfig

    assert callable(TrackerConfig.register_subclass)


def test_parsing_errors_carry_their_path() -> None:
    from draccus.utils import DecodingError, ParsingError, stringify_type

    error = DecodingError(("trainer", "diloco"), "message")
    assert isinstance(error, ParsingError)
    assert (tuple(error.key_path), error.message) == (("trainer", "diloco"), "message")
    assert isinstance(stringify_type(int), str)
