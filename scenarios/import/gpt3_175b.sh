#!/bin/bash
# GPT-3 175B on 16 nodes, in the manner of Megatron's example scripts
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-16}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINTS=$1 # where weights go
DISTRIBUTED=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
)
MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size $(( WORLD_SIZE * 12 ))
    --lr 6.0e-5 --min-lr -1e-6
    --clip-grad 1.0
    --fp16
)
PARALLEL=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8)
PARALLEL+=(--sequence-parallel --use-distributed-optimizer)
DATA="--data-path a b \
      --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json"
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py \
    ${MODEL[@]} ${TRAINING[@]} "${PARALLEL[@]}" $DATA \
    --save "$CHECKPOINTS" 2>&1 | tee log.txt
