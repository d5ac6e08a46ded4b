#!/usr/bin/env bash
# compile_check.sh [PART...]: compile every kernel, and the whole step of real models, with the real compilers of TPUs and
# GPUs, which need no device. A part's name up to its first hyphen stands for all such parts: `gpus` are Ampere, Ada and
# Blackwell. Each part prints a table and keeps its rows as JSON in benchmarks/results/compile_check;
# the script exits non-zero if a part misses anything. Without arguments all parts run: about three hours on two cores.
# The compilers are installed under .cache/compile-check (COMPILERS): jax with libtpu, its CUDA plugin and ptxas >= 13.3.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

JAX=0.12.0.1 OLD_JAX=0.11.2
declare -A libtpu=([$JAX]=$LIBTPU [$OLD_JAX]=0.0.48)
compilers=${COMPILERS:-.cache/compile-check} out=benchmarks/results/compile_check

make_environment() { # JAX
  local env=$compilers/jax-$1
  [ -e "$env/ready" ] && return
  say "making $env"
  mkdir -p "$compilers"
  "$(find_python)" -m venv --clear "$env" &&
    "$env/bin/python" -m pip install -q --disable-pip-version-check \
      "jax==$1" "jaxlib==$1" "libtpu==${libtpu[$1]}" "jax-cuda13-plugin==$1" "jax-cuda13-pjrt==$1" "nvidia-cuda-nvcc>=13.3" \
      -e . && touch "$env/ready" || die "could not make $env"
}

