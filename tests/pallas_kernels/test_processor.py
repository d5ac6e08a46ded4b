"""The processor's features match its flags, a lesser set is the requested one, and quotas of control groups count."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from pallas_kernels.linear.cpu import Kind
from pallas_kernels.linear.cpu.kernel import Kernel as Linear
from pallas_kernels.native import compiling, cores, interface, processor
from pallas_kernels.native.handler import METADATA, VERSION, Fields
from pallas_kernels.native.processor import AMX, AVX2, AVX512, aarch64, restricted, x86
from pallas_kernels.native.uninitialized import Kernel

ALL = (*AVX2, *AVX512, "avx512bf16", "avx512vnni")
MOST = (*ALL, *AMX)


def made(*features: str) -> processor.Processor:
    return x86("x86_64-unknown-linux-gnu", "some", dict.fromkeys(features, True))


@pytest.mark.parametrize(
    ("features", "name", "vectors", "has_bfloat16", "has_int8"),
    [
        (MOST, "amx", 32, True, True),
        ((*MOST[:-1], "amx-int8"), "avx512", 32, True, True),
        ((*AVX2, *AVX512, *AMX), "avx512", 32, False, False),
        (ALL, "avx512", 32, True, True),
        ((*AVX2, *AVX512), "avx512", 32, False, False),
        ((*AVX2, "avxvnni"), "avx2", 8, False, True),
        ((*AVX2, "avx512f", "avx512cd"), "avx2", 8, False, False),  # Knights Landing
        (("avx2", "f16c"), "plain", 4, False, False),
        ((), "plain", 4, False, False),
    ],
)
def test_x86(
    monkeypatch: pytest.MonkeyPatch,
    features: tuple[str, ...],
    name: str,
    vectors: int,
    has_bfloat16: bool,
    has_int8: bool,
) -> None:
    made_up = made(*features)
    assert (made_up.name, made_up.has_bfloat16_dot, made_up.has_int8_dot) == (name, has_bfloat16, has_int8)
    assert made_up.is_x86
    assert not made_up.is_aarch64
    monkeypatch.setattr(processor, "current", lambda: made_up)
    assert compiling.num_registers() == vectors


def test_aarch64(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = aarch64("aarch64-linux-gnu", "", {"bf16": True, "i8mm": False})
    assert (made_up.name, made_up.has_bfloat16_dot, made_up.has_int8_dot) == ("neon", True, False)
    assert made_up.features == "+neon,+bf16"
    monkeypatch.setattr(processor, "current", lambda: made_up)
    assert compiling.num_registers() == 8


def test_a_lesser_set_has_nothing_of_the_better_one() -> None:
    most, best = made(*MOST), made(*ALL)
    without = restricted(most, "avx512")
    assert (without.name, without.has_matrix_unit, without.has_bfloat16_dot) == ("avx512", False, True)
    assert (without.cpu, "+avx512bf16" in without.features, "+amx" in without.features) == (most.cpu, True, False)
    assert restricted(best, None) is restricted(best, "avx512") is best
    lesser = restricted(best, "avx2")
    assert (lesser.name, lesser.cpu, lesser.has_bfloat16_dot) == ("avx2", "x86-64-v3", False)
    assert "avx512" not in lesser.features
    assert restricted(best, "plain").name == restricted(aarch64("aarch64", "", {}), "plain").name == "plain"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such call")
@pytest.mark.parametrize(("answer", "has"), [(0, True), (-1, False)])
def test_amx_is_used_where_the_system_lets_it(answer: int, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    library = SimpleNamespace(syscall=lambda *numbers: calls.append(numbers) or answer)
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: dict.fromkeys(MOST, True))
    detected = processor.host.__wrapped__()
    assert (detected.has_matrix_unit, "+amx-bf16" in detected.features) == (has, has)
    assert calls == [(processor.ARCH_PRCTL, processor.REQUEST_PERMISSION, processor.TILE_DATA)]


@pytest.mark.parametrize(
    ("present", "name", "problem"),
    [
        (made(*ALL), "sse", "JAXLLM_CPU=sse is no instruction set: choose one of avx512, avx2, plain"),
        (made(*ALL), "neon", "JAXLLM_CPU=neon: the processor lacks it; it has avx512, avx2, plain"),
        (made(*ALL), "amx", "JAXLLM_CPU=amx: the processor lacks it; it has avx512, avx2, plain"),
        (made(*AVX2), "avx512", "JAXLLM_CPU=avx512: the processor lacks it; it has avx2, plain"),
        (aarch64("aarch64", "", {}), "avx2", "it has neon, plain"),
        (made(), "avx2", "it has plain"),
    ],
)
def test_a_set_that_is_not_there_is_refused(present: processor.Processor, name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        restricted(present, name)


def test_kernels_of_two_sets_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    host = processor.host()
    first = compiling.register("named", Kernel(), None)
    assert first == f"named_{processor.current().name}"
    before = compiling._digest(first, Kernel())
    other = dataclasses.replace(host, has_int8_dot=not host.has_int8_dot)
    monkeypatch.setattr(processor, "current", lambda: other)
    assert compiling._digest(first, Kernel()) != before


def test_code_for_aarch64_has_its_own_instructions(monkeypatch: pytest.MonkeyPatch) -> None:

    def build(features: dict[str, bool]) -> tuple[str, bytes]:
        arm = aarch64("aarch64-linux-gnu", "", features)
        monkeypatch.setattr(processor, "current", lambda: arm)
        module = Linear(Kind("bfloat16", None, "bfloat16")).build("linear")
        return str(module), compiling.compile_for(arm, module)

    text, code = build({"bf16": True})
    assert "llvm.aarch64.neon.bfdot" in text
    assert "x86" not in text
    assert code[:4] == b"\x7fELF"
    assert code[18:20] == (183).to_bytes(2, "little")  # EM_AARCH64
    text, _ = build({})
    assert "bfdot" not in text
    assert "llvm.aarch64.hint" in text


GROUPS: list[tuple[dict[str, str], float | None]] = [
    ({}, None),
    ({"proc/self/cgroup": "0::/\n"}, None),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
    (
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "300000 100000\n",
        },
        2,
    ),
    (
        {  # a container sees its own group as the root, while the path is the host's
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/docker/abc\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        0.5,
    ),
    (
        {
            "proc/self/cgroup": "1:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
]


@pytest.mark.parametrize(("files", "expected"), GROUPS)
def test_quotas(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.quota(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (0.5, 1), (1.5, 2), (64.0, 8)])
def test_cores_are_no_more_than_the_quota(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(cores, "num_allowed", lambda: 8)
    monkeypatch.setattr(cores, "quota", lambda _: quota)
    assert cores.num_cores.__wrapped__() == expected


def test_the_interface_is_the_one_that_jaxlibs_header_states() -> None:
    header = Header()
    stated = tuple(int(header.define(f"XLA_FFI_API_{part}")) for part in ("MAJOR", "MINOR"))
    assert interface.refuse_interface() is None
    assert interface._probe().version == stated
    assert interface.refuse_version(stated) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [(1, 0), (0, 0), None])
def test_an_interface_with_other_structs_is_refused(
    version: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "version 0.1" in str(interface.refuse_version(version))
    monkeypatch.setattr(compiling, "refuse_interface", lambda: interface.refuse_version(version))
    with pytest.raises(RuntimeError, match=r"cannot run: the kernels know version 0\.1"):
        compiling._Registry()


def test_structs_are_laid_out_as_jaxlibs_header_says() -> None:
    header = Header()
    offsets = {
        "EXTENSION": header.offset("XLA_FFI_CallFrame", "extension_start"),
        "API": header.offset("XLA_FFI_CallFrame", "api"),
        "CONTEXT": header.offset("XLA_FFI_CallFrame", "ctx"),
        "ARGS": header.offset("XLA_FFI_CallFrame", "args"),
        "RETS": header.offset("XLA_FFI_CallFrame", "rets"),
        "COUNT": header.offset("XLA_FFI_Args", "size"),
        "BUFFERS": header.offset("XLA_FFI_Args", "args"),
        "DATA": header.offset("XLA_FFI_Buffer", "data"),
        "DIMS": header.offset("XLA_FFI_Buffer", "dims"),
        "EXTENSION_TYPE": header.offset("XLA_FFI_InternalExtension", "type"),
        "METADATA": header.offset("XLA_FFI_Metadata_Extension", "metadata"),
        "MAJOR": header.offset("XLA_FFI_Metadata", "api_version", "major_version"),
        "MINOR": header.offset("XLA_FFI_Metadata", "api_version", "minor_version"),
        "SCHEDULE": header.offset("XLA_FFI_Api", "XLA_FFI_ThreadPool_Schedule"),
        "NUM_THREADS": header.offset("XLA_FFI_Api", "XLA_FFI_ThreadPool_NumThreads"),
        "POOL_CONTEXT": header.offset("XLA_FFI_ThreadPool_Schedule_Args", "ctx"),
        "TASK": header.offset("XLA_FFI_ThreadPool_Schedule_Args", "task"),
        "TASK_DATA": header.offset("XLA_FFI_ThreadPool_Schedule_Args", "data"),
        "THREADS": header.offset("XLA_FFI_ThreadPool_NumThreads_Args", "num_threads"),
        "SCHEDULE_SIZE": header.size("XLA_FFI_ThreadPool_Schedule_Args"),
        "NUM_THREADS_SIZE": header.size("XLA_FFI_ThreadPool_NumThreads_Args"),
    }
    assert offsets == {name: value for name, value in vars(Fields).items() if name.isupper()}
    assert header.offset("XLA_FFI_Rets", "rets") == Fields.BUFFERS
    assert header.offset("XLA_FFI_Rets", "size") == Fields.COUNT
    assert f"XLA_FFI_Extension_Metadata = {METADATA}" in header.text
    assert VERSION == (0, 1)


class Header:
    """The C header of XLA's foreign function interface, with the sizes of a 64-bit machine."""

    def __init__(self) -> None:
        text = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
        self.text = re.sub(r"//.*", "", text)
        matches = re.findall(r"struct (\w+) \{(.*?)\n\}", self.text, re.DOTALL)
        self.structs = {name: [self.field(line) for line in body.split(";") if line.strip()] for name, body in matches}

    def define(self, name: str) -> str:
        return re.findall(rf"#define {name} (\d+)", self.text)[0]

    def field(self, line: str) -> tuple[str, str]:
        """Return a field's type and name."""
        if api := re.search(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", line):
            return "pointer", api[1]
        kind, name = line.strip().rsplit(maxsplit=1)
        return "pointer" if kind.endswith("*") else kind.removeprefix("const "), name

    def measure(self, kind: str) -> tuple[int, int]:
        """Return a type's size and alignment."""
        if kind in self.structs:
            alignment = max(self.measure(each)[1] for each, _ in self.structs[kind])
            return -(-self.end(kind) // alignment) * alignment, alignment
        scalars: dict[str, Any] = {"int": 4, "int32_t": 4, "uint32_t": 4, "XLA_FFI_Handler_Traits": 4}
        size = 4 if re.fullmatch(r"XLA_FFI_\w+(Type|Stage|Code)", kind) else scalars.get(kind, 8)
        return size, size

    def end(self, struct: str) -> int:
        *_, (kind, name) = self.structs[struct]
        return self.offset(struct, name) + self.measure(kind)[0]

    def size(self, struct: str) -> int:
        """Return a struct's size as it states it: to the end of its last field."""
        return self.end(struct)

    def offset(self, struct: str, field: str, *inner: str) -> int:
        at = 0
        for kind, name in self.structs[struct]:
            size, alignment = self.measure(kind)
            at = -(-at // alignment) * alignment
            if name == field:
                return at + (self.offset(kind, *inner) if inner else 0)
            at += size
        raise KeyError(field)


@pytest.mark.parametrize(("told", "has_it"), [("1\n", True), ("0\n", False), ("", False), (OSError("none"), False)])
def test_macos_tells_what_its_processor_has(told: str | OSError, has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if isinstance(told, OSError):
            raise told
        assert command[-1] in ("hw.optional.arm.FEAT_BF16", "hw.optional.arm.FEAT_I8MM")
        return subprocess.CompletedProcess(command, 0, told, "")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    assert processor._aarch64_features() == {"bf16": has_it, "i8mm": has_it}
