#!/bin/bash
# Korthikanti et al. 2022, the 22B model: sequence parallelism, core attention recomputed
OPTIONS=" \
    --num-layers 48 --hidden-size 6144 --num-attention-heads 64 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 4 --global-batch-size 4 \
    --tensor-model-parallel-size 8 --sequence-parallel \
    --padded-vocab-size 51200 --bf16 --transformer-impl local \
    --recompute-activations"
srun bash -c "python -u pretrain_gpt.py $OPTIONS"
