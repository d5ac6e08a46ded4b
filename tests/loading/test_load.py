"""Names are checked, then weights are streamed into place: values, layouts, dtypes, sharding, memory."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from tqdm import tqdm

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading import load
from jaxllm.loading.layout import parse_layout, write_tensor
from jaxllm.loading.load import check_names, init_dummy, load_params
from jaxllm.loading.open import open_checkpoint
from jaxllm.models.params import ParamSpec, Segment
from jaxllm.models.quantization import METHODS, quantize
from pallas_kernels.weights.held import Quantized
from tests.loading.files import spec, write_folder

pytestmark = pytest.mark.loading

RNG = np.random.default_rng(0)
D, N, H, F, V = 6, 2, 3, 5, 7
NUM_LAYERS = 2

INT8 = METHODS["int8"]


def tensors(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (V, D)}
    for layer in range(NUM_LAYERS):
        shapes |= {f"layers.{layer}.q": (N * H, D), f"layers.{layer}.o": (D, N * H), f"layers.{layer}.norm": (D,)}
    return {name: RNG.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def specs(dtype: Any = np.float32, *, stacked: bool = True) -> dict[str, ParamSpec]:
    layers = {
        "attn.q": ("q", (D, N, H), "(n h) d -> d n h", (N * H, D)),
        "attn.o": ("o", (N, H, D), "d (n h) -> n h d", (D, N * H)),
        "norm.scale": ("norm", (D,), "d -> d", (D,)),
    }
    specs = {"embed.table": spec((V, D), ["embed"], "v d -> v d", (V, D), stacked=False, dtype=dtype)}
    for path, (name, shape, layout, hf_shape) in layers.items():
        sources = [f"layers.{layer}.{name}" for layer in range(NUM_LAYERS)]
        if stacked:
            whole = (NUM_LAYERS, *shape)
            specs[f"layers.{path}"] = spec(whole, sources, layout, hf_shape, stacked=True, dtype=dtype)
        else:
            for layer, source in enumerate(sources):
                specs[f"layers.{layer}.{path}"] = spec(shape, [source], layout, hf_shape, stacked=False, dtype=dtype)
    return specs


def expected_q(hf: dict[str, np.ndarray], layer: int) -> np.ndarray:
    """Return what the definition of "(n h) d -> d n h" says."""
    return np.einsum("nhd->dnh", hf[f"layers.{layer}.q"].reshape(N, H, D))


@pytest.mark.parametrize("device_path", [False, True], ids=["cpu", "other devices"])
def test_stacked_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_path: bool):
    if device_path:
        monkeypatch.setattr(load, "shares_host_memory", lambda sharding: False)
    hf = tensors()
    checkpoint = open_checkpoint(str(write_folder(tmp_path, hf)))
    params = load_params(specs(), checkpoint)
    assert isinstance(params["embed"]["table"], jax.Array)
    np.testing.assert_array_equal(params["embed"]["table"], hf["embed"])
    for layer in range(NUM_LAYERS):
        np.testing.assert_array_equal(params["layers"]["attn"]["q"][layer], expected_q(hf, layer))
        o = np.einsum("dnh->nhd", hf[f"layers.{layer}.o"].reshape(D, N, H))
        np.testing.assert_array_equal(params["layers"]["attn"]["o"][layer], o)
        np.testing.assert_array_equal(params["layers"]["norm"]["scale"][layer], hf[f"layers.{layer}.norm"])


@pytest.mark.parametrize("row", [None, 0, V - 1])
def test_a_head_that_is_the_embedding_once_more_is_the_same_array(tmp_path: Path, row: int | None):
    hf = tensors()
    hf["head"] = hf["embed"].copy()
    if row is not None:
        hf["head"][row] += 1
    head = {"lm_head.table": spec((V, D), ["head"], "v d -> v d", (V, D), stacked=False, dtype=np.float32)}
    params = load_params(specs() | head, open_checkpoint(str(write_folder(tmp_path, hf))))
    assert (params["lm_head"]["table"] is params["embed"]["table"]) == (row is None)
    np.testing.assert_array_equal(params["lm_head"]["table"], hf["head"])


@pytest.mark.parametrize("device_path", [False, True], ids=["cpu", "other devices"])
@pytest.mark.parametrize("stacked", [False, True])
def test_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacked: bool, device_path: bool):
    """Weights quantized while they load equal those quantized afterwards."""
    if device_path:
        monkeypatch.setattr(load, "shares_host_memory", lambda sharding: False)
    checkpoint = open_checkpoint(str(write_folder(tmp_path, tensors())))
    inputs = {"q": 2, "o": 1, "table": 1, "scale": 0}
    plain = specs(stacked=stacked)
    quantized = {
        path: dataclasses.replace(spec, num_inputs=count, format=INT8 if count else None)
        for path, spec in plain.items()
        for count in [inputs[path.rpartition(".")[2]]]
    }
    for make in (lambda specs: load_params(specs, checkpoint), lambda specs: init_dummy(specs, 3)):
        whole, result = make(plain), make(quantized)
        names = [path[-1].key for path, _ in jax.tree.leaves_with_path(whole)]
        is_quantized = lambda x: isinstance(x, Quantized)  # noqa: E731
        pairs = zip(names, jax.tree.leaves(whole), jax.tree.leaves(result, is_leaf=is_quantized), strict=True)
        for name, weights, got in pairs:
            expected = quantize(weights, inputs[name], INT8) if inputs[name] else weights
            assert type(got) is type(expected), name
            jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("num_experts", [1, 3])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_tensor_of_all_experts(tmp_path: Path, num_experts: int, num_layers: int):
    """It has an axis for experts, even for a single one."""
    names = [f"layers.{layer}.up" for layer in range(num_layers)]
    hf = {name: RNG.standard_normal((num_experts, D, 2 * H)).astype(np.float32) for name in names}
    shape, axes = (num_layers, num_experts, H, D), ("layers", "experts", None, None)
    up = ParamSpec(
        shape,
        np.dtype(np.float32),
        axes,
        tuple(names),
        "d f -> f d",
        (num_experts, D, 2 * H),
        hf_index=(slice(None), slice(H, None)),
    )
    params = load_params({"layers.up": up}, open_checkpoint(str(write_folder(tmp_path, hf))))
    expected = np.stack([hf[name][:, :, H:].swapaxes(1, 2) for name in names])
    np.testing.assert_array_equal(params["layers"]["up"], expected)


def test_unstacked_layers_are_a_tuple(tmp_path: Path):
    hf = tensors()
    params = load_params(specs(stacked=False), open_checkpoint(str(write_folder(tmp_path, hf))))
    assert isinstance(params["layers"], tuple)
    for layer in range(NUM_LAYERS):
        np.testing.assert_array_equal(params["layers"][layer]["attn"]["q"], expected_q(hf, layer))


DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


@pytest.mark.parametrize(("stored", "wanted"), list(itertools.product((*DTYPES, np.float64), DTYPES)))
def test_casts(tmp_path: Path, stored: Any, wanted: Any):
    hf = tensors() if stored is np.float64 else tensors(stored)
    hf = {name: tensor.astype(stored) for name, tensor in hf.items()}
    params = load_params(specs(wanted), open_checkpoint(str(write_folder(tmp_path, hf))))
    result = np.asarray(params["layers"]["attn"]["q"][1])
    assert result.dtype == wanted
    assert result.tobytes() == np.ascontiguousarray(expected_q(hf, 1)).astype(wanted).tobytes()


def test_dtype_replaces_the_specs(tmp_path: Path):
    params = load_params(specs(), open_checkpoint(str(write_folder(tmp_path, tensors()))), dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(ml_dtypes.bfloat16)}


@pytest.mark.parametrize("shown", [False, True])
def test_a_lock_that_another_bar_left_locked_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: bool
):
    """A Ctrl-C within a bar of the main thread leaves it so, and an engine's core may load in another thread."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    checkpoint = open_checkpoint(str(write_folder(tmp_path, tensors())))
    loaded = list[Any]()
    with tqdm.get_lock():
        thread = threading.Thread(
            target=lambda: loaded.append(load_params(specs(), checkpoint, progress=shown)), daemon=True
        )
        thread.start()
        thread.join(30)
        assert loaded


