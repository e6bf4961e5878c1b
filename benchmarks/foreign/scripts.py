"""The scripts, where they come from, and how they are started. `diffs/` has the changed lines.

`NAME.elastic.diff` makes a script elastic. `NAME.here.diff` is what it takes to run it at all on processors and without a
network, and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.foreign import made_up

DIFFS = Path(__file__).with_name("diffs")


@dataclass(frozen=True)
class Repository:
    """Where scripts come from. `folder` is the name of its clone below `--sources`."""

    url: str
    commit: str
    folder: str


EXAMPLES = Repository("https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8", "examples")
LIGHTNING = Repository(
    "https://github.com/Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414", "pytorch-lightning"
)
TRANSFORMERS = Repository("https://github.com/huggingface/transformers", "v4.57.0", "transformers")
TORCHTITAN = Repository("https://github.com/pytorch/torchtitan", "v0.3.0", "torchtitan")
NANOGPT = Repository("https://github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", "nanoGPT")
DINO = Repository("https://github.com/facebookresearch/dino", "7c446df5b9f45747937fb0d72314eb9f7b66930a", "dino")
TIMM = Repository(
    "https://github.com/huggingface/pytorch-image-models",
    "aa4b5850c1543fa488abf260f18390eda46cf85d",
    "pytorch-image-models",
)
CIFAR = Repository(
    "https://github.com/kuangliu/pytorch-cifar", "49b7aa97b0c12fe0d4054e670403a16b6b834ddd", "pytorch-cifar"
)
MAKEMORE = Repository("https://github.com/karpathy/makemore", "988aa59e4d8fefa526d06f3b453ad116258398d4", "makemore")
VISION = Repository("https://github.com/pytorch/vision", "f7b1cfa8f7e10e0c157da6e55dc6f0237397faec", "vision")


@dataclass(frozen=True)
class Script:
    """One of them."""

    repository: Repository
    path: str
    """Of the script in the repository. All files of its folder are copied."""
    options: str
    """Of the script, in its own folder."""
    loss: str = ""
    """Pattern of its losses in the output; the last one counts. Empty: it is not moved on a loopback Slurm."""
    imports: tuple[str, ...] = ()
    """What the launcher imports first."""
    prepare: Callable[[Path], None] = lambda _: None
    """Makes the data up, in the script's folder."""
    tried: str | None = None
    """Options with which `penstock try` runs it, if it can."""
    pause_s: float = 0.4
    """Pause after each step of an optimiser until the job has been moved five times."""

    def added(self, name: str) -> int:
        """Number of lines that make it elastic."""
        lines = (DIFFS / f"{name}.elastic.diff").read_text().splitlines()
        return sum(line.startswith("+") and not line.startswith("+++") for line in lines)


