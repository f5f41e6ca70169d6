# On each of two nodes with 8 GPUs; node-a is one of them.
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id my-job --rdzv-backend c10d --rdzv-endpoint node-a:29500 train.py