def test_cpu_parameters_are_not_copied():
    out = load.aligned_empty((1000, 7), np.dtype(np.float32))
    out[...] = 1
    array = jax.device_put(out)
    assert array.unsafe_buffer_pointer() == out.ctypes.data


@pytest.mark.parametrize(
    ("layout", "einsum"),
    [
        ("a b -> a b", "ab->ab"),
        ("a b -> b a", "ab->ba"),
        ("(a b) c -> c a b", "abc->cab"),
        ("a (b c) -> b c a", "abc->bca"),
        ("(a b) c -> b a c", "abc->bac"),
        ("1 a -> a", "a->a"),
    ],
)
def test_layouts(layout: str, einsum: str):
    parsed = parse_layout(layout)
    sizes = {"a": 300, "b": 5, "c": 1100}
    source = RNG.standard_normal([sizes[letter] for letter in parsed.theirs]).astype(np.float32)
    expected = np.einsum(einsum, source)
    out = np.empty(expected.shape, np.float32)
    write_tensor(source.reshape(source.shape[0], -1), parsed, expected.shape, out)
    np.testing.assert_array_equal(out, expected)
    index = tuple(slice(size // 3, size - 1) for size in expected.shape)
    part = np.empty(expected[index].shape, np.float32)
    write_tensor(source, parsed, expected.shape, part, index)
    np.testing.assert_array_equal(part, expected[index])


@pytest.mark.parametrize("layout", ["a b", "a b -> a", "a a -> a a", "a -> a b", "a b -> a c"])
def test_layouts_that_are_none(layout: str):
    with pytest.raises(ValueError, match="layout"):
        parse_layout(layout)


def check_error(folder: Path, hf: dict[str, np.ndarray], ignored: tuple[str, ...] = ()) -> str:
    checkpoint = open_checkpoint(str(write_folder(folder, hf)))
    with pytest.raises(VLLMValidationError) as error:
        check_names(specs(), checkpoint, ignored=ignored)
    assert error.value.parameter == "model"
    return str(error.value)


def test_names_that_fit(tmp_path: Path):
    hf = tensors() | {"layers.0.rotary_emb.inv_freq": np.ones(2, np.float32)}
    check_names(specs(), open_checkpoint(str(write_folder(tmp_path, hf))), ignored=("*rotary_emb.inv_freq",))


def test_one_error_lists_everything(tmp_path: Path):
    hf = tensors()
    del hf["embed"], hf["layers.0.q"], hf["layers.1.q"]
    hf |= {"layers.1.o": np.ones((D, D + 1), np.float32), "layers.0.norm": np.ones(D, np.int8)}
    hf |= {f"layers.{layer}.bias": np.ones(1, np.float32) for layer in (0, 1, 2, 5)}
    hf |= {"vision.x": np.ones(1, np.float32)}
    text = check_error(tmp_path, hf, ignored=("nothing*",))
    for line in (
        "missing: embed",
        "missing: layers.{0-1}.q",
        f"wrong: layers.1.o has shape [{D}, {D + 1}], the model needs [{D}, {N * H}]",
        "wrong: layers.0.norm has dtype int8",
        "unexpected: layers.{0-2,5}.bias",
        "unexpected: vision.x",
        "LlamaForCausalLM",
    ):
        assert line in text


def test_dummy_is_deterministic_and_small():
    first, again, other = (init_dummy(specs(), seed) for seed in (0, 0, 1))
    assert jax.tree.map(np.shape, first) == jax.tree.map(np.shape, init_dummy(specs(), 0))
    for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(first["layers"]["attn"]["q"], other["layers"]["attn"]["q"])
    assert not np.array_equal(first["layers"]["attn"]["q"][0], first["layers"]["attn"]["q"][1])
    assert np.abs(first["embed"]["table"]).max() < 0.2
    assert np.abs(np.asarray(first["layers"]["norm"]["scale"]) - 1).max() < 0.2
    large = spec((2000, 1000), ["x"], "v d -> v d", (2000, 1000), stacked=False, dtype=np.float32)
    table = np.asarray(init_dummy({"table": large}, 0)["table"])
    assert abs(table.std() - 0.02) < 1e-3
    assert len(np.unique(table[:, 0])) > 1000


SHARDED = """
import sys
import threading
from dataclasses import replace
import jax, numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec as P
sys.path.insert(0, sys.argv[1])
from tests.loading.test_load import INT8, specs
from jaxllm.loading.open import open_checkpoint
from jaxllm.loading.load import init_dummy, load_params
assert jax.device_count() == 4
mesh = jax.make_mesh((2, 2), ("model", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
parts = {"layers.attn.q": P(None, None, "model"), "layers.attn.o": P(None, "data", None, "model"), "embed.table": P()}
columns = Layout(major_to_minor=(1, 0))
def format_for(path):
    sharding = NamedSharding(mesh, parts[path]) if path in parts else None
    return Format(columns, sharding) if path == "embed.table" else sharding
reads = []
class Counting(type(open_checkpoint(sys.argv[2]))):
    def read(self, name, index=None):
        reads.append(name)
        return super().read(name, index)
checkpoint = open_checkpoint(sys.argv[2])
checkpoint.__class__ = Counting
read = lambda f: load_params(specs(), checkpoint, format_for=f)
invent = lambda f: init_dummy(specs(), 3, format_for=f)
for make in (read, invent):
    reads.clear()
    found = make(format_for)
    assert reads.count("embed") <= 1, reads
    assert reads.count("layers.0.q") <= 1, reads
    q = found["layers"]["attn"]["q"]
    assert q.sharding.spec == parts["layers.attn.q"]
    assert q.addressable_shards[0].data.shape == (2, 6, 1, 3)
    assert found["embed"]["table"].format.layout.major_to_minor == (1, 0)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(make(None)), strict=True):
        np.testing.assert_array_equal(one, two)
given = {
    path: replace(spec, num_inputs=2, format=INT8) if "attn" in path
    else replace(spec, num_inputs=1, format=INT8 if path == "embed.table" else None)
    for path, spec in specs().items()
}
found, alone = (load_params(given, checkpoint, format_for=f) for f in (format_for, None))
held = found["layers"]["attn"]["o"]
values, scales = held.codes, held.scales
for part in (values, scales):
    assert tuple(part.sharding.spec) == (None, "data", None)[:len(part.sharding.spec)], part.sharding
held = found["embed"]["table"]
values, scales = held.codes, held.scales
assert values.format.layout.major_to_minor == (1, 0)
table = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.format), values)
look_up = jax.jit(lambda table: table[2]).lower(table).compile()
np.testing.assert_array_equal(look_up(values), alone["embed"]["table"].codes[2])
jax.tree.map(np.testing.assert_array_equal, found, alone)
print("sharded as unsharded")
"""


def run_python(code: str, *arguments: str, **environment: str) -> str:
    """Run `code` in a process of its own, and return what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("device_path", [False, True], ids=["cpu", "other devices"])
def test_heads_are_repeated_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_path: bool):
    """Heads are repeated where there are more devices than kv heads."""
    if device_path:
        monkeypatch.setattr(load, "shares_host_memory", lambda sharding: False)
    hf = tensors()
    checkpoint = open_checkpoint(str(write_folder(tmp_path, hf)))
    once = specs()["layers.attn.q"]
    axes = ("layers", "embed", "kv_heads", "head_dim")
    repeated = dataclasses.replace(once, shape=(NUM_LAYERS, D, 3 * N, H), axes=axes, repeats=3)
    for make in (lambda spec: load_params({"q": spec}, checkpoint), lambda spec: init_dummy({"q": spec}, 0)):
        heads, result = (np.asarray(make(spec)["q"]) for spec in (once, repeated))
        np.testing.assert_array_equal(result, heads[:, :, [0, 0, 0, 1, 1, 1]])


@pytest.mark.parametrize("device_path", [False, True], ids=["cpu", "other devices"])
@pytest.mark.parametrize("stacked", [False, True])
def test_parameters_in_one_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacked: bool, device_path: bool):
    """Each of two shards has half of q and, as there is one kv head, all of k."""
    if device_path:
        monkeypatch.setattr(load, "shares_host_memory", lambda sharding: False)
    layers = range(2) if stacked else range(1)
    hf = {f"{layer}.q": RNG.standard_normal((4 * H, D)).astype(np.float32) for layer in layers}
    hf |= {f"{layer}.k": RNG.standard_normal((H, D)).astype(np.float32) for layer in layers}
    checkpoint = open_checkpoint(str(write_folder(tmp_path, hf)))
    lead = (2,) if stacked else ()

    def part(name: str, heads: int, axis: str, start: int) -> ParamSpec:
        names, layout = [f"{layer}.{name}" for layer in layers], f"({name} h) d -> {name} h d"
        made = spec((*lead, heads, H, D), names, layout, hf[f"0.{name}"].shape, stacked=stacked, dtype=np.float32)
        axes = (*made.axes[: len(lead)], axis, "head_dim", "embed")
        return dataclasses.replace(made, axes=axes, segment=Segment("a.qk", 2, start))

    params = {"a.q": part("q", 4, "heads", 0), "a.k": dataclasses.replace(part("k", 2, "kv_heads", 2), repeats=2)}
    result = np.asarray(load_params(params, checkpoint)["a"]["qk"])
    assert result.shape == (*lead, 2, 3, H, D)
    for layer in layers:
        q, k = hf[f"{layer}.q"].reshape(4, H, D), hf[f"{layer}.k"].reshape(1, H, D)
        expected = np.stack([np.concatenate([q[:2], k]), np.concatenate([q[2:], k])])
        np.testing.assert_array_equal(result[layer] if stacked else result, expected)
    apart = {path: dataclasses.replace(spec, segment=None) for path, spec in params.items()}
    together, alone = init_dummy(params, 0)["a"]["qk"], init_dummy(apart, 0)["a"]
    shards = zip(*(np.split(np.asarray(alone[name]), 2, axis=len(lead)) for name in "qk"), strict=True)
    expected = np.stack([np.concatenate(shard, axis=len(lead)) for shard in shards], axis=len(lead))
    np.testing.assert_array_equal(together, expected)


def test_each_device_gets_its_part(tmp_path: Path, repository: Path):
    folder = write_folder(tmp_path, tensors())
    flags = "--xla_force_host_platform_device_count=4"
    assert "sharded as unsharded" in run_python(SHARDED, str(repository), str(folder), XLA_FLAGS=flags)


MEMORY = """
import sys, threading, time, tracemalloc
from dataclasses import replace
import jax, numpy as np
sys.path.insert(0, sys.argv[1])
from tests.loading.files import spec
from jaxllm.loading import load
from jaxllm.loading.open import open_checkpoint
from jaxllm.loading.load import load_params

def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

num_devices = int(sys.argv[4])
assert jax.device_count() == num_devices
load.shares_host_memory = lambda sharding: sys.argv[5] == "cpu"
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
# The HF tensor's rows, which are our columns: every device's part of a tensor lies all over it.
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "model"))
shape, layers = (2048, 3072), 12
sources = [f"layers.{layer}.w" for layer in range(layers)]
of_w = spec((layers, *shape[::-1]), sources, "f d -> d f", shape, stacked=True, dtype=sys.argv[3])
specs = {"layers.w": replace(of_w, axes=("layers", None, "f"))}
checkpoint = open_checkpoint(sys.argv[2])
jax.device_put(np.zeros(3)).block_until_ready()
before, peak, stop = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not stop.wait(0.002):
        peak = max(peak, anonymous())
