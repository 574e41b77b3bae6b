cat > config.json <<'EOF'
{"not": "$a command", `neither` $(this)}
python3 -m verl.trainer.main_ppo trainer.never=1 trainer.nnodes=9
EOF
NODES=2
bash <<EOF
python3 -m verl.trainer.main_ppo trainer.nnodes=$NODES trainer.inner=\$((1 + 1))
EOF
bash -s <<-'EOF'
	X=5
	python3 -m verl.trainer.main_ppo trainer.nnodes=1 trainer.x=$X trainer.outer=${NODES:-unset}
	EOF
cat <<A <<B | head -1
first
A
second
B
python3 -m verl.trainer.main_ppo trainer.nnodes=1 trainer.after=1
