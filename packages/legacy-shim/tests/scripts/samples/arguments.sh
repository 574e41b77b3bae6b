if [ "$#" -lt 2 ]; then
    echo "Usage: $0 <nproc_per_node> <save_path> [other_configs...]"
    exit 1
fi
nproc_per_node=$1
save_path=$2
shift 2
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node \
    -m verl.trainer.fsdp_sft_trainer \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.micro_batch_size=4 \
    model.partial_pretrain=google/gemma-2b-it \
    trainer.default_local_dir=$save_path \
    trainer.logger='["console"]' $@
