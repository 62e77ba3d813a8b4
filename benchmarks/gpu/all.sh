#!/usr/bin/env bash
# Everything on two GPUs: bash benchmarks/gpu/all.sh OUT   (from the root; OUT gets JSON and logs)
# Needs torch with CUDA, transformers and megatron-core; benchmarks that are timed have both GPUs, or one each, to themselves.
set -u
out=$1 here=benchmarks/gpu
mkdir -p "$out/logs"
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD PYTHONWARNINGS=ignore GRADPRUNE_TEST_TIMEOUT=60 OMP_NUM_THREADS=4

on() { # on GPU NAME SECONDS ARGUMENTS: one program on one GPU
    local gpu=$1 name=$2 limit=$3
    shift 3
    CUDA_VISIBLE_DEVICES=$gpu MASTER_PORT=2952$gpu timeout "$limit" python3 "$@" >"$out/logs/$name.log" 2>&1
    echo "$name: exit $? at $(date +%T)"
}

both() { # both NAME SECONDS ARGUMENTS: ranks.py on two GPUs
    local name=$1 limit=$2
    shift 2
    timeout "$limit" python3 -m torch.distributed.run --nproc-per-node 2 $here/ranks.py "$@" --out "$out/$name.json" \
        >"$out/logs/$name.log" 2>&1
    echo "$name: exit $? at $(date +%T)"
}

(
    on 0 exactness_megatron 120 $here/exactness.py --only megatron --out "$out/exactness_megatron.json"
    on 0 cuda_graphs 90 -m pytest -q -m gpu tests/wrapping/test_cuda_graphs.py
) &
on 1 exactness_hugging_face 150 $here/exactness.py --only hugging_face --out "$out/exactness_hugging_face.json" &
wait
both ranks_pp2 100 --pipeline 2 --sequences 32 --repeats 2
both ranks_dp2 100 --distributed-optimizer --sequences 64 --repeats 2
(
    on 0 megatron 180 $here/saving.py --model megatron --layers 24 --repeats 2 --out "$out/megatron.json"
    on 0 megatron_recompute 150 $here/saving.py --model megatron --recompute --repeats 1 --shares 0 0.6 1 \
        --out "$out/megatron_recompute.json"
) &
(
    on 1 hf_recompute 200 $here/saving.py --model hugging_face --recompute --repeats 2 --shares 0 0.6 1 \
        --out "$out/hf_recompute.json"
    on 1 hf_compiled 130 $here/saving.py --model hugging_face --compile --layers 8 --repeats 2 --shares 0 0.6 1 \
        --out "$out/hf_compiled.json"
    on 1 memory 70 $here/memory.py --out "$out/memory.json"
) &
wait
timeout 600 python3 -m tests.megatron.matrix "$out/matrix.md" --device cuda >"$out/logs/matrix.log" 2>&1
echo "matrix: exit $? at $(date +%T)"
