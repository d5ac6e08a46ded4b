"""Programs from disk equal compiled ones, serve the same code and configuration only, and are never an error."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxllm import LLM, EngineArgs, SamplingParams, TokensPrompt
from jaxllm.engine.core.startup import keeps_programs
from jaxllm.execution.programs import cache as program_cache
from jaxllm.execution.programs.cache import Folders, ProgramCache, source_digest, use_cache
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.programs.shapes import ProgramKey, Upkeep
from jaxllm.models import LayerLoop, registry
from tests.execution.support import hostile_jax, make_compiler
from tests.models.tiny import folder
from tests.utils.ownership import give_away

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("quick_compile")]

NUM_BLOCKS = 33
QUICK = Upkeep.MAKE_COUNTS
"""A program that takes no time to compile."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder for programs; JAX's own cache is off, as it is for an engine that uses the folder."""
    before, limit = jax.config.jax_compilation_cache_dir, jax.config.jax_compilation_cache_max_size
    set_jax_cache(None)
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_max_size", limit)
    set_jax_cache(before)


def set_jax_cache(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


def files(disk: Path) -> set[Path]:
    return set(disk.iterdir()) if disk.is_dir() else set()


def small(**changes: Any) -> StepCompiler:
    """Return a compiler of few programs."""
    return make_compiler(**{"max_num_seqs": 4, "max_num_batched_tokens": 8, "loop": LayerLoop.SCAN} | changes)


class Programs(ProgramCache):
    def get(self, key: ProgramKey) -> jax.stages.Compiled:
        return self.load(key) or self.compile(key)


def lookup(compiler: StepCompiler, disk: Path, num_blocks: int = NUM_BLOCKS, **environment: str) -> Programs:
    return Programs(compiler, num_blocks, Folders(disk, None), environment)


class Idle(StepCompiler):
    """Traces and compiles nothing."""

    def lower(self, key: Any, num_blocks: int) -> Any:
        pytest.fail(f"{key} was traced")

    def compile(self, key: Any, num_blocks: int) -> Any:
        pytest.fail(f"{key} was compiled")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the platform that this CPU stands in for."""
    monkeypatch.setattr("jaxllm.execution.programs.compiler.PLATFORMS", {"cpu": "cpu", "gpu": "cpu"})
    return "gpu"


def idle(compiler: StepCompiler) -> StepCompiler:
    return Idle(compiler.config, compiler.model, compiler.mesh)


@pytest.mark.parametrize(("max_logprobs", "which"), [(5, slice(None)), (200, slice(-1, None))])
def test_every_program_comes_back(disk: Path, max_logprobs: int, which: slice) -> None:
    """There are programs of a few log-probabilities, and one with more, which the host sorts."""
    compiler = small(max_logprobs=max_logprobs)
    keys = compiler.shapes.programs()[which]
    first, second = lookup(compiler, disk), lookup(idle(compiler), disk)
    for key in keys:
        made, loaded = first.get(key), second.get(key)
        assert (loaded.in_tree, loaded.out_tree) == (made.in_tree, made.out_tree)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(loaded.in_avals)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(made.in_avals)
        ]
        assert (loaded.input_shardings, loaded.output_shardings) == (made.input_shardings, made.output_shardings)
    assert len(files(disk)) == len(keys)


def test_an_engine_answers_the_same_from_disk(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLLM_CACHE", str(disk))
    params = [SamplingParams(temperature=0, max_tokens=8, logprobs=2), SamplingParams(seed=1, max_tokens=8)]

    def answer() -> list[Any]:
        llm = LLM(
            str(folder("llama3_tied")),
            skip_tokenizer_init=True,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            enforce_eager=True,
        )
        prompts = [TokensPrompt(prompt_token_ids=[1, 2, 3]), TokensPrompt(prompt_token_ids=[4])]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]

    compiled = answer()
    assert list(disk.glob("xla/*/programs/*"))
    monkeypatch.setattr(StepCompiler, "compile", lambda self, key, num_blocks: pytest.fail(f"{key} was compiled"))
    assert answer() == compiled


@pytest.mark.parametrize(
    "change",
    [
        lambda _, disk: lookup(small(), disk, NUM_BLOCKS + 1),
        lambda _, disk: lookup(small(), disk, XLA_FLAGS="--xla_cpu_enable_fast_math=true"),
        lambda _, disk: lookup(small(), disk, JAXLLM_CPU="avx2"),
        lambda _, disk: lookup(small(dtype="bfloat16"), disk),
        lambda _, disk: lookup(small(num_layers=3), disk),
        lambda _, disk: lookup(small(loop=LayerLoop.SWITCH), disk),
        lambda _, disk: lookup(small(batch_invariant=True), disk),
        lambda _, disk: lookup(small(max_model_len=256), disk),
        lambda patch, _: patch.setattr(program_cache, "code_digest", lambda: "other code or versions"),
        lambda patch, _: patch.setattr(program_cache, "cpu_digest", lambda: "another CPU"),
        lambda patch, _: patch.setattr(os, "cpu_count", lambda: 1000),
    ],
    ids=["blocks", "flags", "instruction set", "dtype", "model", "loop", "options", "context", "code", "CPU", "cores"],
)
def test_whatever_else_is_different_is_a_miss(
    disk: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch, Path], Programs | None]
) -> None:
    lookup(small(), disk).get(QUICK)
    before = files(disk)
    cache = change(monkeypatch, disk) or lookup(small(), disk)
    cache.get(QUICK)
    assert len(files(disk) - before) == 1


def test_an_accelerators_programs_come_back_without_a_trace(disk: Path, gpu: str) -> None:
    compiler = small(platform=gpu, num_layers=1)
    shape = compiler.shapes.steps()[0]
    lookup(compiler, disk).get(shape)
    assert lookup(idle(compiler), disk).load(shape) is not None
    assert not compiler.shapes.rare_programs(), "no step waits for a disk"


@pytest.mark.parametrize(
    ("name", "value", "is_missed"),
    [
        ("_version", lambda package: "another compiler" if package == "libtpu" else None, True),
        ("code_digest", lambda: "other code or versions", True),
        ("_DEVICE_FACTS", ("id", "platform", "process_index"), True),
        ("_host_facts", lambda: "another CPU with other cores", False),
    ],
)
def test_an_accelerators_programs_depend_on_its_compiler_and_not_on_the_host(
    disk: Path, gpu: str, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, is_missed: bool
) -> None:
    compiler = small(platform=gpu)
    lookup(compiler, disk).get(QUICK)
    assert lookup(small(), disk).load(QUICK) is None, "a CPU's programs are others"
    monkeypatch.setattr(program_cache, name, value)
    assert (lookup(compiler, disk).load(QUICK) is None) == is_missed


def test_the_drivers_version_counts(disk: Path, gpu: str) -> None:
    class Device:
        client = SimpleNamespace(platform_version="cuda 13010")

    compiler = small(platform=gpu)
    newer = StepCompiler(compiler.config, compiler.model, cast(Any, SimpleNamespace(devices=np.array([Device()]))))
    assert "cuda 13010" in lookup(newer, disk)._facts


def test_the_largest_step_is_measured_once(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    monkeypatch.setattr(StepCompiler, "used_bytes", lambda self: measured.append(1) or 12_345)
    assert [lookup(small(), folder).used_bytes() for folder in (disk, disk)] == [12_345] * 2
    assert len(measured) == 1
    lookup(small(max_model_len=256), disk).used_bytes()
    assert len(measured) == 2
    for path in files(disk):
        path.write_bytes(zlib.compress(b"many"))
    assert lookup(small(), disk).used_bytes() == 12_345
    assert len(measured) == 3
    assert Programs(small(), 2, Folders(None, None), {}).used_bytes() == 12_345
    assert len(measured) == 4


def test_a_size_of_another_user_is_not_believed(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCompiler, "used_bytes", lambda self: 12_345)
    lookup(small(), disk).used_bytes()
    (path,) = files(disk)
    path.write_bytes(zlib.compress(b"1"))
    give_away(monkeypatch, path)
    assert lookup(small(), disk).used_bytes() == 12_345


def test_jax_settings_count(disk: Path) -> None:
    lookup(small(), disk).get(QUICK)
    before = files(disk)
    with_precision = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "float32")
    try:
        lookup(small(), disk).get(QUICK)
    finally:
        jax.config.update("jax_default_matmul_precision", with_precision)
    assert len(files(disk) - before) == 1
    with hostile_jax():  # what the engine pins does not count
        lookup(idle(small()), disk).get(QUICK)


@pytest.mark.parametrize("damage", [b"", b"nonsense", zlib.compress(b""), zlib.compress(b"nonsense"), None])
def test_a_broken_file_counts_as_none(disk: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    compiler = small()
    lookup(compiler, disk).get(QUICK)
    (path,) = files(disk)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with caplog.at_level("WARNING", "jaxllm"):
        lookup(compiler, disk).get(QUICK)
    assert "compiled again" in caplog.text
    lookup(idle(compiler), disk).get(QUICK)  # and it is whole again


class Harmful:
    """Does harm when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HARM"],)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_program_of_another_user_is_not_loaded(
    disk: Path, gpu: str, platform: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HARM", str(disk.parent / "harm"))
    compiler = small(platform=platform)
    lookup(compiler, disk).get(QUICK)
    (path,) = files(disk)
    path.write_bytes(zlib.compress(pickle.dumps(Harmful())))
    give_away(monkeypatch, path)
    with caplog.at_level("WARNING", "jaxllm"):
        assert lookup(compiler, disk).load(QUICK) is None
    assert "belongs to another user" in caplog.text
    assert not (disk.parent / "harm").exists()


@pytest.mark.parametrize("keeps_programs", [True, False])
def test_a_folder_of_another_user_is_not_used(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, keeps_programs: bool
) -> None:
    def use() -> Folders:
        return use_cache(str(disk), keeps_programs=keeps_programs)

    made = use()
    (cpu,) = disk.glob("xla/*")
    assert made == Folders(cpu / "programs" if keeps_programs else None, cpu / "kernels")
    assert cpu.stat().st_mode & 0o777 == 0o700
    set_jax_cache(None)
    for given_away in (cpu, cpu / "kernels", cpu / "programs"):
        given_away.mkdir(exist_ok=True)
        give_away(monkeypatch, given_away)
    with caplog.at_level("WARNING", "jaxllm"):
        assert use() == Folders(None, None)
    assert jax.config.jax_compilation_cache_dir is None
    assert "set JAXLLM_CACHE to a folder of your own" in caplog.text


def test_a_folder_of_root_is_read(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = small()
    lookup(compiler, disk).get(QUICK)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    lookup(idle(compiler), disk).get(QUICK)


def test_a_folder_that_cannot_be_read_has_nothing(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    cache = lookup(small(), disk)
    monkeypatch.setattr(ProgramCache, "_path", lambda self, key: disk / "program")
    assert not cache.is_kept(QUICK)
    assert cache.load(QUICK) is None


def test_a_program_that_cannot_be_kept_is_there(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(program: object) -> None:
        raise NotImplementedError("constants")

    monkeypatch.setattr(program_cache.serialize_executable, "serialize", refuse)
    with caplog.at_level("WARNING", "jaxllm"):
        assert lookup(small(), disk).get(QUICK)
    assert "cannot be kept: constants" in caplog.text
    assert not files(disk)


def test_a_folder_that_cannot_be_written_is_a_warning(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk.write_text("in the way")
    compiler = small()
    with caplog.at_level("WARNING", "jaxllm"):
        lookup(compiler, disk).get(QUICK)
    assert "cannot be" in caplog.text


def test_a_program_from_jax_cache_is_not_kept(disk: Path, tmp_path: Path) -> None:
    set_jax_cache(str(tmp_path / "jax"))
    compiler = small()
    lookup(compiler, disk).get(QUICK)
    (kept,) = files(disk)
    lookup(idle(compiler), disk).get(QUICK)  # kept whole, though JAX has kept it too
    kept.unlink()
    lookup(compiler, disk).get(QUICK)
    assert not files(disk)


def processor(logits: Any, _: Any) -> Any:
    return logits


@pytest.mark.parametrize("outside", ["processor", "family", "interpreter", "disabled"])
def test_an_engine_keeps_what_comes_from_our_code_alone(
    disk: Path, monkeypatch: pytest.MonkeyPatch, outside: str
) -> None:
    """What it does not keep, JAX's cache keeps, if the user has not turned that off."""
    settings: dict[str, Any] = {}
    if outside == "processor":
        settings = {"logits_processors": [processor]}
    if outside == "family":
        monkeypatch.setitem(registry.REGISTRY._added, "LlamaForCausalLM", registry.get_family("LlamaForCausalLM"))
    if outside == "disabled":
        monkeypatch.setattr(type(jax.config), "jax_enable_compilation_cache", False)
    config = EngineArgs(model=str(folder("llama3_tied")), **settings).create_engine_config()
    if outside == "interpreter":
        [group] = config.kv_groups
        attention = replace(group.attention, implementation="tpu", interpret=True)
        config = replace(config, ops=config.ops._replace(kv_groups=(replace(group, attention=attention),)))
    assert use_cache(str(disk), keeps_programs=keeps_programs(config)).programs is None
    assert (jax.config.jax_compilation_cache_dir is None) == (outside == "disabled")


def test_an_accelerators_programs_are_kept_on_one_host(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's cache keeps the small programs beside them, and all of a mesh that spans hosts."""
    config = EngineArgs(model=str(folder("llama3_tied"))).create_engine_config()
    on_gpu = replace(config, platform="gpu")
    assert keeps_programs(on_gpu)
    folders = use_cache(str(disk), keeps_programs=True, platform="gpu")
    assert folders.programs is not None
    assert jax.config.jax_compilation_cache_dir == str(folders.programs.parent)
    assert jax.config.jax_compilation_cache_max_size == program_cache.MAX_BYTES["gpu"]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not keeps_programs(on_gpu)
    assert keeps_programs(config)


@pytest.mark.parametrize("reason", ["the user's limit", "root's folder"])
def test_jax_cache_is_left_without_our_limit(disk: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    if reason == "root's folder":  # JAX could not lock it, and would read nothing
        monkeypatch.setattr(os, "access", lambda *_: False)
    else:
        jax.config.update("jax_compilation_cache_max_size", 12_345)
    before = jax.config.jax_compilation_cache_max_size
    use_cache(str(disk), keeps_programs=True, platform="gpu")
    assert jax.config.jax_compilation_cache_dir is not None
    assert jax.config.jax_compilation_cache_max_size == before


def test_programs_used_longest_ago_make_room(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.mkdir()
    for age in (3, 1, 2):
        path = disk / f"used {age} hours ago"
        path.write_bytes(bytes(400))
        used = path.stat().st_mtime - 3600 * age
        os.utime(path, (used, used))
    monkeypatch.setitem(program_cache.MAX_BYTES, "cpu", 1000)
    lookup(small(), disk).get(QUICK)
    assert {path.name for path in files(disk) if path.name.startswith("used")} == {
        "used 1 hours ago",
        "used 2 hours ago",
    }


def test_an_accelerators_programs_have_a_limit_of_their_own(
    disk: Path, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.mkdir()
    (disk / "old").write_bytes(bytes(400))
    os.utime(disk / "old", (0, 0))
    monkeypatch.setattr(program_cache, "MAX_BYTES", {"cpu": 0, "gpu": 1000})
    lookup(small(platform=gpu), disk).get(QUICK)
    assert (disk / "old").exists()
    lookup(small(), disk).get(QUICK)
    assert not (disk / "old").exists()


def test_programs_of_this_run_stay(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start that walks through the same programs would miss each of them otherwise."""
    monkeypatch.setitem(program_cache.MAX_BYTES, "cpu", 0)
    cache = lookup(small(), disk)
    cache.get(QUICK)
    for path in files(disk):  # kept long ago, and used now
        os.utime(path, (0, 0))
    assert cache.load(QUICK) is not None
    cache.get(Upkeep.SET_COUNTS)
    assert cache.is_kept(QUICK)
    assert cache.is_kept(Upkeep.SET_COUNTS)


def test_a_file_that_another_process_removes_is_not_in_the_way(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is listed and then gone, as a link without its target is."""
    disk.mkdir()
    (disk / "gone").symlink_to(disk / "nowhere")
    lookup(small(), disk).get(QUICK)
    assert "cannot be kept" not in caplog.text
    assert any(path.is_file() for path in disk.iterdir())


def test_the_digest_is_of_names_and_texts(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "b.txt").write_text("no code")
    before = source_digest([tmp_path])
    (tmp_path / "b.txt").write_text("changed")
    assert source_digest([tmp_path]) == before
    (tmp_path / "a.py").write_text("two")
    changed = source_digest([tmp_path])
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    assert len({before, changed, source_digest([tmp_path])}) == 3


def test_a_loaded_program_computes_what_the_compiled_one_does(disk: Path) -> None:
    compiler = small()
    rng = np.random.default_rng()

    def run(cache: Programs, pool: Any) -> Any:
        pools = jax.tree.map(lambda x, spec: jax.device_put(x, spec.sharding), pool, specs)
        ids = tuple(jax.device_put(np.arange(start, start + 8, dtype=np.int32)) for start in (1, 17))
        return jax.tree.leaves(jax.tree.map(np.asarray, cache.get(Upkeep.COPY_BLOCKS)(pools, (ids,))))

    specs = compiler.caches.specs(NUM_BLOCKS)
    pool = jax.tree.map(lambda spec: rng.standard_normal(spec.shape).astype(spec.dtype), specs)
    made, loaded = run(lookup(compiler, disk), pool), run(lookup(idle(compiler), disk), pool)
    jax.tree.map(np.testing.assert_array_equal, made, loaded)
    assert not np.array_equal(made[0], jax.tree.leaves(pool)[0])
