#!/usr/bin/env bash
# Comments, joined lines, and lines that were never joined.
set -x
export VLLM_ATTENTION_BACKEND=XFORMERS   # a comment after a command

python3 -m verl.trainer.main_ppo \
    data.train_files=a.parquet \
  data.val_files=b#not_a_comment.parquet \
	trainer.total_epochs=15 trainer.nnodes=1 \

PYTHONUNBUFFERED=1 python3 -u -m verl.trainer.main_ppo data.train_files=a data.val_files=b \
    data.train_batch_size=10\
24 trainer.nnodes=1 # the number above is one word
echo done; python3 -m verl.trainer.main_ppo trainer.nnodes=1 \
    trainer.save_freq=5 \ 
    data.lost_override=1
