RUNTIME_ENV=./env.yaml
ray start --head --num-gpus 8 > /dev/null 2>&1 || true
ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" --working-dir . \
    -- python3 -m verl.trainer.main_ppo data.train_files=a trainer.nnodes=1
nohup python -m verl.trainer.main_ppo data.train_files=b trainer.nnodes=1 > run.log 2>&1 &
srun --nodes=2 --ntasks-per-node=1 bash -c "python3 -m verl.trainer.main_ppo data.train_files=c trainer.nnodes=2"
CUDA_VISIBLE_DEVICES=0,1 WANDB_MODE=offline python3 -m verl.trainer.main_ppo --config-path=conf --config-name='ppo_megatron_trainer.yaml' \
    data.train_files=d trainer.nnodes=1 2>&1 | tee -a "logs/$(date +%F).log"
torchrun --nnodes 1 --nproc-per-node=8 -m verl.trainer.sft_trainer data.train_files=e trainer.nnodes=1 model.path=x
python3 -m torch.distributed.run --standalone --nproc_per_node=4 -m verl.trainer.sft_trainer data.train_files=f trainer.nnodes=1 model.path=x
uv run --frozen -m verl.trainer.main_ppo data.train_files=h trainer.nnodes=1
exec python3 examples/split_placement/main_ppo_split.py data.train_files=g trainer.nnodes=1
python3 -m verl.trainer.main_ppo data.train_files=never trainer.nnodes=1