TRAINER = "--do_train --use_cpu --output_dir out --logging_steps 10 --save_strategy no --seed 1 --report_to none"
TINY_GPT = (
    "--device=cpu --dtype=float32 --compile=False --dataset=words --n_layer=2 --n_head=2 --n_embd=32 --block_size=16"
)
TINY_RESNET = (
    "images --val-split val --model test_resnet --input-size 3 32 32 --num-classes 2 -j 1 --no-aug --no-prefetcher --opt adamw"
    " --lr 1e-3 --warmup-epochs 1 --model-ema --output out --device cpu"
)
SCRIPTS = {
    "imagenet": Script(
        EXAMPLES,
        "imagenet/main.py",
        "--no-accel -a squeezenet1_1 -b 8 --lr 0.01 -j 1 --epochs 16 -p 1 images",
        r"Epoch: \[15\].*Loss \S+ \((\S+)\)",
        ("torchvision",),
        made_up.images,
        "--no-accel -a squeezenet1_1 -b 8 --lr 0.01 -j 0 --epochs 3 -p 1 images",
        1.0,
    ),
    "vae": Script(
        EXAMPLES,
        "vae/main.py",
        "--no-accel --epochs 4",
        r"Test set loss: (\S+)",
        ("torchvision",),
        made_up.digits_beside,
        "--no-accel --epochs 2 --batch-size 512",
    ),
    "dcgan": Script(
        EXAMPLES,
        "dcgan/main.py",
        "--dataset fake --imageSize 64 --ngf 8 --ndf 8 --batchSize 16 --niter 3 --manualSeed 1 --workers 1",
        r"Loss_D: (\S+)",
        ("torchvision",),
        tried="--dataset fake --imageSize 64 --ngf 8 --ndf 8 --batchSize 64 --niter 2 --manualSeed 1 --workers 0",
    ),
    "word_language_model": Script(
        EXAMPLES,
        "word_language_model/main.py",
        "--model Transformer --use-optimizer --lr 0.002 --data words --emsize 32 --nhid 32 --epochs 6 --batch_size 20 --bptt 20",
        r"test loss\s+(\S+)",
        (),
        made_up.words,
        "--model Transformer --use-optimizer --lr 0.002 --data words --emsize 32 --nhid 32 --epochs 2 --bptt 20",
    ),
    "mingpt": Script(
        EXAMPLES,
        "distributed/minGPT-ddp/mingpt/main.py",
        "data_config.path=data/input.txt data_config.truncate=0.004 gpt_config.n_layer=2 gpt_config.n_head=2 gpt_config.n_embd=32"
        " trainer_config.max_epochs=4 trainer_config.batch_size=64 trainer_config.data_loader_workers=0"
        " trainer_config.use_amp=False optimizer_config.learning_rate=0.01",
        r"Train Loss (\S+)",
        tried="data_config.path=data/input.txt data_config.truncate=0.001 gpt_config.n_layer=2 gpt_config.n_head=2"
        " gpt_config.n_embd=32 trainer_config.max_epochs=2 trainer_config.batch_size=64 trainer_config.use_amp=False"
        " trainer_config.data_loader_workers=0 optimizer_config.learning_rate=0.01",
    ),
    "fsdp2": Script(EXAMPLES, "distributed/FSDP2/example.py", "", r"^loss (\S+)"),
    "run_glue": Script(
        TRANSFORMERS,
        "examples/pytorch/text-classification/run_glue.py",
        f"{TRAINER} --model_name_or_path tiny --train_file train.csv --validation_file train.csv --max_seq_length 16"
        " --per_device_train_batch_size 16 --num_train_epochs 4 --learning_rate 1e-3",
        r"'loss': '?([\d.e-]+)",
        ("transformers", "datasets", "evaluate"),
        made_up.sentences,
    ),
    "run_clm": Script(
        TRANSFORMERS,
        "examples/pytorch/language-modeling/run_clm.py",
        f"{TRAINER} --config_name tiny --tokenizer_name tiny --train_file train.txt --block_size 16"
        " --per_device_train_batch_size 16 --num_train_epochs 4 --learning_rate 1e-3",
        r"'loss': '?([\d.e-]+)",
        ("transformers", "datasets", "evaluate"),
        made_up.text,
    ),
    "lightning": Script(
        LIGHTNING,
        "examples/pytorch/basics/backbone_image_classifier.py",
        "--trainer.accelerator=cpu --trainer.devices=${SLURM_GPUS_ON_NODE:-1} --trainer.max_epochs=3 --data.batch_size=1024"
        " --model.learning_rate=0.001 --trainer.enable_progress_bar=false",
        r"test_loss\W+([\d.]+)",
        ("lightning.pytorch", "torchvision"),
        made_up.digits_for_lightning,
    ),
    "mnist": Script(
        LIGHTNING,
        "examples/fabric/image_classifier/train_torch.py",
        "--batch-size 32 --epochs 4 --lr 0.5",
        r"Average loss: (\S+),",
        ("torchvision",),
        made_up.digits_for_fabric,
        "--batch-size 64 --epochs 2 --lr 0.5",
    ),
    "torchtitan": Script(
        TORCHTITAN,
        "torchtitan/train.py",
        "--module llama3 --config llama3_debugmodel --training.steps 160 --training.seq-len 32 --training.global-batch-size 16"
        " --training.local-batch-size $((16 / ${SLURM_GPUS_ON_NODE:-1})) --training.mixed-precision-param float32"
        " --training.disable-cuda-graphs --metrics.disable-color-printing --debug.seed 1",
        r"loss:\s+(\S+)",
        ("datasets", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"),
        made_up.documents,
    ),
    "nanogpt": Script(
        NANOGPT,
        "train.py",
        f"{TINY_GPT} --batch_size=4 --gradient_accumulation_steps=4 --max_iters=300 --eval_interval=100 --eval_iters=20"
        " --warmup_iters=10 --lr_decay_iters=300 --learning_rate=1e-2",
        r"step 300: train loss (\S+),",
        prepare=made_up.tokens,
        pause_s=1.0,
        tried=f"{TINY_GPT} --batch_size=4 --gradient_accumulation_steps=4 --max_iters=30 --eval_interval=10 --eval_iters=2"
        " --warmup_iters=5 --lr_decay_iters=30 --learning_rate=1e-2",
    ),
    "dino": Script(
        DINO,
        "main_dino.py",
        "",
        prepare=made_up.images,
        tried="--arch vit_tiny --patch_size 8 --out_dim 32 --local_crops_number 2 --use_fp16 false --epochs 3 --warmup_epochs 1"
        " --batch_size_per_gpu 8 --num_workers 0 --data_path images/train --output_dir out --saveckp_freq 0",
    ),
    "timm": Script(
        TIMM,
        "train.py",
        f"{TINY_RESNET} -b 16 --epochs 16",
        r"Test: .*Loss:\s+\S+ \(\s*(\S+)\)",
        ("torchvision",),
        made_up.images,
        f"{TINY_RESNET} -b 8 --epochs 3",
        4.0,
    ),
    "torchvision": Script(
        VISION,
        "references/classification/train.py",
        "",
        prepare=made_up.images,
        tried="--data-path images --device cpu --model shufflenet_v2_x0_5 --batch-size 8 --epochs 3 --workers 0 --opt adamw"
        " --lr 1e-3 --train-crop-size 32 --val-crop-size 32 --val-resize-size 32 --label-smoothing 0.1 --clip-grad-norm 1"
        " --lr-scheduler cosineannealinglr --lr-warmup-epochs 1 --model-ema --model-ema-steps 2 --output-dir out",
    ),
    "digits": Script(
        EXAMPLES,
        "mnist/main.py",
        "--no-accel --epochs 20 --batch-size 32",
        r"Average loss: (\S+),",
        ("torchvision",),
        made_up.few_digits_beside,
        "--no-accel --epochs 3 --batch-size 32",
        1.0,
    ),
    "cifar": Script(CIFAR, "main.py", "", tried="--lr 0.01"),
    "makemore": Script(
        MAKEMORE, "makemore.py", "", tried="--num-workers 0 --max-steps 30 --n-layer 2 --n-embd 16 -b 8"
    ),
    "super_resolution": Script(
        EXAMPLES,
        "super_resolution/main.py",
        "",
        prepare=made_up.photos,
        tried="--upscale_factor 3 --batchSize 4 --nEpochs 2 --threads 0",
    ),
}