wanted=("$@") failed=() known=()
part() { # NAME JAX SCRIPT ARGUMENTS...
  local name=$1 jax=$2 start=$SECONDS env
  shift 2
  known+=("$name" "${name%%-*}")
  [ ${#wanted[@]} = 0 ] || [[ " ${wanted[*]} " == *" $name "* || " ${wanted[*]} " == *" ${name%%-*} "* ]] || return 0
  make_environment "$jax"
  env=$(cd "$compilers/jax-$jax" && pwd -P)
  say "$name"
  mkdir -p "$out"
  PATH=$(dirname "$(find "$env" -name ptxas -type f | head -1)"):$PATH PYTHONPATH=.:scripts \
    "$env/bin/python" "$@" --json "$out/$name.json" || failed+=("$name")
  say "$name: $((SECONDS - start)) s"
}

part kernels-v6e $JAX scripts/compile.py attention --target v6e:1x1
for target in v5e:1x1 tpu7x:1x1x1; do # a step runs all kernels; what differs are the numbers of tokens and sequences
  part "kernels-${target%%:*}" $JAX scripts/compile.py attention --target $target --steps mixed
done
part latents-v6e $JAX scripts/compile.py latents --target v6e:1x1 --steps mixed
for target in v5e:1x1 tpu7x:1x1x1; do
  part "latents-${target%%:*}" $JAX scripts/compile.py latents --target $target --steps mixed \
    --cases deepseek-v2-lite deepseek-v3 mistral-small-4
done
for target in v6e:1x1 v5e:1x1 tpu7x:1x1x1; do # sparse attention
  part "latents-chosen-${target%%:*}" $JAX scripts/compile.py latents --target $target --steps mixed \
    --cases deepseek-v3.2 deepseek-v3.2-128k glm-5 glm-5-128k --kv bfloat16
  part "indexer-${target%%:*}" $JAX scripts/compile.py indexer --target $target
done
part grouped-matmul-v6e $JAX scripts/compile.py grouped_matmul --target v6e:1x1
for target in v5e:1x1 tpu7x:1x1x1; do
  part "grouped-matmul-${target%%:*}" $JAX scripts/compile.py grouped_matmul --target $target --steps decode
done
part kernels-h100 $JAX scripts/compile.py attention --target h100
next_kernels="--next --kernels decode prefill prefill-row-ends" # see gpu/handover.py
part kernels-h100-next $JAX scripts/compile.py attention --target h100 $next_kernels
part kernels-h100-float16 $JAX scripts/compile.py attention --target h100 --dtype float16 --cases llama-3-8b gemma-2-2b-sliding
for target in a100 rtx3090 l4 rtx5090; do # every compute capability that has the kernels of gpu_mma
  part "kernels-$target" $JAX scripts/compile.py attention --target $target
done
for target in b200 gb300; do # prefill with heads of 256 spills some registers there
  part "kernels-$target" $JAX scripts/compile.py attention --target $target \
    --cases llama-3.2-1b llama-3-8b qwen3-0.6b llama-2-7b gpt-oss-20b-sliding
done
part latents-h100 $JAX scripts/compile.py latents --target h100
part latents-chosen-h100 $JAX scripts/compile.py latents --target h100 --cases deepseek-v3.2{,-128k} glm-5{,-128k}
part indexer-h100 $JAX scripts/compile.py indexer --target h100
part grouped-matmul-h100 $JAX scripts/compile.py grouped_matmul --target h100
part states-decode-h100 $JAX scripts/compile.py state_decodes --target h100
part linear-v6e $JAX scripts/compile.py linear --target v6e:1x1 --matrices 4096x4096
for target in v5e:1x1 tpu7x:1x1x1; do
  part "linear-${target%%:*}" $JAX scripts/compile.py linear --target $target --matrices 4096x4096 --rows 1 2000
done
part linear-v6e-large $JAX scripts/compile.py linear --target v6e:1x1 --matrices 5120x25600 --formats awq q4_k fp8-block
part linear-h100 $JAX scripts/compile.py linear --target h100 --rows 1 16 64 256 512
for target in a100 rtx3090 l4 rtx4090 rtx5090 b200; do
  part "linear-$target" $JAX scripts/compile.py linear --target $target --rows 1 16 64 256 512 --matrices 4096x14336
done
part linear-a100-old-jax $OLD_JAX scripts/compile.py linear --target a100 --rows 1 64 512 --matrices 4096x4096
part linear-rtx5090-old-jax $OLD_JAX scripts/compile.py linear --target rtx5090 --rows 1 64 512 --matrices 4096x4096
for target in h100 l40s b200; do
  part "linear-float8-$target" $JAX scripts/compile.py linear --target $target --float8 --matrices 4096x4096 --rows 8 512
done
part linear-h100-old-jax $OLD_JAX scripts/compile.py linear --target h100 --rows 1 64 512 --matrices 4096x4096
part linear-rare-v6e $JAX scripts/compile.py linear --target v6e:1x1 --rare --rows 1 512 --matrices 4096x4096
part linear-rare-h100 $JAX scripts/compile.py linear --target h100 --rare --rows 1 256 --matrices 4096x4096
part states-v6e $JAX scripts/compile.py states --target v6e:1x1 --steps prefill # a step runs both kernels
for target in v5e:1x1 tpu7x:1x1x1; do
  part "states-${target%%:*}" $JAX scripts/compile.py states --target $target --steps prefill \
    --cases qwen3.5-27b kimi-linear-48b-a3b nemotron-h-8b
done
part states-h100 $JAX scripts/compile.py states --target h100
part kernels-v6e-old-jax $OLD_JAX scripts/compile.py attention --target v6e:1x1 --steps mixed
part kernels-h100-old-jax $OLD_JAX scripts/compile.py attention --target h100
part kernels-h100-next-old-jax $OLD_JAX scripts/compile.py attention --target h100 $next_kernels
part kernels-a100-old-jax $OLD_JAX scripts/compile.py attention --target a100
part states-decode-h100-old-jax $OLD_JAX scripts/compile.py state_decodes --target h100
part steps-v5e $JAX scripts/compile.py steps --target v5e:1x1 llama-3.2-1b # 8 B parameters do not fit one v5e
for model in llama-3.2-1b llama-3-8b qwen3-8b; do
  part "steps-v6e-$model" $JAX scripts/compile.py steps --target v6e:1x1 $model
  part "steps-h100-$model" $JAX scripts/compile.py steps --target h100 $model
done
for model in minilm-l6 bert-base modernbert-base embeddinggemma-300m qwen3-embedding-0.6b; do
  # Plain XLA, which heads of 32 are left to, turns the pool around in each layer on a TPU.
  [ $model = minilm-l6 ] || part "steps-v6e-$model" $JAX scripts/compile.py steps --target v6e:1x1 $model
  part "steps-h100-$model" $JAX scripts/compile.py steps --target h100 $model
done
# Models that see: plain steps, and the programs that encode pictures.
part segment-attention-v6e $JAX scripts/compile.py segment_attention --target v6e:1x1
part segment-attention-h100 $JAX scripts/compile.py segment_attention --target h100
seeing() { # NAME TARGET MODEL ARGUMENTS...
  part "$1" $JAX scripts/compile.py steps --target "${@:2}" --steps "encode picture" "encode largest" decode largest
}
seeing steps-v6e-qwen3-vl-8b v6e:1x1 qwen3-vl-8b
seeing steps-v6e-gemma-3-4b v6e:1x1 gemma-3-4b --layers 12
seeing steps-v6e-2x2-mistral-small-3.1 v6e:2x2 mistral-small-3.1 --layers 12 --tensor-parallel-size 2
for model in qwen3-vl-8b gemma-3-4b mistral-small-3.1; do
  seeing "steps-h100-$model" h100 $model --layers 8
done
# A model that hears: steps with the rules of transcripts, the program that encodes a clip, and those that align.
speech() { # NAME JAX TARGET MODEL
  part "$1" "$2" scripts/compile.py steps --target "$3" "$4" --steps "encode clip" decode "${@:5}"
}
speech speech-v6e-whisper-large-v3 $JAX v6e:1x1 whisper-large-v3
for model in whisper-large-v3 whisper-large-v3-turbo; do
  speech "speech-h100-$model" $JAX h100 $model "align largest" largest
done
speech speech-h100-old-jax $OLD_JAX h100 whisper-large-v3-turbo
# LoRA adapters: eight in use, of rank 16.
part steps-h100-adapters $JAX scripts/compile.py steps --target h100 llama-3-8b --adapters 8 16
part steps-v6e-adapters $JAX scripts/compile.py steps --target v6e:1x1 llama-3-8b --layers 28 --adapters 8 16 # as many as fit
part steps-v6e-2x2-adapters $JAX scripts/compile.py steps --target v6e:2x2 llama-3-8b --tensor-parallel-size 4 --adapters 8 16 \
  --steps decode largest "set adapter"
part steps-h100-old-jax $OLD_JAX scripts/compile.py steps --target h100 llama-3-8b
part start-h100 $JAX scripts/compile.py steps --target h100 llama-3-8b --start # the programs of a start, one by one
part steps-v5e-2x2 $JAX scripts/compile.py steps --target v5e:2x2 llama-3.2-1b --tensor-parallel-size 4
for target in v6e:2x4 v5p:2x2x2; do
  part "steps-${target//:/-}" $JAX scripts/compile.py steps --target $target llama-3.2-1b --tensor-parallel-size 8
done
experts() { # NAME TARGET MODEL ARGUMENTS...: the full step's sampling is that of the other models
  part "$1" $JAX scripts/compile.py steps --target "${@:2}" --steps decode largest
}
for model in qwen3-30b-a3b gpt-oss-20b mixtral-8x7b; do
  experts "steps-h100-$model" h100 $model --layers 8
done
# Hybrids, with states and attention, and models with latents, on meshes that `jaxllm check` says hold them.
experts steps-h100-qwen3.6-27b h100 qwen3.6-27b
experts steps-h100-qwen3.6-35b-a3b h100 qwen3.6-35b-a3b --layers 8
experts steps-h100-deepseek-v2-lite h100 deepseek-v2-lite --layers 3
experts steps-h200x8-deepseek-v3 h200 deepseek-v3 --layers 5 --tensor-parallel-size 8 --quantized
experts steps-v6e-2x2-qwen3.6-27b v6e:2x2 qwen3.6-27b --layers 16 --tensor-parallel-size 4
experts steps-tpu7x-qwen3.6-27b tpu7x:1x1x1 qwen3.6-27b --layers 8
experts steps-v6e-2x2-qwen3.6-35b-a3b v6e:2x2 qwen3.6-35b-a3b --layers 8 --tensor-parallel-size 4
experts steps-tpu7x-qwen3.6-35b-a3b tpu7x:1x1x1 qwen3.6-35b-a3b --layers 8
experts steps-v5e-2x2-deepseek-v2-lite v5e:2x2 deepseek-v2-lite --layers 6 --tensor-parallel-size 4
experts steps-v6e-deepseek-v2-lite v6e:1x1 deepseek-v2-lite --layers 6
experts steps-tpu7x-2x2x2-deepseek-v3 tpu7x:2x2x2 deepseek-v3 --layers 5 --tensor-parallel-size 16 --quantized
# Slices of several hosts, all layers.
experts steps-v5p-2x2x4-llama-3.1-405b v5p:2x2x4 llama-3.1-405b --tensor-parallel-size 16
experts steps-v5p-2x4x4-llama-3.1-405b v5p:2x4x4 llama-3.1-405b --tensor-parallel-size 32
experts steps-v5p-2x4x4-deepseek-v3 v5p:2x4x4 deepseek-v3 --tensor-parallel-size 32 --enable-expert-parallel
experts steps-h100-gemma-4-26b h100 gemma-4-26b --layers 12
experts steps-v6e-qwen3-30b-a3b v6e:1x1 qwen3-30b-a3b --layers 16 # as many as one v6e holds
experts steps-v6e-gpt-oss-20b v6e:1x1 gpt-oss-20b --layers 12
experts steps-v6e-gemma-4-26b v6e:1x1 gemma-4-26b --layers 12
experts steps-v6e-mixtral-8x7b v6e:1x1 mixtral-8x7b --layers 6
experts steps-v5e-qwen3-30b-a3b v5e:1x1 qwen3-30b-a3b --layers 8
experts steps-v5e-gpt-oss-20b v5e:1x1 gpt-oss-20b --layers 4
experts steps-v5e-2x2-gemma-4-26b v5e:2x2 gemma-4-26b --tensor-parallel-size 4
experts steps-v5e-mixtral-8x7b v5e:1x1 mixtral-8x7b --layers 2
for model in qwen3-30b-a3b gemma-4-26b; do
  experts "steps-v6e-2x2-$model" v6e:2x2 $model --tensor-parallel-size 4
done
experts steps-v5e-2x2-gpt-oss-20b v5e:2x2 gpt-oss-20b --tensor-parallel-size 4
experts steps-v6e-2x4-mixtral-8x7b v6e:2x4 mixtral-8x7b --tensor-parallel-size 8
experts steps-v6e-2x4-deepseek-v3 v6e:2x4 deepseek-v3 --layers 5 --tensor-parallel-size 8 --quantized # float8 in blocks
for model in glm-5 deepseek-v3.2; do # sparse attention
  experts "steps-v6e-2x4-$model" v6e:2x4 $model --layers 5 --tensor-parallel-size 8 --quantized
  experts "steps-tpu7x-2x2x2-$model" tpu7x:2x2x2 $model --layers 5 --tensor-parallel-size 16 --quantized
  experts "steps-h200x8-$model" h200 $model --layers 5 --tensor-parallel-size 8 --quantized
done
# Decays of keys (KDA) beside latents.
experts steps-h100-kimi-linear-48b h100 kimi-linear-48b --layers 4
experts steps-v6e-2x2-kimi-linear-48b v6e:2x2 kimi-linear-48b --layers 4 --tensor-parallel-size 4
experts steps-tpu7x-2x2x1-kimi-linear-48b tpu7x:2x2x1 kimi-linear-48b --layers 4 --tensor-parallel-size 4
# GPUs other than Hopper's, a few layers: what has no kernel for them is one CUDA graph in plain XLA.
for target in a100 rtx3090 rtx4090 l4 b200 rtx5090; do
  part "gpus-$target" $JAX scripts/compile.py steps --target $target llama-3-8b qwen3-8b-awq qwen3-30b-a3b --quantized --layers 2 \
    --steps smallest decode largest
done
part gpus-full-a100 $JAX scripts/compile.py steps --target a100 qwen3-8b-awq --quantized --layers 2 --steps "decode truncated" full
part gpus-mxfp4-rtx4090 $JAX scripts/compile.py steps --target rtx4090 gpt-oss-20b --layers 2 --quantized --steps smallest decode
part gpus-states-a100 $JAX scripts/compile.py steps --target a100 qwen3.6-27b --layers 4 --steps decode largest
part gpus-latents-a100 $JAX scripts/compile.py steps --target a100 deepseek-v2-lite --layers 3 --steps decode largest
part gpus-linear-rare-rtx4090 $JAX scripts/compile.py linear --target rtx4090 --rare --rows 1 64 --matrices 4096x4096
part gpus-old-jax $OLD_JAX scripts/compile.py steps --target rtx4090 qwen3-8b-awq qwen3-30b-a3b --quantized --layers 2 \
  --steps smallest decode
part capacity $JAX scripts/check.py capacity # sharded steps among them

for name in "${wanted[@]}"; do
  [[ " ${known[*]} " == *" $name "* ]] || die "there is no part $name; there are ${known[*]}"
done
[ ${#failed[@]} = 0 ] || die "missed: ${failed[*]}"