thread = threading.Thread(target=watch)
if sys.argv[5] == "cpu":
    thread.start()
else:  # what is on the devices does not count
    tracemalloc.start()
params = load_params(specs, checkpoint, format_for=lambda path: sharding)
if sys.argv[5] == "cpu":
    stop.set()
    thread.join()
else:
    before, peak = 0, tracemalloc.get_traced_memory()[1]
assert float(params["layers"]["w"][3, 1, 2]) == 3.0
assert params["layers"]["w"].sharding.is_equivalent_to(sharding, 3)
print((peak - before) / 1e6, sum(array.nbytes for array in jax.tree.leaves(params)) / 1e6)
"""


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 302 MB of weights."""
    hf = {f"layers.{layer}.w": np.full((2048, 3072), layer, np.float32) for layer in range(12)}
    return write_folder(tmp_path_factory.mktemp("large"), hf)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("dtype", "num_devices", "platform"),
    [("float32", 1, "cpu"), ("bfloat16", 1, "cpu"), ("bfloat16", 8, "cpu"), ("bfloat16", 8, "other")],
)
def test_peak_memory_is_the_parameters_and_one_tensor(
    large_folder: Path, repository: Path, dtype: str, num_devices: int, platform: str
):
    tensor_mb = 2048 * 3072 * 4 / 1e6
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    arguments = (str(repository), str(large_folder), dtype, str(num_devices), platform)
    peak_mb, params_mb = map(float, run_python(MEMORY, *arguments, XLA_FLAGS=flags).split())
    print(f"{arguments[2:]}: peak {peak_mb:.0f} MB, {params_mb:.0f} MB of parameters, tensors of {tensor_mb:.0f} MB")
    # The watch itself and the allocator's own need a little; another tensor, or a copy of the parameters, is far more.
    on_host_mb = params_mb if platform == "cpu" else 0
    assert on_host_mb * 0.9 < peak_mb < on_host_mb + tensor_mb + 12
