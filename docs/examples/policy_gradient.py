#!/usr/bin/env python3
"""Train a Llama by policy gradients: `LLM` makes the rollouts, and optax the updates, in one process.

    pip install 'jaxllm[rl]'
    python docs/examples/policy_gradient.py MODEL --updates 20

The trainer holds the checkpoint's tensors in float32 under HF's names. After every update it hands them to the engine,
rounded to the checkpoint's dtypes: the policy is the rounded tensors, in the engine and in the trainer's forward. The
reward is the share of even token ids in an answer: put a real one in place of `reward`. MODEL is the folder of a Llama
without biases and scaled RoPE; for another family only `forward` is different.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from safetensors.numpy import load_file

from jaxllm import LLM, RequestOutput, SamplingParams, TokensPrompt

type Tensors = dict[str, Array]

NUM_ROLLOUTS, NUM_TOKENS = 16, 24


class Update(NamedTuple):
    """What one update has seen."""

    version: str | int
    """The version of the weights that made the rollouts."""
    reward: float
    """The mean of the rollouts' rewards."""
    difference: float
    """The most by which a token's log-probability differs between the engine and the trainer."""


def read_tensors(folder: Path) -> Tensors:
    """Return a checkpoint's tensors by HF's names."""
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: jnp.asarray(tensor) for tensors in files for name, tensor in tensors.items()}


def forward(config: Mapping[str, Any], tensors: Tensors, ids_bt: Array) -> Array:
    """Return a Llama's logits, [b, t, v], of token ids [b, t]."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_parameters", config)["rope_theta"]
    angles_td = jnp.arange(ids_bt.shape[1])[:, None] * theta ** (-jnp.arange(0, size, 2) / size)
    mask_ts = jnp.tril(jnp.ones((ids_bt.shape[1],) * 2, bool))

    tensors = {name: tensor.astype(jnp.float32) for name, tensor in tensors.items()}

    def norm(x: Array, name: str) -> Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config["rms_norm_eps"]) * tensors[name]

    def project(x: Array, name: str) -> Array:
        return jnp.matmul(x, tensors[name].T, precision="highest")

    def rotate(x_bthd: Array) -> Array:
        first, second = jnp.split(x_bthd, 2, axis=-1)
        cos, sin = jnp.cos(angles_td)[:, None], jnp.sin(angles_td)[:, None]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def split(x: Array, count: int) -> Array:
        return x.reshape(*x.shape[:2], count, size)

    x = tensors["model.embed_tokens.weight"][ids_bt]
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        hidden = norm(x, f"{path}.input_layernorm.weight")
        queries = rotate(split(project(hidden, f"{path}.self_attn.q_proj.weight"), heads))
        keys = rotate(split(project(hidden, f"{path}.self_attn.k_proj.weight"), kv_heads))
        values = split(project(hidden, f"{path}.self_attn.v_proj.weight"), kv_heads)
        keys, values = (jnp.repeat(each, heads // kv_heads, axis=2) for each in (keys, values))
        scores = jnp.einsum("bthd,bshd->bhts", queries, keys, precision="highest") * size**-0.5
        shares = jax.nn.softmax(jnp.where(mask_ts, scores, -jnp.inf))
        attended = jnp.einsum("bhts,bshd->bthd", shares, values, precision="highest")
        x += project(attended.reshape(*attended.shape[:2], -1), f"{path}.self_attn.o_proj.weight")
        hidden = norm(x, f"{path}.post_attention_layernorm.weight")
        gate, up = (project(hidden, f"{path}.mlp.{name}_proj.weight") for name in ("gate", "up"))
        x += project(jax.nn.silu(gate) * up, f"{path}.mlp.down_proj.weight")
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return project(norm(x, "model.norm.weight"), head)


def logprobs(config: Mapping[str, Any], tensors: Tensors, ids_bt: Array, num_tokens: int) -> Array:
    """Return the log-probabilities of the last tokens, [b, num_tokens], after all before them."""
    logits = forward(config, tensors, ids_bt)[:, -num_tokens - 1 : -1]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), ids_bt[:, -num_tokens:, None], axis=-1)[..., 0]


def reward(output: RequestOutput) -> list[float]:
    """Return the reward of each answer to a prompt."""
    return [float(np.mean(np.array(answer.token_ids) % 2 == 0)) for answer in output.outputs]


def train(llm: LLM, folder: Path, prompt: list[int], num_updates: int, rate: float) -> Iterator[tuple[Update, Tensors]]:
    """Update the weights of an engine; yield what each update has seen and the tensors that it has handed over.

    An update has version `i` for the `i`-th, from 1 on.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = read_tensors(folder)
    dtypes = {name: tensor.dtype for name, tensor in stored.items()}
    masters = {name: tensor.astype(jnp.float32) for name, tensor in stored.items()}
    optimizer = optax.adam(rate)
    state = optimizer.init(masters)

    def rounded(masters: Tensors) -> Tensors:
        return {name: tensor.astype(dtypes[name]) for name, tensor in masters.items()}

    @jax.jit
    def step(masters: Tensors, state: Any, ids_bt: Array, advantages_b: Array) -> tuple[Tensors, Tensors, Any, Array]:
        def loss(masters: Tensors) -> tuple[Array, Array]:
            chosen = logprobs(config, rounded(masters), ids_bt, NUM_TOKENS)
            return -jnp.mean(chosen * advantages_b[:, None]), chosen

        gradients, chosen = jax.grad(loss, has_aux=True)(masters)
        changes, state = optimizer.update(gradients, state)
        masters = jax.tree.map(jnp.add, masters, changes)
        return masters, rounded(masters), state, chosen

    for number in range(num_updates):
        params = SamplingParams(n=NUM_ROLLOUTS, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
        [output] = llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
        version, rewards = llm.get_weight_version(), np.array(reward(output), np.float32)
        ids = np.array([[*prompt, *answer.token_ids] for answer in output.outputs], np.int32)
        masters, tensors, state, chosen = step(masters, state, ids, rewards - rewards.mean())
        difference = float(np.abs(np.asarray(chosen) - rollout_logprobs(output)).max())
        llm.update_weights(tensors, version=number + 1)
        yield Update(version, float(rewards.mean()), difference), tensors


def rollout_logprobs(output: RequestOutput) -> np.ndarray:
    """Return the engine's log-probabilities of the tokens that it has drawn, [rollouts, tokens]."""
    return np.array(
        [
            [some[token].logprob for token, some in zip(answer.token_ids, answer.logprobs or (), strict=True)]
            for answer in output.outputs
        ]
    )


def main() -> None:
    """Train, and print what each update has seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder")
    parser.add_argument("--updates", type=int, default=20, help="default: 20")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate; default: 1e-3")
    parser.add_argument("--dtype", default="float32", help="of the engine; default: float32")
    args = parser.parse_args()
    with LLM(str(args.model), dtype=args.dtype, skip_tokenizer_init=True, disable_log_stats=True) as llm:
        for update, _ in train(llm, args.model, list(range(3, 19)), args.updates, args.rate):
            print(f"version {update.version}: reward {update.reward:.3f}, {update.difference:.1e} apart")  # noqa: T201


if __name__ == "__main__":
    main()
