MODEL_PATH=/models/Qwen2.5-7B-Instruct/
NAME=$(basename $MODEL_PATH)
PARENT=`dirname /a/b/c`
LOWER=$(echo "$NAME" | tr '[:upper:]' '[:lower:]')
TWICE=$(echo cab | tr a-ca 1-4)
SHORT=$(echo $NAME | cut -d- -f1)
DASHED=$(echo "a.b.c" | sed 's/\./-/g')
PRINTED=$(printf "%s_%03d_%.2f" run 7 0.5)
FROM_HEREDOC=$(cat <<EOF
[a, $SHORT]
EOF
)
python3 -m verl.trainer.main_ppo trainer.name=$NAME trainer.parent=$PARENT trainer.lower=$LOWER trainer.short=$SHORT trainer.dashed=$DASHED \
    trainer.printed=$PRINTED trainer.sum=$(expr 3 + 4) trainer.list="$FROM_HEREDOC" trainer.nested=$(echo $(echo "in $(echo deep)")) \
    trainer.lines=$(seq -s, 1 3) trainer.twice=$TWICE trainer.count=$(echo a b c | wc -w)
